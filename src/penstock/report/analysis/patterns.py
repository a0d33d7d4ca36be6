"""The spatial and temporal pattern of the reads of each rank, and how ranks share objects."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.report.analysis.sources import SourceNames, is_of_loader, is_of_validation, is_read
from penstock.report.analysis.values import Floats, Ints, Pattern, Sharing, SlowObject
from penstock.trace.reading import Trace
from penstock.trace.schema import Flag, Kind

Rows = npt.NDArray[np.void]

CLEAR = 0.8
"""A label names what at least this share of the requests does."""
FOLLOWED_MIN = 0.3
"""With fewer requests than this that have one before them on the same object, objects are read
whole, and the place within them says nothing."""
WHOLE_MIN = 0.9
"""A pass that reads at least this share of an object reads it whole."""
LOCAL_MAX = 0.35
"""A shuffle whose jumps are below this share of a uniform one's stays within blocks."""
SLOWEST_MAX = 20
SLOW_FACTOR = 2.0
"""An object is slow if each of its requests takes so many times as long as others of its size."""
SLOW_READS_MIN = 3
"""Reads of an object, all of them slow, that make it a slow one."""
MINORITY_MAX = 0.4
"""Slow objects that serve more of the requests than this are no exception: the store is slow."""


def reads_of(trace: Trace, sources: SourceNames) -> Rows:
    """Return requests and reads that brought something, and zero-byte reads."""
    spans = trace.spans
    keep = is_read(spans) & ((spans["flags"] & int(Flag.ERROR)) == 0)
    if sources.is_penstock:
        # Reads below Penstock's own requests are the same bytes again.
        keep &= spans["kind"] != Kind.READ
    found: Rows = spans[keep]
    return found[is_of_loader(trace, found)]


def patterns_of(trace: Trace, reads: Rows, samples: dict[int, int]) -> tuple[Pattern, ...]:
    """Return the pattern of each rank; `samples`: how many each rank got."""
    opens = trace.of(Kind.OPEN)
    opens = opens[~is_of_validation(trace, opens)]
    ranks = sorted(set(samples) | set(np.unique(reads["rank"]).tolist()))
    return tuple(
        _pattern(
            rank,
            reads[reads["rank"] == rank],
            int((opens["rank"] == rank).sum()),
            samples.get(rank, 0),
        )
        for rank in ranks
    )


def _pattern(rank: int, reads: Rows, num_opens: int, num_samples: int) -> Pattern:
    real = reads[reads["size_bytes"] > 0]
    sizes = real["size_bytes"]
    ordered = _ordered(real)
    sequential, strided, random, stride, locality, followed = _spatial(ordered)
    # A sample that is a file of its own: the order of files is shuffled, not that within them.
    whole, num_passes = ordered.whole_passes if len(ordered.rows) else (0.0, 0)
    is_whole = whole >= CLEAR and num_passes >= num_samples / 2
    p50, p90, p99 = np.percentile(sizes, [50, 90, 99]) if len(sizes) else (0.0, 0.0, 0.0)
    mean, most = _concurrency(real)
    per = max(1, num_samples)
    return Pattern(
        rank=rank,
        label="whole files"
        if is_whole
        else _label(sequential, strided, random, locality, followed),
        num_requests=len(real),
        num_zero_reads=len(reads) - len(real),
        num_opens=num_opens,
        read_bytes=int(sizes.sum()),
        sequential=sequential,
        strided=strided,
        random=random,
        stride_bytes=stride,
        locality=locality,
        size_p50=float(p50),
        size_p90=float(p90),
        size_p99=float(p99),
        requests_per_sample=len(real) / per,
        opens_per_sample=num_opens / per,
        bytes_per_sample=float(sizes.sum()) / per,
        concurrency_mean=mean,
        concurrency_max=most,
        reuse=_reuse(real),
        num_objects=len(np.unique(real["object"])),
    )


@dataclass(frozen=True, kw_only=True)
class _OrderedReads:
    """Reads of each thread on each object, in the order of time."""

    rows: Rows
    begins_pass: npt.NDArray[np.bool_]
    """Whether a read begins a pass over its object: the thread's first read of it, or one that goes
    back to the object's beginning, as a rule in another epoch."""
    low: Ints
    high: Ints
    """Where the object of each read begins and ends, as far as any read shows it."""

    @property
    def whole_passes(self) -> tuple[float, int]:
        """Share of the passes that read their object whole, and the number of passes."""
        number = np.cumsum(self.begins_pass) - 1
        read = np.bincount(number, self.rows["size_bytes"])
        extent = (self.high - self.low)[self.begins_pass]
        return float((read >= WHOLE_MIN * extent).mean()), len(read)


def _ordered(reads: Rows) -> _OrderedReads:
    """Return the reads whose offsets are known.

    Those of one thread on one object are compared: what several workers do at once is no jump.
    """
    known = reads[reads["offset"] >= 0]
    order = np.lexsort((known["start_ns"], known["object"], known["thread"], known["process"]))
    rows = known[order]
    where, offset = rows["object"], rows["offset"]
    low = np.full(int(where.max(initial=0)) + 1, np.iinfo(np.int64).max)
    high = np.zeros(len(low), np.int64)
    np.minimum.at(low, where, offset)
    np.maximum.at(high, where, offset + rows["size_bytes"])
    begins = (offset == low[where]) & (offset <= np.roll(offset, 1))
    for column in ("object", "thread", "process"):
        begins |= rows[column] != np.roll(rows[column], 1)
    begins[:1] = True
    return _OrderedReads(rows=rows, begins_pass=begins, low=low[where], high=high[where])


def _spatial(reads: _OrderedReads) -> tuple[float, float, float, int, float, float]:
    """Return shares of sequential, strided and random requests, stride, locality and followed."""
    rows, offset = reads.rows, reads.rows["offset"]
    end = offset + rows["size_bytes"]
    jump = offset - np.roll(end, 1)
    step = offset - np.roll(offset, 1)
    # The same place again is reuse, most often of another epoch, and no pattern within an object.
    same = ~reads.begins_pass & (step != 0)
    if not same.any():
        return 0.0, 0.0, 0.0, 0, 0.0, 0.0
    # Two equal steps in a row make both of them strided.
    again = same & np.roll(same, 1) & (step == np.roll(step, 1))
    is_strided = again | (np.roll(again, -1) & same)
    # A buffered reader that gives back what it read too much goes on a bit before its last end.
    is_next = same & ((jump == 0) | ((jump < 0) & (step > 0) & (end > np.roll(end, 1))))
    is_strided &= ~is_next & same
    jumps = same & ~is_next & ~is_strided
    count = int(same.sum())
    strides, times = np.unique(step[is_strided], return_counts=True)
    return (
        float(is_next.sum() / count),
        float(is_strided.sum() / count),
        float(jumps.sum() / count),
        int(strides[times.argmax()]) if len(strides) else 0,
        _locality(reads, jumps, step),
        count / len(rows),
    )


def _locality(reads: _OrderedReads, jumps: npt.NDArray[np.bool_], step: Ints) -> float:
    """Return the mean jump by that of a uniform shuffle, which is a third of the object."""
    if not jumps.any():
        return 0.0
    expected = (reads.high - reads.low)[jumps] / 3
    return float(np.minimum(4, np.abs(step[jumps]) / np.maximum(1, expected)).mean())


def _label(
    sequential: float, strided: float, random: float, locality: float, followed: float
) -> str:
    if followed < FOLLOWED_MIN:
        return "whole files"
    if sequential >= CLEAR and random < 0.02:
        return "sequential"
    if strided >= CLEAR:
        return "strided"
    if random >= CLEAR and locality > LOCAL_MAX:
        return "random"
    if sequential + random >= CLEAR:
        return "block-shuffled"
    return "mixed"


def _concurrency(reads: Rows) -> tuple[float, int]:
    """Return requests in flight: mean over the time with at least one, and the most."""
    if not len(reads):
        return 0.0, 0
    times = np.concatenate([reads["start_ns"], reads["start_ns"] + reads["duration_ns"]])
    change = np.concatenate([np.ones(len(reads), np.int64), np.full(len(reads), -1)])
    # At the same time, ends come before starts.
    order = np.lexsort((change, times))
    running = np.cumsum(change[order])
    length = np.diff(times[order], append=times[order[-1]])
    busy = length[running > 0].sum()
    return float(reads["duration_ns"].sum() / max(1, busy)), int(running.max())


def _reuse(reads: Rows) -> float:
    total = int(reads["size_bytes"].sum())
    if not total:
        return 0.0
    _, first = np.unique(_places(reads), return_index=True)
    return 1.0 - float(reads["size_bytes"][first].sum()) / total


def _places(reads: Rows) -> npt.NDArray[np.uint64]:
    """Return one number for each object and offset; two places share one by a rare accident."""
    mixed = reads["object"].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return mixed ^ (reads["offset"].astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F))


def sharing_of(
    trace: Trace, reads: Rows, epoch: Ints, *, sample_bytes: float, num_samples: int
) -> Sharing:
    """Return how ranks share objects; `epoch`: of each read."""
    real = (reads["size_bytes"] > 0) & ~np.isin(
        reads["kind"], [int(Kind.TIER_READ), int(Kind.PEER_REQUEST)]
    )
    rows, of = reads[real], epoch[real]
    total = int(rows["size_bytes"].sum())
    delivered = sample_bytes * num_samples
    ranks, where = np.unique(rows["rank"], return_inverse=True)
    of_object, took = rows["object"].astype(np.int64), rows["duration_ns"].astype(np.float64)
    expected = expected_ns(rows)
    rank_bytes = np.bincount(where, rows["size_bytes"], len(ranks))
    return Sharing(
        num_objects=int((np.bincount(of_object) > 0).sum()),
        shared_objects=_shared_objects(rows, of),
        duplicate_bytes=_duplicate_bytes(rows, of) / total if total else 0.0,
        amplification=total / delivered if delivered and total else None,
        busiest_share=_busiest(rows),
        slowest=_slowest(trace, rows),
        distinct_bytes=_distinct_bytes(rows),
        rank_bytes=dict(zip(ranks.tolist(), rank_bytes.astype(int).tolist(), strict=True)),
        slow_share=_slow_share(of_object, took, expected),
        slow_share_by_rank={
            int(rank): _slow_share(of_object[where == i], took[where == i], expected[where == i])
            for i, rank in enumerate(ranks.tolist())
        },
    )


def _slow_share(of: Ints, took: Floats, expected: Floats) -> float:
    """Return the share of the time that a minority of slow objects takes beyond the expected."""
    if len(of) < 8:
        return 0.0
    busy, due, count = np.bincount(of, took), np.bincount(of, expected), np.bincount(of)
    # A read may be slow by accident; all of an object's reads are not.
    best = np.full(len(count), np.inf)
    np.minimum.at(best, of, took / np.maximum(1.0, expected))
    slow = (best > SLOW_FACTOR) & (count >= SLOW_READS_MIN)
    if not slow.any() or count[slow].sum() > MINORITY_MAX * len(of):
        return 0.0
    return float((busy - due)[slow].sum() / max(1.0, busy.sum()))


def _shared_objects(rows: Rows, epoch: Ints) -> float:
    if not len(rows):
        return 0.0
    num_epochs, num_ranks = int(epoch.max(initial=0)) + 1, int(rows["rank"].max()) + 1
    place = rows["object"].astype(np.int64) * num_epochs + np.clip(epoch, 0, None)
    pairs = np.unique(place * num_ranks + rows["rank"]) // num_ranks
    _, ranks = np.unique(pairs, return_counts=True)
    return float((ranks > 1).mean())


def _duplicate_bytes(rows: Rows, epoch: Ints) -> float:
    """Return bytes that another rank reads in the same epoch, too."""
    if len(np.unique(rows["rank"])) < 2:
        return 0.0
    place = _places(rows) ^ (np.clip(epoch, 0, None).astype(np.uint64) << np.uint64(40))
    order = np.lexsort((rows["rank"], place))
    place, rank, size = place[order], rows["rank"][order], rows["size_bytes"][order]
    again = (place[1:] == place[:-1]) & (rank[1:] != rank[:-1])
    return float(size[1:][again].sum())


def _distinct_bytes(rows: Rows) -> int:
    _, first = np.unique(_places(rows), return_index=True)
    return int(rows["size_bytes"][first].sum())


def _busiest(rows: Rows) -> float:
    if not len(rows):
        return 0.0
    busy = np.bincount(rows["object"], rows["duration_ns"])
    busy = np.sort(busy[busy > 0])[::-1]
    return float(busy[: max(1, len(busy) // 10)].sum() / max(1.0, busy.sum()))


def expected_ns(rows: Rows) -> Floats:
    """Return how long requests of these sizes take as a rule: latency plus size by bandwidth."""
    size = rows["size_bytes"].astype(np.float64)
    took = rows["duration_ns"].astype(np.float64)
    if len(rows) < 8 or np.ptp(size) == 0:
        return np.full(len(rows), np.median(took) if len(rows) else 0.0)
    # Medians of small and of large requests: a few slow ones must not bend the line.
    cut = np.median(size)
    small, large = size <= cut, size > cut
    if not large.any():
        return np.full(len(rows), np.median(took))
    x0, x1 = size[small].mean(), size[large].mean()
    y0, y1 = np.median(took[small]), np.median(took[large])
    slope = max(0.0, (y1 - y0) / max(1.0, x1 - x0))
    line: Floats = np.maximum(1.0, y0 + slope * (size - x0))
    return line


def _slowest(trace: Trace, rows: Rows) -> tuple[SlowObject, ...]:
    if not len(rows):
        return ()
    of, took = rows["object"], rows["duration_ns"]
    busy, expected = np.bincount(of, took), np.bincount(of, expected_ns(rows))
    count, size = np.bincount(of), np.bincount(of, rows["size_bytes"])
    out = []
    for i in np.argsort(-busy)[:SLOWEST_MAX].tolist():
        if not count[i]:
            break
        out.append(
            SlowObject(
                name=trace.name_of(i),
                num_requests=int(count[i]),
                read_bytes=int(size[i]),
                busy_s=float(busy[i]) / 1e9,
                latency_p50=float(np.median(took[of == i])) / 1e9,
                slowdown=float(busy[i] / max(1.0, expected[i])),
            )
        )
    return tuple(out)
