"""From a trace, or two, to a model of the run.

The first run is the one that questions are about ("as it was"). A second one adds what one run
cannot tell: a store that is full, a step with another batch. Constants that rows state are taken as
they are. Then the model replays its own run; where it is off, the one constant that its answer
hangs on is corrected, by a little: rows do not see everything. What remains is the misfit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from penstock.errors import OptionError
from penstock.report.model import observed
from penstock.report.model.bands import FIT_MAX
from penstock.report.model.constants import HAND_OVER_S, MakingCosts, RunConstants
from penstock.report.model.run_model import RunModel
from penstock.report.model.settings import RunSettings, settings_of
from penstock.report.model.store_fit import Floats, Requests, StoreFit, fit_store
from penstock.trace import Kind, Trace

_CONTENDED = 0.05
"""Runnable without a core: beyond this share of its time a calibration is marked."""
_CORRECTION_MAX = 0.25
"""The most that a constant is corrected by."""
_ROUNDS = 4
_FITS = 0.01
_CHANCE = 2.0
"""What so many standard deviations of one run explain is not the fault of a constant."""
_STALLS = 0.1
_REQUESTS_S = (1e-4, 3e-5, 1e-5)
"""What a request may cost in Python, if not what `RunConstants` says."""
_STEPS_LEAST = 8
_BLOCKS = 8
"""Stretches that the error of a mean is judged by: neighbouring steps are alike."""


def calibrate(trace: Trace, second: Trace | None = None) -> RunModel:
    """Return the model of a traced run; a second run of the same job makes it surer."""
    settings = settings_of(trace)
    _check(trace, settings)
    traces = [trace] if second is None else [trace, second]
    constants = _constants(traces, settings)
    model = _with_requests(RunModel(constants, settings, observed.measured(trace)))
    if observed.contended_share(trace) <= _CONTENDED:
        model = _corrected(model)  # Else the difference is the work of other programs.
    if second is None:
        return model
    other = RunModel(model.constants, settings_of(second), observed.measured(second))
    other = replace(other, constants=_computing_of(model.constants, second, other.settings))
    return replace(model, second_error=other.self_check(), second_misfit=other.misfit)


def _check(trace: Trace, settings: RunSettings) -> None:
    num_steps = len(trace.of(Kind.NEXT))
    if num_steps < _STEPS_LEAST:
        raise OptionError(
            f"{trace.folder} has {num_steps} {'step' if num_steps == 1 else 'steps'}, a model "
            f"needs at least {_STEPS_LEAST}; trace a longer run"
        )
    if settings.loader != "penstock" and not len(observed.made_rows(trace)):
        raise OptionError(
            f"{trace.folder} does not say how long batches take to make: it has no BATCH and no "
            "SAMPLE rows; record the job with penstock trace -- python train.py"
        )


# -- constants -----------------------------------------------------------------------------------


def _constants(traces: list[Trace], settings: RunSettings) -> RunConstants:
    first = traces[0]
    requests = [observed.requests_of(trace, settings) for trace in traces]
    store = fit_store(requests)
    making = _making(first, settings, store)
    compute = observed.computed_s(first)
    hand_over_s, deliver_s = _hand_over(traces)
    if settings.loader != "penstock" and not settings.workers:
        # Batches never came from another process: what that takes is known from other runs.
        hand_over_s, deliver_s = HAND_OVER_S, HAND_OVER_S
    fixed_s = _fixed_s(traces)
    batches = first.of(Kind.BATCH)
    return RunConstants(
        compute_s=compute,
        compute_cpu_share=observed.compute_cpu_share(first),
        communicate_s=observed.communicated_s(first),
        compute_batch_size=settings.batch_size,
        compute_fixed_s=fixed_s,
        hand_over_s=hand_over_s,
        deliver_s=deliver_s,
        start_s=_start_s(first),
        num_starts=settings.num_starts,
        making=making,
        store=store,
        interference=observed.interference_of(first),
        worker_bytes=_worker_bytes(first),
        batch_bytes=float(batches["size_bytes"].mean()) if len(batches) else 0.0,
        errors=_errors(compute, making, requests[0]),
        notes=_notes(traces),
    )


def _making(trace: Trace, settings: RunSettings, store: StoreFit | None) -> MakingCosts | None:
    if settings.loader != "penstock":
        return observed.making_of(trace, settings, None if store is None else store.latencies_s)
    rows, joined = trace.of(Kind.DECODE), trace.of(Kind.JOIN)
    if not len(rows):
        return None
    counts = np.maximum(rows["count"], 1).astype(np.float64)
    # Without the kernel's accounting, the median is what a piece takes that has a core to itself.
    seconds = rows["cpu_ns"] * 1e-9
    if not seconds.any():
        seconds = counts * float(np.median(rows["duration_ns"] / counts)) * 1e-9
    return MakingCosts(
        counts=counts,
        delay_s=np.zeros(len(rows)),
        cpu_s=seconds,
        sample_bytes=settings.sample_bytes,
        batch_s=float(np.median(joined["duration_ns"])) * 1e-9 if len(joined) else 0.0,
    )


def _hand_over(traces: list[Trace]) -> tuple[float, float]:
    """Return the shortest of all runs: a run that waits for each batch rarely shows a ready one."""
    both = [observed.hand_over_of(trace) for trace in traces]
    return min(h for h, _ in both), float(np.median([d for _, d in both]))


def _fixed_s(traces: list[Trace]) -> float:
    """Return the part of a step that does not grow with its batch, from runs of two sizes."""
    if len(traces) == 1:
        return 0.0
    small, large = sorted(
        (settings_of(t).batch_size, observed.computed_s(t).mean()) for t in traces
    )
    if large[0] < 1.2 * small[0]:
        return 0.0
    rise = (large[1] - small[1]) / (large[0] - small[0])
    return float(np.clip(small[1] - rise * small[0], 0.0, small[1]))


def _start_s(trace: Trace) -> float:
    """Return the time from the first question to the first request, or to the first sample."""
    taken = trace.of(Kind.NEXT, rank=trace.ranks[0])
    begun = trace.of(Kind.FETCH, Kind.BATCH)
    begun = begun[begun["rank"] == trace.ranks[0]]
    if not len(begun) or not len(taken):
        return 0.0
    seconds = float(begun["start_ns"].min() - taken["start_ns"].min()) * 1e-9
    return max(0.0, min(seconds, float(taken["duration_ns"][0]) * 1e-9))


def _worker_bytes(trace: Trace) -> float:
    own = [
        values["memory.rss_bytes"] - values.get("memory.shared_bytes", 0.0)
        for process in trace.processes
        if process.role == "worker"
        for _, values in process.counters[-1:]
        if "memory.rss_bytes" in values
    ]
    return float(np.mean(own)) if own else 0.0


def _errors(compute: Floats, making: MakingCosts | None, requests: Requests) -> dict[str, float]:
    out = {"compute": mean_error(compute)}
    if len(requests.durations_s):
        out["fetch"] = mean_error(requests.durations_s)
    if making is not None and making.cpu_s.any():
        out["decode"] = mean_error(making.cpu_s / making.counts)
    return out


def mean_error(values: Floats) -> float:
    """Return the relative standard error of a mean, from the means of consecutive stretches."""
    if len(values) < 2 * _BLOCKS or not values.mean():
        return 0.1
    means = np.array([block.mean() for block in np.array_split(values, _BLOCKS)])
    return float(means.std(ddof=1) / np.sqrt(_BLOCKS) / values.mean())


def _notes(traces: list[Trace]) -> tuple[str, ...]:
    share = max(observed.contended_share(trace) for trace in traces)
    if share <= _CONTENDED:
        return ()
    return (
        f"threads of the run had no core in {share:.0%} of their time: the calibration is "
        "contended",
    )


# -- the run itself --------------------------------------------------------------------------------


def _with_requests(model: RunModel) -> RunModel:
    """Return the model with the cost of a request at which it reproduces its run best."""
    if model.loader != "penstock" or model.self_check() <= FIT_MAX:
        return model
    tried = [replace(model.constants, request_s=seconds) for seconds in _REQUESTS_S]
    others = [replace(model, constants=constants) for constants in tried]
    return min((model, *others), key=lambda m: abs(m.self_check()))


def _corrected(model: RunModel) -> RunModel:
    """Return a model that reproduces its run, as far as a small correction can do that.

    Rows do not say which constant is wrong. A replay that is too slow because it waits, or too
    fast because the run waited, has the loader's work wrong; any other the loop's own part.
    """
    error = model.self_check()
    if abs(error) < _FITS + _CHANCE * model.own_chance.step:
        return model
    stall = model.outline().stall_share if error > 0 else model.measured.stall_share
    other = _searched(model, _with_loading if stall > _STALLS else _with_hand_over)
    return min((model, other), key=lambda m: abs(m.self_check()))


def _searched(model: RunModel, change: Callable[[RunModel, float], RunConstants]) -> RunModel:
    """Return the model with one constant changed by a factor until its replay fits, or nearly."""
    best, factor = model, 1.0
    for _ in range(_ROUNDS):
        factor /= 1 + best.self_check()
        factor = float(np.clip(factor, 1 / (1 + _CORRECTION_MAX), 1 + _CORRECTION_MAX))
        better = replace(model, constants=change(model, factor))
        if abs(better.self_check()) >= abs(best.self_check()):
            break
        best = better
        if abs(best.self_check()) < _FITS:
            break
    return best


def _with_loading(model: RunModel, factor: float) -> RunConstants:
    constants = model.constants
    store = constants.store.slower(factor) if constants.store else None
    making = constants.making
    if making is not None:
        making = replace(making, delay_s=making.delay_s * factor, cpu_s=making.cpu_s * factor)
    return replace(constants, store=store, making=making)


def _with_hand_over(model: RunModel, factor: float) -> RunConstants:
    constants = model.constants
    added = (factor - 1) * model.measured.step_s
    return replace(constants, hand_over_s=max(0.0, constants.hand_over_s + added))


def _computing_of(constants: RunConstants, trace: Trace, settings: RunSettings) -> RunConstants:
    """Return constants with the steps of another run: its loop may do something else."""
    return replace(
        constants,
        compute_s=observed.computed_s(trace),
        compute_batch_size=settings.batch_size,
        compute_cpu_share=observed.compute_cpu_share(trace),
    )
