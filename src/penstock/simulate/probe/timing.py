"""Rates of several threads, measured so that a noisy neighbour spoils one repeat and not a point.

A *worker* is a thread's work: an iterator that does one piece with each `next` and says how many
bytes it was. A point of a curve is the sum of what its threads reach each for itself, so that the
last one, which ends alone, does not count as if all had waited for it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence

from penstock.machine import Curve
from penstock.storage.pool import ReadPool

Worker = Callable[[int], Iterable[int]]
"""From the number of a thread to its pieces of work."""
Measure = Callable[[int], float]
"""From how many ask at once to bytes a second."""

GAIN_MIN = 1.1
"""Asking twice as often helps if the rate grows at least so much."""
_FAILS_MAX = 2
"""A curve ends after so many points in a row that did not help."""


def rate_of(num_threads: int, worker: Worker, seconds: float) -> float:
    """Return the bytes a second that so many threads move together."""
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
    """Return the median rate at each count; repeats go through all counts in turn."""
    rates: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(repeats):
        for count in counts:
            rates[count].append(measure(count))
    return _curve(rates)


def grown_curve(counts: Sequence[int], measure: Measure, repeats: int) -> Curve:
    """Return the same, of as many counts as make a difference."""
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
    """Return how long each piece of some work takes, one after the other; at least one piece."""
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
    """Return a measured number without the digits that mean nothing.

    >>> readable(123456.789), readable(0.000123456)
    (123500.0, 0.0001235)
    """
    return float(f"{value:.4g}")
