"""Measures the store: latency of single small reads, and throughput by requests in flight.

The curve counts the bytes that arrive, with the latency of each request in the time. So it depends
on the size of requests, which `StoreModel.request_bytes` records.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.machine import StoreModel
from penstock.simulate.probe.effort import SMALL_BYTES, Effort
from penstock.simulate.probe.limits import useful_count
from penstock.simulate.probe.target import Range, Target
from penstock.simulate.probe.timing import doubling, grown_curve, latencies, rate_of, readable
from penstock.storage.folder import FolderStore
from penstock.storage.pool import ReadPool
from penstock.units import show_bytes, show_count

_LATENCY_SHARE = 0.2
"""The share of the store's time for single small reads; the curve takes the rest."""
_SMALL_READS_MAX = 200
_ROUNDS_MIN = 2
"""The fewest requests of each thread at one point of the curve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFacts:
    """A store and how it was measured."""

    model: StoreModel
    in_flight: int
    """Requests in flight beyond which more do not help."""
    read_bytes: int
    num_requests: int
    note: str


def measure_store(target: Target, effort: Effort) -> StoreFacts:
    """Measure a store; errors of the store are passed on."""
    asker = _RangeReader(target, effort)
    seconds = asker.latencies()
    curve = grown_curve(doubling(effort.in_flight_max), asker.rate, effort.repeats)
    low_s, high_s = np.percentile(seconds, [50, 99])
    model = StoreModel(
        latency_s=readable(float(low_s)),
        latency_p99_s=readable(float(high_s)),
        throughput=curve,
        request_bytes=round(asker.draws.mean_bytes),
    )
    note = (
        f"{target.store.source}, {show_count(asker.num_requests)} ranges at random, "
        f"{show_bytes(asker.read_bytes)} in all; latency by {len(seconds)} of up to "
        f"{show_bytes(SMALL_BYTES)}, throughput by those of {show_bytes(asker.draws.mean_bytes)}"
    )
    if asker.draws.num_again and not isinstance(target.store, FolderStore):
        note += f"; {show_count(asker.draws.num_again)} ranges read again, caches may have helped"
    return StoreFacts(
        model=model,
        in_flight=useful_count(curve),
        read_bytes=asker.read_bytes,
        num_requests=asker.num_requests,
        note=note,
    )


class _RangeReader:
    """Reads ranges, and counts requests and bytes."""

    def __init__(self, target: Target, effort: Effort) -> None:
        self.draws = target.draws(seed=7)
        self.read_bytes = 0
        self.num_requests = 0
        self._store = target.store
        self._effort = effort
        self._num_warm = 1
        num_points = len(doubling(effort.in_flight_max)) * effort.repeats
        self._seconds = (1 - _LATENCY_SHARE) * effort.store_s / num_points
        self._point_bytes = effort.store_bytes_max // num_points

    def latencies(self) -> list[float]:
        """Return the times of small reads in a row, after one that makes the connection."""
        ranges = [_small(r) for r in self.draws.take(_SMALL_READS_MAX + 1)]
        self._forget(ranges)
        self._done(list(self._reads(iter(ranges[:1]))))
        seconds = _LATENCY_SHARE * self._effort.store_s
        found = latencies(self._reads(iter(ranges[1:])), seconds, _SMALL_READS_MAX)
        self._done([r.length for r in ranges[1 : 1 + len(found)]])
        # Ranges that were not read are unspoilt by caches: the curve may have them.
        self.draws.put_back(len(ranges) - 1 - len(found))
        return found

    def rate(self, in_flight: int) -> float:
        """Return the bytes a second with a number of requests in flight."""
        self._connect(in_flight)
        wanted = min(round(self._point_bytes / self.draws.mean_bytes), self.draws.num_ranges)
        ranges = self.draws.take(max(_ROUNDS_MIN * in_flight, wanted))
        self._forget(ranges)
        rest = iter(ranges)  # Threads share it without a lock: a list's iterator is atomic.
        done: list[int] = []

        def worker(_: int) -> Iterator[int]:
            for length in self._reads(rest):
                done.append(length)
                yield length

        rate = rate_of(in_flight, worker, self._seconds)
        self._done(done)
        self.draws.put_back(len(ranges) - len(done))
        return rate

    def _reads(self, ranges: Iterator[Range]) -> Iterator[int]:
        buffer = memoryview(bytearray(SMALL_BYTES))
        for info, offset, length in ranges:
            if length > len(buffer):
                buffer = memoryview(bytearray(length))
            self._store.read_into(info, offset, buffer[:length])
            yield length

    def _done(self, lengths: list[int]) -> None:
        self.num_requests += len(lengths)
        self.read_bytes += sum(lengths)

    def _connect(self, in_flight: int) -> None:
        """Make the connections first: a run pays for handshakes once, not at each point."""
        if in_flight <= self._num_warm:
            return
        ranges = [_small(r) for r in self.draws.take(in_flight)]
        with ReadPool(in_flight) as pool:
            lists = pool.map_unordered(lambda r: list(self._reads(iter([r]))), ranges)
            self._done([length for lengths in lists for length in lengths])
        self._num_warm = in_flight

    def _forget(self, ranges: list[Range]) -> None:
        """Drop the ranges from the page cache before they are read, if the store is a folder."""
        if not isinstance(self._store, FolderStore):
            return
        for key in {r.info.key for r in ranges}:
            file = self._store.open_file(key)
            with contextlib.suppress(OSError):  # Some file systems have neither call.
                # Dirty pages are not dropped, so they are written first.
                os.fdatasync(file.descriptor)
                os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _small(whole: Range) -> Range:
    return whole._replace(length=min(whole.length, SMALL_BYTES))
