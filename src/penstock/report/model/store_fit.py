"""The store as its requests show it: latency, the rate of one connection, the rate of all together.

A request alone takes its latency and its bytes at the rate of a connection. Of so many at once each
gets its share: they take as long as their bytes need on the bandwidth of all. The longer of the two
counts. Requests are grouped by how many were under way beside them; the means of the groups are
fitted, of one run or of two. Where no group was slowed down by others, the run says nothing about
the bandwidth, and none is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_REQUESTS_MAX = 4000
"""Requests of a run that are looked at: the first ones."""
_GROUPS_MAX = 12
_GROUP_LEAST = 20
"""Requests of a group, at least: its mean has to mean something."""
_FULL_SHARE = 0.75
"""A limit that the busiest time of a run came less close to was not seen."""
_COUNTS_APART = 1.5
"""Groups have to differ by so much in how many requests were under way."""
_EVIDENCE = 0.7
"""A limit has to bring the squared error of groups below this share."""
_SUSTAINED = 0.75
_ROUNDS = 8
_WITHOUT_LIMIT = 1e15


@dataclass(frozen=True, kw_only=True)
class Requests:
    """Requests of one run to its store, of one node, in the order of their starts."""

    starts_s: Floats
    durations_s: Floats
    sizes: Floats


@dataclass(frozen=True, kw_only=True)
class StoreFit:
    """A store, fitted."""

    latency_s: float
    """Median time to the first byte."""
    bytes_s: float
    """Of all requests of the run together; infinite where the run never came near a limit."""
    connection_bytes_s: float
    latencies_s: Floats
    """Of the requests that were replayed, in their order: their durations without the transfer."""
    error: float
    """Median of |log(replayed / measured)| over requests."""

    def slower(self, factor: float) -> StoreFit:
        """Return a store whose reads take so many times as long."""
        factor = max(factor, 1e-6)
        return replace(
            self,
            latency_s=self.latency_s * factor,
            latencies_s=self.latencies_s * factor,
            bytes_s=self.bytes_s / factor,
            connection_bytes_s=self.connection_bytes_s / factor,
        )

    def changed(self, *, bytes_s: float | None, latency_s: float | None) -> StoreFit:
        """Return a store of another bandwidth or latency; the spread stays in proportion."""
        out = self
        if bytes_s is not None:
            own = min(out.connection_bytes_s, bytes_s)
            if out.connection_bytes_s > 0.9 * out.bytes_s:
                own = bytes_s  # The store was the limit of a connection, not the connection itself.
            out = replace(out, bytes_s=bytes_s, connection_bytes_s=own)
        if latency_s is not None:
            drawn = with_latency(self.latencies_s, self.latency_s, latency_s)
            out = replace(out, latency_s=latency_s, latencies_s=drawn)
        return out


def with_latency(delays_s: Floats, median_s: float, latency_s: float) -> Floats:
    """Return delays as a store of another latency would have them.

    They grow in proportion, but for what is far above the median: that was no latency of the store.
    """
    if median_s <= 0:
        return np.asarray(delays_s + latency_s)
    grows = latency_s / median_s - 1
    return np.asarray(np.maximum(delays_s + grows * np.minimum(delays_s, 2 * median_s), 0.0))


Group = tuple[float, float, float, float]
"""Requests at once, bytes and seconds of one, number of requests: means of a group."""


def fit_store(runs: Sequence[Requests]) -> StoreFit | None:
    """Return the store that fits the requests of one or more runs; None without requests."""
    runs = [_first(run) for run in runs if len(run.sizes)]
    if not runs:
        return None
    groups = [group for run in runs for group in _groups(run)]
    seen = max(_rate(run, 1.0) for run in runs)
    few = _few(runs)
    total = _bandwidth(groups, seen, few)
    if not math.isinf(total):
        # What came for a quarter of the time is no more than the store can give.
        total = max(total, *(_rate(run, _SUSTAINED) for run in runs))
    alone_s, own = _apart(few, total)
    left = [
        np.clip(run.durations_s - _transfer_s(run, alone_s, own, total), 0.1 * alone_s, None)
        for run in runs
    ]
    fitted = [_request_s(q, s, alone_s, 1 / own, total) / d for q, s, d, _ in groups]
    return StoreFit(
        latency_s=float(np.median(np.concatenate(left))),
        bytes_s=total,
        connection_bytes_s=own,
        latencies_s=np.concatenate(left),
        error=float(np.mean(np.abs(np.log(fitted)))),
    )


def _request_s(count: float, size: float, alone_s: float, byte_s: float, total: float) -> float:
    """Return how long a request takes, of so many at once."""
    pipe_s = size / total
    waits_s = alone_s + max(0.0, size * byte_s - pipe_s)
    slower = np.interp(count, *_slower(count, waits_s, pipe_s))
    return waits_s + pipe_s * float(slower)


def _slower(count: float, waits_s: float, pipe_s: float) -> tuple[Floats, Floats]:
    """Return by which factor a transfer takes longer among 1, 2, … requests that come again.

    Mean value analysis of a closed loop: a request waits for its latency, then it meets in the
    pipe as many others as there are on average with one request less.
    """
    counts = np.arange(1, max(2, math.ceil(count)) + 1)
    factors = np.ones(len(counts))
    in_pipe = 0.0
    for place, num in enumerate(counts.tolist()):
        factors[place] = 1 + in_pipe
        inside_s = pipe_s * factors[place]
        in_pipe = num * inside_s / max(waits_s + inside_s, 1e-12)
    return counts.astype(np.float64), factors


def _transfer_s(run: Requests, alone_s: float, own: float, total: float) -> Floats:
    """Return the part of each request that is not latency."""
    pipe_s = float(run.sizes.mean()) / total
    counts = _in_flight(run)
    factors = np.interp(counts, *_slower(float(counts.max()), alone_s, pipe_s))
    return np.asarray(run.sizes * (factors / total + max(0.0, 1 / own - 1 / total)))


def _groups(run: Requests) -> list[Group]:
    """Return means of requests that met about as many others."""
    counts = _in_flight(run)
    order = np.argsort(counts, kind="stable")
    num = max(1, min(_GROUPS_MAX, len(order) // _GROUP_LEAST))
    return [
        (
            float(counts[part].mean()),
            float(run.sizes[part].mean()),
            float(run.durations_s[part].mean()),
            float(len(part)),
        )
        for part in np.array_split(order, num)
    ]


@dataclass(frozen=True, kw_only=True)
class _UncrowdedRequests:
    """The requests that met the fewest others."""

    duration_s: float
    size: float
    byte_s: float
    """How much longer larger ones take; 0 where sizes hardly differ."""
    count: float
    """Requests under way at once."""


def _few(runs: Sequence[Requests]) -> _UncrowdedRequests:
    counts = np.concatenate([_in_flight(run) for run in runs])
    sizes = np.concatenate([run.sizes for run in runs])
    durations = np.concatenate([run.durations_s for run in runs])
    few = np.argsort(counts, kind="stable")[: max(_GROUP_LEAST, len(counts) // 5)]
    x, y = sizes[few], durations[few]
    spread = float(((x - x.mean()) ** 2).sum())
    rise = float(((x - x.mean()) * (y - y.mean())).sum()) / spread if spread else 0.0
    is_even = x.std() < 0.05 * x.mean()
    return _UncrowdedRequests(
        duration_s=float(y.mean()),
        size=float(x.mean()),
        byte_s=0.0 if is_even else min(max(0.0, rise), 0.9 * float(y.mean() / x.mean())),
        count=float(counts[few].mean()),
    )


def _apart(few: _UncrowdedRequests, total: float) -> tuple[float, float]:
    """Return latency and the rate of a connection, if the bandwidth of all is known.

    The few requests shared the pipe, too: what that explains is neither.
    """
    own = min(1 / max(few.byte_s - (few.count - 1) / total, 1 / _WITHOUT_LIMIT), total)
    latency_s = few.duration_s
    for _ in range(_ROUNDS):
        waits_s = latency_s + few.size * (1 / own - 1 / total)
        slower = float(np.interp(few.count, *_slower(few.count, waits_s, few.size / total)))
        transfer_s = few.size * (slower / total + 1 / own - 1 / total)
        latency_s = max(few.duration_s - transfer_s, 0.1 * few.duration_s)
    return latency_s, own


def _bandwidth(groups: Sequence[Group], seen: float, few: _UncrowdedRequests) -> float:
    """Return the bandwidth of all requests together; infinite where groups do not need one."""

    def loss(total: float) -> float:
        alone_s, own = _apart(few, total)
        return sum(
            n * math.log(_request_s(q, s, alone_s, 1 / own, total) / d) ** 2
            for q, s, d, n in groups
        )

    counts = [q for q, _, _, _ in groups]
    if max(counts) < _COUNTS_APART * min(counts):
        return math.inf  # Always as many at once: a full pipe and a long latency look alike.
    tried = seen * np.geomspace(0.7, 1 / _FULL_SHARE, 40)
    best = min(tried.tolist(), key=loss)
    is_needed = loss(best) < _EVIDENCE * loss(math.inf) and best < tried[-1]
    return float(best) if is_needed else math.inf


def _in_flight(run: Requests) -> Floats:
    """Return how many requests were under way during each, on average."""
    ends = run.starts_s + run.durations_s
    times = np.concatenate([run.starts_s, ends])
    change = np.concatenate([np.ones(len(ends)), -np.ones(len(ends))])
    order = np.argsort(times, kind="stable")
    times, count = times[order], np.cumsum(change[order])
    area = np.concatenate([[0.0], np.cumsum(count[:-1] * np.diff(times))])
    inside = np.interp(ends, times, area) - np.interp(run.starts_s, times, area)
    return np.asarray(np.maximum(inside / run.durations_s, 1.0))


def _first(run: Requests) -> Requests:
    order = np.argsort(run.starts_s, kind="stable")[:_REQUESTS_MAX]
    return Requests(
        starts_s=run.starts_s[order],
        durations_s=np.maximum(run.durations_s[order], 1e-6),
        sizes=np.maximum(run.sizes[order], 1.0),
    )


def _rate(run: Requests, share: float) -> float:
    """Return a quantile of the bytes a second in the twentieths of a run."""
    ends = run.starts_s + run.durations_s
    span_s = max(float(ends.max() - run.starts_s[0]), 1e-6)
    counts, _ = np.histogram(ends, bins=20, weights=run.sizes)
    return max(float(np.quantile(counts, share)) / (span_s / 20), 1.0)
