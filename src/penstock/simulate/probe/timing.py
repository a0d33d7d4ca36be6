"""Rates of several threads, measured so that a noisy neighbour spoils one repeat, not a whole
point.

A *worker* is the work of a thread: an iterator that does one piece with each `next` and yields its
bytes. A point of a curve is the sum of the rates of its threads. So the last thread, which ends
alone, does not count as if all others had waited for it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence

from penstock.machine import Curve
from penstock.storage.pool import ReadPool

Worker = Callable[[int], Iterable[int]]
"""Returns the pieces of work of a thread, by its number."""
Measure = Callable[[int], float]
"""Returns the bytes a second, by the number of threads or requests at once."""

GAIN_MIN = 1.1
"""Twice as many at once help if the rate grows at least by this factor."""
_FAILS_MAX = 2
"""A curve ends after this many points in a row that did not help."""


def rate_of(num_threads: int, worker: Worker, seconds: float) -> float:
    """Return the bytes a second that a number of threads move together."""
    # One end for all threads: with an end of its own, the last thread would run alone.
    until_s = time.perf_counter() + seconds

    def run(number: int) -> float:
        pieces = worker(number)
        size_bytes, begin_s = 0, time.perf_counter()
        now_s = begin_s
        for piece_bytes in pieces:
            size_bytes += piece_bytes
            now_s = time.perf_counter()
            if now_s >= until_s:
                break
        return size_bytes / max(now_s - begin_s, 1e-9) if size_bytes else 0.0

    with ReadPool(num_threads) as pool:
        return sum(pool.map_unordered(run, range(num_threads)))


def curve_of(counts: Sequence[int], measure: Measure, repeats: int) -> Curve:
    """Return the median rate at each count; each repeat measures all counts."""
    rates: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(repeats):
        for count in counts:
            rates[count].append(measure(count))
    return _curve(rates)


def grown_curve(counts: Sequence[int], measure: Measure, repeats: int) -> Curve:
    """Return the same, up to the count from which more gains nothing."""
    rates: dict[int, list[float]] = {}
    best, fails = 0.0, 0
    for count in counts:
        rate = measure(count)
        rates[count] = [rate]
        fails = 0 if rate > GAIN_MIN * best else fails + 1
        best = max(best, rate)
        if fails == _FAILS_MAX:
            break
    for _ in range(repeats - 1):
        for count, found in rates.items():
            found.append(measure(count))
    return _curve(rates)


def _curve(rates: dict[int, list[float]]) -> Curve:
    medians = (statistics.median(found) for found in rates.values())
    return Curve(counts=tuple(rates), bytes_s=tuple(map(readable, medians)))


def latencies(pieces: Iterable[int], seconds: float, count_max: int) -> list[float]:
    """Return the time of each piece of work in a row; at least one piece."""
    out: list[float] = []
    until_s = begin_s = time.perf_counter()
    until_s += seconds
    for _ in pieces:
        now_s = time.perf_counter()
        out.append(now_s - begin_s)
        if now_s >= until_s or len(out) >= count_max:
            break
        begin_s = time.perf_counter()
    return out


def doubling(highest: int) -> list[int]:
    """Return 1, 2, 4 … and the highest itself.

    >>> doubling(1), doubling(6), doubling(16)
    ([1], [1, 2, 4, 6], [1, 2, 4, 8, 16])
    """
    counts = [1]
    while counts[-1] * 2 <= highest:
        counts.append(counts[-1] * 2)
    return counts if counts[-1] == highest else [*counts, highest]


def readable(value: float) -> float:
    """Return a measured number without its meaningless digits.

    >>> readable(123456.789), readable(0.000123456)
    (123500.0, 0.0001235)
    """
    return float(f"{value:.4g}")
