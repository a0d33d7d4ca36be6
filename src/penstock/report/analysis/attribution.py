"""Whose fault is a wait: blame by intersection.

For each wait of a training loop, [asked, got], we take the batch that it waited for and intersect
the wait with what that batch was going through. Work that delayed nobody gets no blame.

A batch is found by its epoch and step where rows have them; for torch's DataLoader also by the
round of its workers. A worker that was busy with an earlier batch delays the one that is waited
for: so what the *worker* did during the wait counts. Where no batch can be found, what the loader
of the rank did at that time counts, in proportion.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.report.analysis.batches import AwaitedBatches, batches_made
from penstock.report.analysis.loops import TrainingLoop
from penstock.report.analysis.sources import NOT_SEEN, SourceNames, is_of, is_of_loader, is_read
from penstock.report.analysis.sweep import Activities, Cover, JoinedIntervals, covered
from penstock.report.analysis.values import Floats, Ints
from penstock.trace.reading import Trace
from penstock.trace.schema import Kind

_OPENS = (Kind.OPEN, Kind.METADATA)
_DECODES = (Kind.DECODE, Kind.JOIN, Kind.COLLATE)


@dataclass(frozen=True, kw_only=True)
class Blame:
    """Nanoseconds of each wait by cause."""

    parts: dict[str, Floats]
    """One of `values.WAITS` each."""
    fetch_by_source: dict[str, Floats]
    how: str
    """`step`, `worker` or `time`: how batches were found."""


@dataclass(frozen=True, kw_only=True)
class _Categories:
    """Numbers of the categories of a sweep: what the batch did, then what anybody did."""

    num_sources: int

    @property
    def open(self) -> int:
        return self.num_sources

    @property
    def decode(self) -> int:
        return self.num_sources + 1

    @property
    def hand_over(self) -> int:
        return 2 * self.anybody

    @property
    def later(self) -> int:
        return 2 * self.anybody + 1

    @property
    def anybody(self) -> int:
        """What to add for activities of other batches."""
        return self.num_sources + 2

    @property
    def total(self) -> int:
        return 2 * self.anybody + 2


def blame_of(
    trace: Trace,
    loop: TrainingLoop,
    sources: SourceNames,
    *,
    idle: float = 0.0,
    own_delay: float = 1.0,
) -> Blame:
    """Return the causes of the waits of one rank.

    `idle`: share of their time that its workers idle. `own_delay`: share of the time without a core
    that the job brings upon itself; the rest stays with what the worker was about to do.
    """
    rows = _loader_rows(trace, loop, sources)
    made = batches_made(trace, loop, rows)
    kinds = _Categories(num_sources=len(sources.names))
    line = JoinedIntervals(start_ns=loop.ask_ns, end_ns=loop.got_ns)
    activities = [_hand_overs(loop, line, made, kinds)]
    if made.how != "time":
        activities += [_own(rows, line, made, kinds, sources), _later(line, made, kinds)]
    activities.append(_anybody(rows, line, kinds, sources))
    cover = covered(line.base_ns, Activities.joined(activities), kinds.total)
    pieces = _WaitPieces(cover=cover, made=made, kinds=kinds, num_waits=len(loop))
    return _split(pieces, sources, idle=idle, own_delay=own_delay)


def _loader_rows(trace: Trace, loop: TrainingLoop, sources: SourceNames) -> npt.NDArray[np.void]:
    """Return the rows of the loader of a rank that overlap a wait."""
    spans = trace.spans
    keep = is_of(spans, *_OPENS, *_DECODES, Kind.BATCH, Kind.HAND_OVER) | is_read(spans)
    keep &= spans["rank"] == loop.rank
    if sources.is_penstock:
        # What Penstock does is in its own rows; reads below them are the same bytes again.
        keep &= ~is_of(spans, Kind.READ, Kind.OPEN, Kind.METADATA)
    found: npt.NDArray[np.void] = spans[keep]
    return found[is_of_loader(trace, found)]


def _categories(
    rows: npt.NDArray[np.void], kinds: _Categories, sources: SourceNames
) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Return the category of each row, and which rows have one."""
    category = np.full(len(rows), -1, np.int64)
    reads = is_read(rows)
    category[reads] = sources.of(rows[reads])
    category[is_of(rows, *_OPENS)] = kinds.open
    category[is_of(rows, *_DECODES, Kind.BATCH)] = kinds.decode
    return category, category >= 0


def _own(
    rows: npt.NDArray[np.void],
    line: JoinedIntervals,
    made: AwaitedBatches,
    kinds: _Categories,
    sources: SourceNames,
) -> Activities:
    """Return what the batches that were waited for went through, on the line of the waits."""
    category, known = _categories(rows, kinds, sources)
    starved, unseen = made.starved, made.unseen
    if made.how == "step":
        wait = made.wait_of_row
        known = known & (wait >= 0)
        at = wait[known]
        start, end = rows["start_ns"][known], (rows["start_ns"] + rows["duration_ns"])[known]
        base, begin = line.base_ns[at], line.start_ns[at]
        length = line.end_ns[at] - begin
        low = base + np.clip(start - begin, 0, length)
        high = base + np.clip(end - begin, 0, length)
        return _kept(low, high, category[known], starved[known], unseen[known])
    parts = []
    process = made.process_of_row
    for number in np.unique(made.process).tolist():
        # Only the waits for batches of this worker, and only until the batch was done.
        waits = made.process == number
        of = known & (process == number)
        begin = np.where(waits, line.start_ns, line.end_ns)
        until = np.where(waits, np.clip(made.done_ns, line.start_ns, line.end_ns), line.end_ns)
        own = JoinedIntervals(start_ns=begin[waits], end_ns=until[waits])
        start, end = rows["start_ns"][of], (rows["start_ns"] + rows["duration_ns"])[of]
        low, high = _lifted(own, own.place(start), own.place(end), np.flatnonzero(waits), line)
        parts.append(_kept(low, high, category[of], starved[of], unseen[of]))
    return Activities.joined(parts)


def _lifted(
    own: JoinedIntervals, low: Ints, high: Ints, where: Ints, line: JoinedIntervals
) -> tuple[Ints, Ints]:
    """Return stretches of a worker's line as stretches of the line of all waits.

    A worker's batch is taken before its next one is waited for, so a stretch lies in one wait; of
    one that does not, only the part in the last wait counts.
    """
    at = np.clip(np.searchsorted(own.base_ns, high, side="left") - 1, 0, len(where) - 1)
    lift = line.base_ns[where[at]] - own.base_ns[at]
    return np.maximum(low, own.base_ns[at]) + lift, high + lift


def _kept(low: Ints, high: Ints, category: Ints, starved: Floats, unseen: Floats) -> Activities:
    keep = high > low
    return Activities(
        low=low[keep],
        high=high[keep],
        category=category[keep],
        starved=starved[keep],
        unseen=unseen[keep],
    )


def _without_weights(low: Ints, high: Ints, category: Ints) -> Activities:
    none = np.zeros(len(low))
    return _kept(low, high, category, none, none)


def _hand_overs(
    loop: TrainingLoop, line: JoinedIntervals, made: AwaitedBatches, kinds: _Categories
) -> Activities:
    """Return the ends of the waits in which the batch was ready."""
    ready = loop.ask_ns + loop.wait_ns
    if made.how != "time":
        done = np.clip(made.done_ns, loop.ask_ns, loop.got_ns)
        ready = np.where(made.is_found, done, ready)
    low = line.base_ns[:-1] + (ready - loop.ask_ns)
    return _without_weights(low, line.base_ns[1:], np.full(len(loop), kinds.hand_over))


def _later(line: JoinedIntervals, made: AwaitedBatches, kinds: _Categories) -> Activities:
    """Return the parts of the waits in which a later batch was ready, but not the one waited for.

    A batch is later if it is of the same epoch: `AwaitedBatches.next_ready_ns` has the first of
    them.
    """
    begin = np.clip(made.next_ready_ns, line.start_ns, line.end_ns) - line.start_ns
    until = np.clip(made.done_ns, line.start_ns, line.end_ns) - line.start_ns
    base = line.base_ns[:-1]
    of = made.is_found
    return _without_weights(
        (base + begin)[of], (base + until)[of], np.full(int(of.sum()), kinds.later)
    )


def _anybody(
    rows: npt.NDArray[np.void], line: JoinedIntervals, kinds: _Categories, sources: SourceNames
) -> Activities:
    category, known = _categories(rows, kinds, sources)
    start, end = rows["start_ns"][known], (rows["start_ns"] + rows["duration_ns"])[known]
    return _without_weights(line.place(start), line.place(end), category[known] + kinds.anybody)


@dataclass(frozen=True, kw_only=True)
class _WaitPieces:
    """The line of the waits, cut into pieces."""

    cover: Cover
    made: AwaitedBatches
    kinds: _Categories
    num_waits: int

    def total(self, share: Floats) -> Floats:
        """Return, for each wait, the length of its pieces, each times its share."""
        weights = self.cover.length * share
        sums = np.bincount(self.cover.interval, weights, self.num_waits)[: self.num_waits]
        return sums.astype(np.float64)


def _split(pieces: _WaitPieces, sources: SourceNames, *, idle: float, own_delay: float) -> Blame:
    """Return the length of the pieces by cause, for each wait."""
    cover, made, kinds = pieces.cover, pieces.made, pieces.kinds
    total = pieces.total
    own = _own_shares(cover.active[: kinds.anybody], kinds, nested=made.how == "worker")
    has_own = own.sum(axis=0) > 0
    ready = ~has_own & (cover.active[kinds.hand_over] > 0)
    others = _counts(cover.active[kinds.anybody : 2 * kinds.anybody], kinds, made.has_batches)
    has_others = ~has_own & ~ready & (others.sum(axis=0) > 0)
    shares = np.where(has_own, own, 0.0)
    shares += np.where(has_others, others / np.maximum(1e-9, others.sum(axis=0)), 0.0)
    left = ~has_own & ~ready & ~has_others
    found = made.is_found[cover.interval]

    # The weights are sums over own decoding activities; others take the mean of the run.
    num_decoding = np.maximum(1, cover.active[kinds.decode])
    starved = own_delay * np.where(has_own, cover.starved / num_decoding, made.starved_mean)
    unseen = np.where(has_own, cover.unseen / num_decoding, made.unseen_mean)
    decode = shares[kinds.decode]
    # Idle workers could have made the batch: so much of an in-order wait is for want of depth.
    later = np.where(cover.active[kinds.later] > 0, min(1.0, idle), 0.0)

    busy = 1.0 - later
    by_source = {name: total(shares[i] * busy) for i, name in enumerate(sources.names)}
    hidden = total(decode * unseen * busy)
    if hidden.any():
        by_source[NOT_SEEN] = hidden
    parts = {
        "fetch": np.sum(list(by_source.values()), axis=0)
        if by_source
        else np.zeros(pieces.num_waits),
        "open": total(shares[kinds.open] * busy),
        "decode": total(decode * (1 - np.minimum(1, starved + unseen)) * busy),
        "cpu-starved": total(decode * starved * busy),
        "head-of-line": total((has_own | has_others) * later),
        "queue": total((left & found).astype(float)),
        "hand-over": total(ready.astype(float)),
        "loader": total((left & ~found).astype(float)),
    }
    return Blame(parts=parts, fetch_by_source=by_source, how=made.how)


def _own_shares(active: npt.NDArray[np.int32], kinds: _Categories, *, nested: bool) -> Floats:
    """Return which share of a piece goes to each category: evenly to all that run.

    In a worker of torch, reads lie inside of the batch's row: there they come before decoding.
    """
    runs = (active > 0).astype(np.float64)
    if nested:
        inner = np.delete(runs, kinds.decode, axis=0).sum(axis=0) > 0
        runs[kinds.decode] = np.where(inner, 0.0, runs[kinds.decode])
    out: Floats = runs / np.maximum(1.0, runs.sum(axis=0))
    return out


def _counts(active: npt.NDArray[np.int32], kinds: _Categories, has_batches: bool) -> Floats:
    """Return how many activities of each category run; reads inside of batches count once."""
    counts = active.astype(np.float64)
    if has_batches:
        inner = np.delete(counts, kinds.decode, axis=0).sum(axis=0)
        counts[kinds.decode] = np.maximum(0.0, counts[kinds.decode] - inner)
    return counts
