"""Runs with Penstock, played by its simulators: the loader's own code decides, in virtual time.

One node is played event by event (`simulate.predict`), several times with other draws: how many
requests a loader finds best is a search among noisy times, and one run is not like the next. Few
ranks on several nodes are played as one node that has the tiers of all, plus what their links cost;
many ranks are steps in bulk (`simulate.run`, policy `ours`), plus what a step of one node takes
beyond its bulk figure: bulk knows averages only. Large data sets are played in small, with caches
in proportion.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from penstock.flow.planning import requests_max
from penstock.machine import Curve, LinkModel, Machine, StoreModel, TierModel
from penstock.report.model.constants import RunConstants
from penstock.report.model.observed import step_s_of
from penstock.report.model.played import (
    NO_CHANCE,
    STALL_NONE,
    RunDeviation,
    SimulatedRun,
    nearest_limit,
)
from penstock.report.model.settings import RunSettings
from penstock.report.model.store_fit import Floats, StoreFit
from penstock.report.model.what_if import WhatIf
from penstock.simulate import (
    Costs,
    LoaderRun,
    Prediction,
    Samples,
    Weather,
    predict,
    run,
)
from penstock.simulate.scenario import DatasetTable, JobTable, LoaderTable, Scenario

EPOCHS_MAX = 3
"""Epochs that are played; all later ones are like the third."""
SAMPLES_MAX = 2000
"""Samples of an epoch of one node that are played one by one."""
RANKS_MAX = 16
"""Ranks that are played one by one; more of them are steps in bulk."""
_PLAYS_SAMPLES, _PLAYS_MAX = 4000, 6
"""Samples of all plays together, and plays at most: long ones are an average in themselves."""
_BULK_CHANCE = RunDeviation(step=0.12, first_epoch=0.04, stall_share=0.06)
"""How far off steps in bulk were in the runs of several nodes behind the table of residuals."""
_LINK_CHANCE = RunDeviation(step=0.1, first_epoch=0.04, stall_share=0.06)
"""How far off steps were that waited for links between nodes."""
MEETING_S = 0.15
"""Until the nodes of a run have met: what it took several processes of one machine."""
BULK_SAMPLES_MAX = 200_000
_STEPS_LEAST = 12
LINK_BYTES_S = 1.25e9
"""Between nodes, where neither the run nor the question says: 10 Gbit/s."""
_FAST = 1e12
_MEMORY_BYTES_S = 5e9
_DISK_BYTES_S = 1e9
_DRAWS_MAX = 4000


@dataclass(frozen=True, kw_only=True)
class _Course:
    """A run as a simulator played it, scaled to its real length."""

    step_s: float
    epoch_s: tuple[float, ...]
    store_bytes: float
    peer_bytes: float
    busy_s: float
    """The training loop's own part of a step, waiting for other ranks included."""
    stall_share: float
    chance: RunDeviation = NO_CHANCE


def expected_max(draws: Floats, count: int) -> float:
    """Return the mean of the largest of so many draws.

    >>> round(expected_max(np.arange(1000) / 999, 3), 2)
    0.75
    """
    if count == 1:
        return float(draws.mean())
    shares = (np.arange(512) + 0.5) / 512
    return float(np.quantile(draws, shares ** (1 / count)).mean())


def played_penstock(
    constants: RunConstants, settings: RunSettings, what_if: WhatIf
) -> SimulatedRun:
    """Play a run with some changes."""
    if settings.nodes == 1:
        course = _one_node(constants, settings, what_if)
    elif settings.num_ranks <= RANKS_MAX:
        course = _few_ranks(constants, settings, what_if)
    else:
        course = _many_nodes(constants, settings, what_if)
    stall = course.stall_share
    return SimulatedRun(
        chance=course.chance,
        step_s=course.step_s,
        epoch_s=course.epoch_s,
        stall_share=stall,
        store_bytes=course.store_bytes,
        peer_bytes=course.peer_bytes,
        memory_bytes=_memory_bytes(constants, settings),
        limit=_limit(constants, settings, what_if, course, stall),
    )


def _memory_bytes(constants: RunConstants, settings: RunSettings) -> float:
    """Return the memory of a node: its cache, and batches on their way at their most."""
    ahead = min(settings.look_ahead_bytes, settings.dataset_bytes)
    own = settings.workers * constants.worker_bytes
    return settings.ranks_per_node * (ahead + own) + (settings.memory_cache_bytes or 0)


def _limit(
    constants: RunConstants,
    settings: RunSettings,
    what_if: WhatIf,
    course: _Course,
    stall: float,
) -> str:
    if stall < STALL_NONE:
        alone = float(constants.computed_s(settings.batch_size, what_if).mean())
        waits = course.busy_s > 1.1 * (alone + constants.hand_over_s) and settings.num_ranks > 1
        return "barrier" if waits else "compute"
    step_bytes = settings.batch_size * settings.num_ranks * settings.sample_bytes
    store, making = constants.store_for(what_if), constants.making_for(what_if)
    link = what_if.link_bandwidth or constants.link_bytes_s or LINK_BYTES_S
    missing = _later_bytes(settings) if settings.epochs > 1 else settings.dataset_bytes
    whole = max(1.0, settings.dataset_bytes)
    decode_s = (making.service_s if making else 0.0) * settings.batch_size
    needs = {
        "store": step_bytes * missing / whole / store.bytes_s if store else 0.0,
        "cores": decode_s * settings.ranks_per_node / settings.cores,
        "link": step_bytes * course.peer_bytes / settings.epochs / whole / settings.nodes / link,
    }
    return nearest_limit(needs, course.step_s, "latency")


def _later_bytes(settings: RunSettings) -> float:
    """Return what an epoch after the first reads from the store: what no tier of the job holds."""
    return settings.dataset_bytes * _miss_share(settings)


def _miss_share(settings: RunSettings) -> float:
    cache = float((settings.memory_cache_bytes or 0) + (settings.disk_cache_bytes or 0))
    return max(0.0, 1 - settings.nodes * cache / max(1.0, settings.dataset_bytes))


def _padding_bytes(settings: RunSettings) -> float:
    """Return what an epoch reads from the store to fill up its last batch with other samples."""
    samples = settings.steps_per_epoch * settings.batch_size * settings.num_ranks
    more = max(0, samples - settings.num_samples)
    return more * settings.sample_bytes * _miss_share(settings)


def _busy_s(constants: RunConstants, settings: RunSettings, what_if: WhatIf, ranks: int) -> float:
    compute = constants.computed_s(settings.batch_size, what_if)
    return expected_max(compute, ranks) + constants.hand_over_s * what_if.hand_over_factor


# -- one node ------------------------------------------------------------------------------------


def _one_node(
    constants: RunConstants,
    settings: RunSettings,
    what_if: WhatIf,
    *,
    num_requests: int | None = None,
) -> _Course:
    """Play a node with several draws; the course is their mean."""
    step_samples = settings.batch_size * settings.num_ranks
    steps = min(settings.steps_per_epoch, max(_STEPS_LEAST, SAMPLES_MAX // step_samples))
    num_samples = steps * step_samples
    plays = max(1, min(_PLAYS_MAX, _PLAYS_SAMPLES // num_samples))
    store = constants.store_for(what_if)
    loader_run = LoaderRun(
        samples=Samples.alone(
            drawn_sizes(num_samples, settings.sample_bytes, settings.sample_sd_bytes)
        ),
        batch_size=settings.batch_size,
        compute_s=_busy_s(constants, settings, what_if, settings.num_ranks),
        epochs=min(settings.epochs, EPOCHS_MAX),
        ranks=settings.num_ranks,
        stage_bytes=settings.look_ahead_bytes,
        threads=max(1, settings.workers),
        requests_max=num_requests,
        costs=_costs(constants, what_if),
        knows_machine=False,
    )
    cache_scale = num_samples / settings.num_samples
    machine = machine_of(constants, settings, what_if, store, cache_scale=cache_scale)
    drawn = () if store is None else tuple(store.latencies_s[:_DRAWS_MAX].tolist())
    made = [
        predict(machine, loader_run, Weather(latencies_s=drawn, seed=seed)) for seed in range(plays)
    ]
    return _mean([_course(one, loader_run, settings, steps) for one in made])


def _course(made: Prediction, loader_run: LoaderRun, settings: RunSettings, steps: int) -> _Course:
    """Return a play as a run of the real length."""
    scale = settings.steps_per_epoch / steps
    last = made.taken_s[-steps:]
    rest_s = float(last[-1] - last[0])
    first = made.first_batch_s + (made.epoch_s[0] - made.first_batch_s) * scale
    epoch_s = (first, *(seconds * scale for seconds in made.epoch_s[1:]))
    more = settings.epochs - loader_run.epochs
    samples = steps * settings.batch_size * settings.num_ranks
    used = min(settings.num_samples, settings.steps_per_epoch * samples // steps)
    busy_s = loader_run.compute_s
    stall = float(made.waits_s[1 - steps :].sum()) / (rest_s + busy_s) if steps > 1 else 0.0
    return _Course(
        step_s=_step_s(last, made.epoch_s[-1]),
        epoch_s=epoch_s + epoch_s[-1:] * more,
        store_bytes=made.store_bytes * used / samples
        + more * _later_bytes(settings)
        + settings.epochs * _padding_bytes(settings),
        peer_bytes=0.0,
        busy_s=busy_s,
        stall_share=stall,
    )


def _step_s(taken_s: Floats, epoch_s: float) -> float:
    return step_s_of(taken_s - taken_s[0]) if len(taken_s) > 1 else epoch_s


def _mean(courses: list[_Course]) -> _Course:
    steps = np.array([course.step_s for course in courses])
    epochs = np.array([course.epoch_s for course in courses])
    stalls = np.array([course.stall_share for course in courses])
    return replace(
        courses[0],
        step_s=float(steps.mean()),
        epoch_s=tuple(epochs.mean(axis=0).tolist()),
        store_bytes=float(np.mean([course.store_bytes for course in courses])),
        stall_share=float(stalls.mean()),
        chance=RunDeviation.of(steps, epochs[:, 0], stalls),
    )


@lru_cache(maxsize=8)
def drawn_sizes(num_samples: int, mean: float, spread: float) -> np.ndarray:
    """Return sizes of samples with a mean and a standard deviation."""
    rng = np.random.default_rng(0)
    sizes = rng.normal(mean, spread, num_samples).clip(max(1.0, 0.05 * mean), None)
    return np.asarray(np.maximum(sizes * (mean / sizes.mean()), 1.0).astype(np.int64))


def _costs(constants: RunConstants, what_if: WhatIf) -> Costs:
    batch_s = constants.making.batch_s if constants.making else 0.0
    return Costs(
        request_s=constants.request_s,
        batch_s=batch_s * what_if.decode_factor,
        # What receiving takes is in the durations of requests already.
        byte_s=0.0,
        fresh_byte_s=0.0,
        start_s=constants.start_s,
    )


def machine_of(
    constants: RunConstants,
    settings: RunSettings,
    what_if: WhatIf,
    store: StoreFit | None,
    *,
    cache_scale: float = 1.0,
) -> Machine:
    """Return the machine of a run as its trace shows it."""
    kinds: tuple[tuple[Literal["memory", "disk"], int | None, float], ...] = (
        ("memory", settings.memory_cache_bytes, _MEMORY_BYTES_S),
        ("disk", settings.disk_cache_bytes, constants.disk_bytes_s or _DISK_BYTES_S),
    )
    tiers = tuple(
        TierModel(
            kind=kind,
            capacity_bytes=int(capacity * cache_scale),
            read=Curve.flat(rate),
            write=Curve.flat(rate),
        )
        for kind, capacity, rate in kinds
        if capacity
    )
    making = constants.making_for(what_if)
    decode_s = making.service_s if making is not None else 0.0
    copy_bytes_s = max(1.0, settings.sample_bytes) / decode_s if decode_s > 0 else _FAST
    link = what_if.link_bandwidth or constants.link_bytes_s or LINK_BYTES_S
    return Machine(
        store=_store_model(store, settings),
        link=LinkModel(bytes_s=link, latency_s=2e-4),
        tiers=tiers,
        cores=settings.cores,
        copy=Curve.flat(copy_bytes_s),
    )


def _store_model(store: StoreFit | None, settings: RunSettings) -> StoreModel:
    if store is None:
        return StoreModel(latency_s=0.0, latency_p99_s=0.0, throughput=Curve.flat(_FAST))
    total = min(store.bytes_s, _FAST)
    own = min(store.connection_bytes_s, total)
    rates = (own, max(total, own))
    return StoreModel(
        latency_s=store.latency_s,
        latency_p99_s=max(store.latency_s, float(np.quantile(store.latencies_s, 0.99))),
        throughput=Curve(counts=(1, 64), bytes_s=rates),
        shared=Curve.flat(total) if settings.nodes > 1 else None,
    )


# -- many nodes ----------------------------------------------------------------------------------


def _few_ranks(constants: RunConstants, settings: RunSettings, what_if: WhatIf) -> _Course:
    """Play few ranks on several nodes: one node with all tiers, and what links add to it."""
    nodes = settings.nodes
    together = replace(
        settings,
        nodes=1,
        ranks_per_node=settings.num_ranks,
        cores=settings.cores * nodes,
        memory_cache_bytes=(settings.memory_cache_bytes or 0) * nodes,
        disk_cache_bytes=(settings.disk_cache_bytes or 0) * nodes,
    )
    events = _one_node(
        constants, together, what_if, num_requests=requests_max(settings.ranks_per_node)
    )
    linked = _bulk(constants, settings, what_if, ranks=settings.num_ranks)
    free = replace(what_if, link_bandwidth=_FAST)
    unlinked = _bulk(constants, settings, free, ranks=settings.num_ranks)
    added_s = [max(0.0, a - b) for a, b in zip(linked.epoch_s, unlinked.epoch_s, strict=True)]
    added_s[0] += MEETING_S
    more_s = max(0.0, linked.step_s - unlinked.step_s)
    step_s = events.step_s + more_s
    return replace(
        events,
        step_s=step_s,
        epoch_s=tuple(a + b for a, b in zip(events.epoch_s, added_s, strict=True)),
        peer_bytes=linked.peer_bytes,
        stall_share=1 - (1 - events.stall_share) * events.step_s / step_s,
        chance=_LINK_CHANCE if more_s > STALL_NONE * step_s else events.chance,
    )


def _many_nodes(constants: RunConstants, settings: RunSettings, what_if: WhatIf) -> _Course:
    alone = replace(
        settings,
        nodes=1,
        num_samples=max(1, settings.num_samples // settings.nodes),
        epochs=min(settings.epochs, EPOCHS_MAX),
    )
    # The share of one node: what the events of a step take beyond averages.
    store = constants.store_for(what_if)
    share = None if store is None or math.isinf(store.bytes_s) else store.bytes_s / settings.nodes
    mine = replace(what_if, store_bandwidth=share)
    events = _one_node(constants, alone, mine)
    bulk_alone = _bulk(constants, alone, mine, ranks=alone.ranks_per_node)
    bulk = _bulk(constants, settings, what_if, ranks=settings.num_ranks)
    beyond_s = max(0.0, events.step_s - bulk_alone.step_s)
    if bulk.step_s > (1 + STALL_NONE) * bulk.busy_s:
        beyond_s /= settings.nodes  # What one node leaves of a store that is full, others use.
    steps = settings.steps_per_epoch
    step_s = bulk.step_s + beyond_s
    return replace(
        bulk,
        step_s=step_s,
        stall_share=max(0.0, 1 - bulk.busy_s / step_s) if step_s > 0 else 0.0,
        chance=_BULK_CHANCE,
        epoch_s=(
            constants.start_s + MEETING_S + bulk.epoch_s[0] + beyond_s * steps,
            *(seconds + beyond_s * steps for seconds in bulk.epoch_s[1:]),
        ),
    )


def _bulk(
    constants: RunConstants, settings: RunSettings, what_if: WhatIf, *, ranks: int
) -> _Course:
    """Play steps in bulk: all nodes, averages, the real order and the real homes."""
    step_samples = settings.batch_size * settings.num_ranks
    num_samples = min(
        settings.num_samples, max(BULK_SAMPLES_MAX, _STEPS_LEAST * step_samples, step_samples)
    )
    num_samples = max(step_samples, num_samples // step_samples * step_samples)
    scale = settings.num_samples / num_samples
    epochs = min(settings.epochs, EPOCHS_MAX)
    busy_s = _busy_s(constants, settings, what_if, ranks)
    store = constants.store_for(what_if)
    scenario = Scenario(
        dataset=DatasetTable(
            num_samples=num_samples,
            sample_bytes=max(1, int(settings.sample_bytes)),
            spread_bytes=int(settings.sample_sd_bytes),
        ),
        job=JobTable(
            epochs=epochs,
            batch=settings.batch_size,
            nodes=settings.nodes,
            ranks=settings.ranks_per_node,
            compute_samples_s=settings.batch_size / busy_s,
        ),
        machine=_with_decode(
            machine_of(constants, settings, what_if, store, cache_scale=1 / scale)
        ),
        loader=LoaderTable(
            threads=max(8, 64 // settings.ranks_per_node),
            stage_bytes=settings.look_ahead_bytes * settings.ranks_per_node,
        ),
    )
    made = run(scenario, "ours")
    epoch_s = tuple(seconds * scale for seconds in made.epoch_s)
    later = _later_bytes(settings)
    rest = settings.epochs - epochs
    peers = made.peer_bytes * scale
    return _Course(
        step_s=made.epoch_s[-1] / (num_samples // step_samples),
        epoch_s=epoch_s + epoch_s[-1:] * rest,
        store_bytes=made.store_bytes * scale
        + rest * later
        + settings.epochs * _padding_bytes(settings),
        peer_bytes=peers + rest * peers / epochs,
        busy_s=busy_s,
        stall_share=0.0,
    )


def _with_decode(machine: Machine) -> Machine:
    """Return the machine for bulk steps, in which decoding has a curve of its own."""
    rate = machine.copy.at(1)
    counts = (1, max(2, machine.cores))
    return replace(
        machine, decode=Curve(counts=counts, bytes_s=(rate, rate * max(1, machine.cores)))
    )
