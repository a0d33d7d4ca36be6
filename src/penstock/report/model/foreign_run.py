"""Runs with torch's DataLoader, or with a loader that works like it, played epoch by epoch."""

from __future__ import annotations

from penstock.report.model.constants import RunConstants
from penstock.report.model.foreign import ReplayedEpoch, replayed
from penstock.report.model.lru import node_hits
from penstock.report.model.played import STALL_NONE, SimulatedRun, nearest_limit
from penstock.report.model.settings import RunSettings
from penstock.report.model.what_if import WhatIf


def played_foreign(constants: RunConstants, settings: RunSettings, what_if: WhatIf) -> SimulatedRun:
    """Play a run with some changes."""
    first = last = replayed(constants, settings, what_if)
    miss_share = 1.0
    if settings.epochs > 1 and settings.memory_cache_bytes is not None:
        share = settings.memory_cache_bytes / max(1.0, settings.dataset_bytes)
        miss_share = 1.0 - node_hits(share, settings.nodes)
        last = replayed(constants, settings, what_if, miss_share=miss_share)
    steps, later = settings.steps_per_epoch, settings.epochs - 1
    first_start_s = constants.start_s * settings.num_starts / max(1.0, constants.num_starts)
    start_s = 0.0 if settings.persistent_workers else first_start_s
    return SimulatedRun(
        chance=last.chance,
        step_s=last.step_s,
        epoch_s=(
            first_start_s + first.epoch_s(steps),
            *[start_s + last.epoch_s(steps)] * later,
        ),
        stall_share=last.stall_share,
        store_bytes=settings.dataset_bytes * (1 + later * miss_share),
        peer_bytes=0.0,
        memory_bytes=_memory_bytes(constants, settings),
        limit=_limit(constants, settings, what_if, last, miss_share),
    )


def _memory_bytes(constants: RunConstants, settings: RunSettings) -> float:
    """Return the memory of a node that batches under way, workers and the cache take."""
    decoded = constants.batch_bytes / constants.compute_batch_size
    batch = settings.batch_size * (decoded or settings.sample_bytes)
    ahead = settings.workers * settings.prefetch_factor + 1
    rank = ahead * batch + settings.workers * constants.worker_bytes
    return settings.ranks_per_node * rank + (settings.memory_cache_bytes or 0)


def _limit(
    constants: RunConstants,
    settings: RunSettings,
    what_if: WhatIf,
    last: ReplayedEpoch,
    miss_share: float,
) -> str:
    compute_s = float(constants.computed_s(settings.batch_size, what_if).mean())
    hand_over_s = constants.hand_over_s * what_if.hand_over_factor
    if last.stall_share < STALL_NONE:
        waits = last.step_s > 1.1 * (compute_s + hand_over_s) and settings.num_ranks > 1
        return "barrier" if waits else "hand-over" if hand_over_s > compute_s else "compute"
    making, store = constants.making_for(what_if), constants.store_for(what_if)
    assert making is not None
    num, samples = float(making.counts.sum()), settings.batch_size
    cpu_s = samples * float(making.cpu_s.sum()) / num + making.batch_s
    size_bytes = samples * making.sample_bytes * miss_share
    blocked_s = samples * float(making.delay_s.sum()) / num * miss_share
    blocked_s += size_bytes / store.connection_bytes_s if store else 0.0
    needs = {
        "cores": settings.ranks_per_node * cpu_s / settings.cores,
        "store": size_bytes * settings.num_ranks / store.bytes_s if store else 0.0,
    }
    # One worker more would help: most of a batch is waiting for the store, or work on a free core.
    return nearest_limit(needs, last.step_s, "latency" if blocked_s > cpu_s else "workers")
