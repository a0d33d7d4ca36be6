"""Which batch a wait was for, when that batch was done, and who made it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.report.analysis.loops import TrainingLoop
from penstock.report.analysis.sources import is_of, is_read
from penstock.report.analysis.values import Floats, Ints
from penstock.trace.reading import Trace
from penstock.trace.schema import Kind

MATCHED_MIN = 0.9
"""Share of the waits whose batch has to be found; below it the numbers of rows do not mean the
steps of the loop, and what the loader did at the time counts instead."""
EPOCH_STRIDE = 1 << 40
"""Steps of an epoch are fewer than this: one number holds both."""
NEVER_NS = np.iinfo(np.int64).max // 4
TOLERANCE_NS = 1_000_000
"""A batch is done before the loop has it; rows of two processes may disagree by this much."""


@dataclass(frozen=True, kw_only=True)
class AwaitedBatches:
    """The batches that the waits of a loop were for."""

    how: str
    """`step`: by epoch and step; `worker`: by the round of the workers; `time`: not found."""
    is_found: npt.NDArray[np.bool_]
    """For each wait."""
    done_ns: Ints
    next_ready_ns: Ints
    """When the first of the later batches was done."""
    process: Ints
    """The worker that made it; -1: unknown."""
    process_of_row: Ints
    wait_of_row: Ints
    """For each row of the loader: its worker, and the wait that its batch was for; -1: none."""
    starved: Floats
    unseen: Floats
    """For each row: share of its own time runnable without a core; blocked while no read was
    seen."""
    starved_mean: float
    unseen_mean: float
    has_batches: bool


def batches_made(trace: Trace, loop: TrainingLoop, rows: npt.NDArray[np.void]) -> AwaitedBatches:
    """Return the batches of a loop's waits, found in the best way that the rows allow."""
    process = same_processes(trace)[rows["process"]] if len(rows) else np.zeros(0, np.int64)
    is_batch = rows["kind"] == Kind.BATCH
    starved, unseen = _weights(rows, process, is_batch)
    busy = is_of(rows, Kind.BATCH, Kind.DECODE)
    own = rows["duration_ns"][busy].astype(float)
    mean_of = own if own.sum() else np.ones(len(own))
    if is_batch.any():
        found = _by_worker(loop, rows[is_batch], process[is_batch])
        wait_of_row = np.full(len(rows), -1, np.int64)
    else:
        found, wait_of_row = _by_step(loop, rows)
    how, is_found, done_ns, of = found
    return AwaitedBatches(
        how=how,
        is_found=is_found,
        done_ns=done_ns,
        next_ready_ns=_next_ready(done_ns, is_found),
        process=of,
        process_of_row=process,
        wait_of_row=wait_of_row,
        starved=starved,
        unseen=unseen,
        starved_mean=float(np.average(starved[busy], weights=mean_of)) if busy.any() else 0.0,
        unseen_mean=float(np.average(unseen[busy], weights=mean_of)) if busy.any() else 0.0,
        has_batches=bool(is_batch.any()),
    )


def same_processes(trace: Trace) -> Ints:
    """Return one number for all records of a process: native rows have a file of their own."""
    known = {(p.host, p.pid): p.number for p in trace.processes if p.role != "native"}
    out = np.arange(len(trace.processes), dtype=np.int64)
    for process in trace.processes:
        if process.role == "native":
            out[process.number] = known.get((process.host, process.pid), process.number)
    return out


_Found = tuple[str, npt.NDArray[np.bool_], Ints, Ints]


def _nothing(loop: TrainingLoop) -> _Found:
    none = np.zeros(len(loop), bool)
    return "time", none, np.full(len(loop), NEVER_NS), np.full(len(loop), -1)


def _keys(epoch: Ints, step: Ints) -> Ints:
    """Return one number for epoch and step; -1 where the step is unknown."""
    return np.where(step >= 0, np.maximum(epoch, 0) * EPOCH_STRIDE + step, -1)


def _by_step(loop: TrainingLoop, rows: npt.NDArray[np.void]) -> tuple[_Found, Ints]:
    """Find batches by epoch and step, and the wait of each row."""
    none = np.full(len(rows), -1, np.int64)
    asked = _keys(loop.epoch, loop.step)
    order = np.argsort(asked, kind="stable")
    if not len(rows) or not len(asked) or asked[order[0]] < 0:
        return _nothing(loop), none
    keys = _keys(rows["epoch"].astype(np.int64), rows["step"].astype(np.int64))
    at = np.clip(np.searchsorted(asked[order], keys), 0, len(order) - 1)
    wait = np.where((keys >= 0) & (asked[order][at] == keys), order[at], -1)
    makes = (wait >= 0) & is_of(rows, Kind.DECODE, Kind.JOIN)
    done = np.full(len(loop), -1, np.int64)
    ends = rows["start_ns"] + rows["duration_ns"]
    np.maximum.at(done, wait[makes], ends[makes])
    # Several tiny batches are made at once: the row has the step of the first.
    several = np.flatnonzero(makes & is_of(rows, Kind.JOIN) & (rows["count"] > 1))
    for row in several.tolist():
        first = int(wait[row])
        together = slice(first, min(first + int(rows["count"][row]), len(loop)))
        done[together] = np.maximum(done[together], ends[row])
    is_found = done >= 0
    real = ~loop.is_resident
    if not real.any() or is_found[real].mean() < MATCHED_MIN:
        return _nothing(loop), none
    done[~is_found] = NEVER_NS
    return ("step", is_found, done, np.full(len(loop), -1)), wait


def _by_worker(loop: TrainingLoop, batches: npt.NDArray[np.void], process: Ints) -> _Found:
    """Find batches of torch's DataLoader: by their number, else by the round of the workers."""
    done_of = batches["start_ns"] + batches["duration_ns"]
    real = np.flatnonzero(~loop.is_resident)
    for order in (_numbered(loop, batches, real), _in_rounds(batches, process)):
        if order is None or not len(order):
            continue
        num = min(len(order), len(real))
        place = np.full(len(loop), -1, np.int64)
        place[real[:num]] = order[:num]
        is_found = place >= 0
        done = np.where(is_found, done_of[np.clip(place, 0, None)], NEVER_NS)
        early = done[is_found] <= loop.got_ns[is_found] + TOLERANCE_NS
        if num >= MATCHED_MIN * len(real) and early.mean() >= MATCHED_MIN:
            of = np.where(is_found, process[np.clip(place, 0, None)], -1)
            # Where the numbers cannot be right, the wait is left to what anybody did.
            is_found &= done <= loop.got_ns + TOLERANCE_NS
            return "worker", is_found, done, np.where(is_found, of, -1)
    return _nothing(loop)


def _numbered(loop: TrainingLoop, batches: npt.NDArray[np.void], real: Ints) -> Ints | None:
    """Return the batch of each real step by epoch and step; None where they do not say."""
    keys = _keys(batches["epoch"].astype(np.int64), batches["step"].astype(np.int64))
    asked = _keys(loop.epoch[real], loop.step[real])
    if not len(keys) or keys.min() < 0 or not len(asked) or asked.min() < 0:
        return None
    # Several loaders may have batches of one number: what a loop got is the last that was done.
    done = batches["start_ns"] + batches["duration_ns"]
    known, number = np.unique(keys, return_inverse=True)
    in_time = np.sort(done)
    place = number * (len(keys) + 1) + np.searchsorted(in_time, done)
    order = np.argsort(place, kind="stable")
    wanted = np.clip(np.searchsorted(known, asked), 0, len(known) - 1) * (len(keys) + 1)
    until = np.searchsorted(in_time, loop.got_ns[real] + TOLERANCE_NS, side="right")
    at = np.searchsorted(place[order], wanted + until) - 1
    # A batch that was done too late for its loop is the first of its number.
    at = np.where(keys[order[np.clip(at, 0, None)]] == asked, at, at + 1)
    found = order[np.clip(at, 0, len(order) - 1)]
    return found if (keys[found] == asked).mean() >= MATCHED_MIN else None


def _in_rounds(batches: npt.NDArray[np.void], process: Ints) -> Ints:
    """Return batches in the order in which torch hands them over: its workers take turns.

    Workers of an epoch that were started together have rising numbers.
    """
    by_worker = np.lexsort((batches["start_ns"], process))
    sorted_process = process[by_worker]
    first = np.flatnonzero(np.diff(sorted_process, prepend=-1))
    sizes = np.diff(np.append(first, len(by_worker)))
    turn = np.arange(len(by_worker)) - np.repeat(first, sizes)
    # Workers that start after others have ended are of a later epoch.
    starts = batches["start_ns"][by_worker][first]
    ends = np.maximum.reduceat((batches["start_ns"] + batches["duration_ns"])[by_worker], first)
    generation = np.zeros(len(first), np.int64)
    by_start = np.argsort(starts, kind="stable")
    current, until = 0, -1
    for i in by_start.tolist():
        if until >= 0 and starts[i] >= until:
            current, until = current + 1, int(ends[i])
        until = int(ends[i]) if until < 0 else min(until, int(ends[i]))
        generation[i] = current
    return by_worker[np.lexsort((sorted_process, turn, np.repeat(generation, sizes)))]


def _next_ready(done_ns: Ints, is_found: npt.NDArray[np.bool_]) -> Ints:
    """Return when the first later batch was done, for each wait."""
    ready = np.where(is_found, done_ns, NEVER_NS)
    first = np.minimum.accumulate(ready[::-1])[::-1]
    return np.append(first[1:], NEVER_NS)


def _weights(
    rows: npt.NDArray[np.void], process: Ints, is_batch: npt.NDArray[np.bool_]
) -> tuple[Floats, Floats]:
    """Return, for each row, the shares of its own time that are starved and blocked unseen.

    The account of a batch covers the reads inside of it; its own time is the rest.
    """
    starved, unseen = np.zeros(len(rows)), np.zeros(len(rows))
    decodes = rows["kind"] == Kind.DECODE
    length = np.maximum(1, rows["duration_ns"]).astype(float)
    starved[decodes] = np.clip(rows["wait_ns"] / length, 0, 1)[decodes]
    if not is_batch.any():
        return starved, unseen
    inner = _inner_ns(rows, process, is_batch)
    batch = rows[is_batch]
    own = np.maximum(1.0, batch["duration_ns"] - inner)
    starved[is_batch] = np.clip(batch["wait_ns"] / own, 0, 1)
    blocked = own - batch["cpu_ns"] - batch["wait_ns"]
    known = batch["cpu_ns"] > 0
    unseen[is_batch] = np.where(known, np.clip(blocked / own, 0, 1 - starved[is_batch]), 0)
    return starved, unseen


def _inner_ns(rows: npt.NDArray[np.void], process: Ints, is_batch: npt.NDArray[np.bool_]) -> Floats:
    """Return the time of reads and opens inside of each batch."""
    inner = is_read(rows) | is_of(rows, Kind.OPEN, Kind.METADATA)
    start, length = rows["start_ns"], rows["duration_ns"]
    out = np.zeros(int(is_batch.sum()))
    batch_start, batch_end = start[is_batch], (start + length)[is_batch]
    of = process[is_batch]
    for number in np.unique(of).tolist():
        mine = np.flatnonzero(inner & (process == number))
        total = np.concatenate([[0], np.cumsum(length[mine])])
        here = of == number
        begin, end = batch_start[here], batch_end[here]
        at = np.searchsorted(start[mine], [begin, end])
        out[here] = np.minimum(total[at[1]] - total[at[0]], end - begin)
    return out
