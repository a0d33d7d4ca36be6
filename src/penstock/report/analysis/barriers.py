"""Ranks that wait for each other: how long, and for whom.

Where collectives are in the trace, a rank waits in one until the last rank has entered it. Where
they are not, ranks that keep step with each other wait while they are blocked, at most for as long
as the slowest rank of the step needed more than they did.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.report.analysis.loops import TrainingLoop
from penstock.report.analysis.values import Floats, Ints
from penstock.trace.reading import Trace
from penstock.trace.schema import Kind

IN_STEP_MAX = 1.0
"""Ranks keep step if they ask for the same batch within this many steps of each other, at the
median: a rank that is free to run ahead drifts further than that."""


@dataclass(frozen=True, kw_only=True)
class Lateness:
    """Waits for other ranks."""

    barrier_ns: dict[int, Floats]
    """For each rank, of each step."""
    waited_for: dict[int, Ints]
    """The rank that was waited for; -1: none."""


def lateness_of(
    trace: Trace, loops: tuple[TrainingLoop, ...], works: list[dict[str, Floats]]
) -> Lateness:
    """Return how long each rank waited for others, in each step."""
    barrier = {loop.rank: np.zeros(len(loop)) for loop in loops}
    waited_for = {loop.rank: np.full(len(loop), -1, np.int64) for loop in loops}
    out = Lateness(barrier_ns=barrier, waited_for=waited_for)
    if len(loops) >= 2 and _keep_step(loops) and not _from_collectives(trace, loops, out):
        _from_work(loops, works, out)
    return out


def _keep_step(loops: tuple[TrainingLoop, ...]) -> bool:
    """Return whether the ranks go from step to step together."""
    num = min(len(loop) for loop in loops)
    if num < 3:
        return False
    asks = np.stack([loop.ask_ns[:num] for loop in loops])
    apart = asks - asks.mean(axis=0)
    # Starting late is no drift: only how the distance changes counts.
    spread = np.ptp(apart - np.median(apart, axis=1, keepdims=True), axis=0)
    step = float(np.median(np.diff(asks, axis=1)))
    return bool(np.median(spread) <= IN_STEP_MAX * step)


def _from_collectives(trace: Trace, loops: tuple[TrainingLoop, ...], out: Lateness) -> bool:
    """Fill in the waits inside of collectives; return False where there are none to compare."""
    rows = {loop.rank: trace.of(Kind.COMMUNICATE, rank=loop.rank) for loop in loops}
    num = min(len(found) for found in rows.values())
    if num == 0 or num < 0.9 * max(len(found) for found in rows.values()):
        return False
    # Ranks call collectives in the same order, or they would hang: the i-th is the same one.
    starts = np.stack([rows[loop.rank]["start_ns"][:num] for loop in loops])
    ends = starts + np.stack([rows[loop.rank]["duration_ns"][:num] for loop in loops])
    entered = starts.max(axis=0)
    last = np.array([loop.rank for loop in loops])[starts.argmax(axis=0)]
    for loop, start, end in zip(loops, starts, ends, strict=True):
        waited = np.clip(np.minimum(entered, end) - start, 0, None)
        step = np.clip(np.searchsorted(loop.ask_ns, start, side="right") - 1, 0, len(loop) - 1)
        np.add.at(out.barrier_ns[loop.rank], step, waited)
        # Of several collectives in a step, the last one's straggler is named.
        late = waited > 0
        out.waited_for[loop.rank][step[late]] = last[late]
    return True


def _from_work(
    loops: tuple[TrainingLoop, ...], works: list[dict[str, Floats]], out: Lateness
) -> None:
    num = min(len(loop) for loop in loops)
    blocked = np.stack([work["blocked"][:num] for work in works])
    wall = np.stack([(loop.end_ns - loop.ask_ns)[:num] for loop in loops])
    own = wall - blocked
    slowest = own.argmax(axis=0)
    waited = np.minimum(blocked, own.max(axis=0) - own)
    ranks = np.array([loop.rank for loop in loops])
    for i, loop in enumerate(loops):
        out.barrier_ns[loop.rank][:num] = waited[i]
        out.waited_for[loop.rank][:num] = np.where(waited[i] > 0, ranks[slowest], -1)
