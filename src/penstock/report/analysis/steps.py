"""Where the time of each step goes: the waits by cause, the work by what the rank did."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from penstock.report.analysis.attribution import Blame
from penstock.report.analysis.barriers import Lateness, lateness_of
from penstock.report.analysis.batches import same_processes
from penstock.report.analysis.loops import TrainingLoop
from penstock.report.analysis.sweep import Activities, JoinedIntervals, covered
from penstock.report.analysis.values import CATEGORIES, WAITS, Floats, StepTable
from penstock.trace.reading import Trace
from penstock.trace.schema import Kind

_GAP, _CHECKPOINT, _VALIDATE, _COMMUNICATE, _COPY, _COMPUTE = range(6)
_ROWS = {
    Kind.CHECKPOINT: _CHECKPOINT,
    Kind.VALIDATE: _VALIDATE,
    Kind.COMMUNICATE: _COMMUNICATE,
    Kind.COPY: _COPY,
    Kind.COMPUTE: _COMPUTE,
}


def step_table(
    trace: Trace,
    loops: tuple[TrainingLoop, ...],
    blames: tuple[Blame, ...],
    *,
    own_delay: float = 1.0,
) -> StepTable:
    """Return the table of all ranks; `blames` has the waits of each loop by cause.

    `own_delay` is the share of the time without a core that the job brings upon itself: the rest is
    a slower machine, and stays with what the thread was about to do.
    """
    works = [_work(trace, loop, own_delay) for loop in loops]
    late = lateness_of(trace, loops, works)
    tables = [
        _table(loop, blame, work, late)
        for loop, blame, work in zip(loops, blames, works, strict=True)
    ]
    return _joined(tables)


def _work(trace: Trace, loop: TrainingLoop, own_delay: float) -> dict[str, Floats]:
    """Return nanoseconds of each kind of work, for each step of a rank."""
    line = JoinedIntervals(start_ns=loop.got_ns, end_ns=loop.end_ns)
    rows = trace.of(*_ROWS, rank=loop.rank)
    # Work of other processes of the rank delays nobody here, but the device is everybody's.
    same = same_processes(trace)
    mine = (same[rows["process"]] == same[loop.process]) | (rows["kind"] == Kind.COMPUTE)
    rows = rows[mine]
    table = np.zeros(64, np.int64)
    for kind, number_of in _ROWS.items():
        table[int(kind)] = number_of
    gap = loop.end_ns > loop.done_ns
    low = np.concatenate([line.place(rows["start_ns"]), line.place(loop.done_ns[gap])])
    ends = rows["start_ns"] + rows["duration_ns"]
    high = np.concatenate([line.place(ends), line.base_ns[1:][gap]])
    number = np.concatenate([table[rows["kind"]], np.full(int(gap.sum()), _GAP)])
    keep, none = high > low, np.zeros(len(low))
    found = Activities(
        low=low[keep],
        high=high[keep],
        category=number[keep],
        starved=none[keep],
        unseen=none[keep],
    )
    cover = covered(line.base_ns, found, 6)
    runs = cover.active > 0
    free = np.ones(len(cover.length), bool)
    out = {}
    for name, category in (
        ("checkpoint", _CHECKPOINT),
        ("validation", _VALIDATE),
        ("between-epochs", _GAP),
        ("communicate", _COMMUNICATE),
        ("copy", _COPY),
    ):
        here = free & runs[category]
        out[name] = _sums(cover.interval, cover.length * here, len(loop))
        free &= ~here
    device = _sums(cover.interval, cover.length * (free & runs[_COMPUTE]), len(loop))
    rest = _sums(cover.interval, cover.length * free, len(loop))
    has_device = bool((rows["kind"] == Kind.COMPUTE).any())
    out |= _rest(loop, rest, device if has_device else None, own_delay)
    return out


def _sums(interval: npt.NDArray[np.int64], weights: Floats, count: int) -> Floats:
    return np.bincount(interval, weights, count)[:count].astype(np.float64)


def _rest(
    loop: TrainingLoop, rest: Floats, device: Floats | None, own_delay: float
) -> dict[str, Floats]:
    """Split what is left of the work: interference by the kernel's account, launch, compute."""
    lock, no_core = np.maximum(0, loop.lock), np.maximum(0, loop.no_core)
    disturbed = rest * np.minimum(1, lock + no_core * own_delay)
    left = rest - disturbed
    compute = left if device is None else np.minimum(left, device)
    blocked = rest * np.clip(1 - loop.on_core - lock - no_core, 0, 1) * (loop.on_core >= 0)
    return {
        "interference": disturbed,
        "compute": compute,
        "launch": left - compute,
        "blocked": blocked,
    }


def _table(loop: TrainingLoop, blame: Blame, work: dict[str, Floats], late: Lateness) -> StepTable:
    wall = (loop.end_ns - loop.ask_ns) / 1e9
    parts = {name: np.zeros(len(loop)) for name in CATEGORIES}
    for name in WAITS:
        parts[name] = blame.parts[name] / 1e9
    for name, value in work.items():
        if name in parts:
            parts[name] = value / 1e9
    barrier = late.barrier_ns[loop.rank] / 1e9
    # A rank waits for others in a collective, or blocked in what looks like its own work.
    in_collective = np.minimum(barrier, parts["communicate"])
    parts["communicate"] = parts["communicate"] - in_collective
    from_compute = np.minimum(barrier - in_collective, parts["compute"])
    parts["compute"] = parts["compute"] - from_compute
    parts["barrier"] = in_collective + from_compute
    parts["unexplained"] = wall - np.sum([parts[name] for name in CATEGORIES[:-1]], axis=0)
    return StepTable(
        rank=np.full(len(loop), loop.rank),
        step=np.arange(len(loop)),
        epoch=loop.epochs,
        start_s=loop.ask_ns / 1e9,
        wall_s=wall,
        samples=loop.samples,
        wait_s=(loop.got_ns - loop.ask_ns) / 1e9,
        is_resident=loop.is_resident,
        parts=parts,
        fetch_by_source={name: v / 1e9 for name, v in blame.fetch_by_source.items()},
        waited_for=late.waited_for[loop.rank],
    )


def _joined(tables: list[StepTable]) -> StepTable:
    sources = dict.fromkeys(name for t in tables for name in t.fetch_by_source)
    return StepTable(
        rank=np.concatenate([t.rank for t in tables]),
        step=np.concatenate([t.step for t in tables]),
        epoch=np.concatenate([t.epoch for t in tables]),
        start_s=np.concatenate([t.start_s for t in tables]),
        wall_s=np.concatenate([t.wall_s for t in tables]),
        samples=np.concatenate([t.samples for t in tables]),
        wait_s=np.concatenate([t.wait_s for t in tables]),
        is_resident=np.concatenate([t.is_resident for t in tables]),
        parts={n: np.concatenate([t.parts[n] for t in tables]) for n in CATEGORIES},
        fetch_by_source={
            n: np.concatenate([t.fetch_by_source.get(n, np.zeros(len(t))) for t in tables])
            for n in sources
        },
        waited_for=np.concatenate([t.waited_for for t in tables]),
    )


def with_interference(table: StepTable, excess_s: float) -> StepTable:
    """Return the table with the interference that a differential run measured.

    Each real step took `excess_s` longer than it takes without the loader; the accounts of the
    kernel, which see a part of it, give way to the measurement.
    """
    parts = {name: values.copy() for name, values in table.parts.items()}
    pool = parts["interference"] + parts["compute"] + parts["launch"]
    took = np.where(table.is_resident, 0.0, np.minimum(pool, max(0.0, excess_s)))
    kept = np.where(pool > 0, (pool - took) / np.maximum(pool, 1e-12), 0.0)
    own = parts["compute"] + parts["launch"]
    scale = np.where(own > 0, pool * kept / np.maximum(own, 1e-12), 0.0)
    parts["interference"] = np.where(own > 0, took, pool)
    parts["compute"] *= scale
    parts["launch"] *= scale
    return replace(table, parts=parts)


def with_launch(table: StepTable, share: float) -> StepTable:
    """Return the table with a share of the steps' own work as `launch`, the rest as `compute`."""
    parts = dict(table.parts)
    both = parts["compute"] + parts["launch"]
    parts["compute"], parts["launch"] = both * (1 - share), both * share
    return replace(table, parts=parts)
