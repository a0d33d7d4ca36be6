"""How long a source takes, and how long it takes at worst.

A request takes about `first byte + size / bandwidth`; both are fitted to what was seen. What is
left after dividing by that, the *ratio*, has one distribution for all sizes. It is kept as a
histogram with logarithmic buckets, in which what is old fades: a source is what it was in its last
thousand or so answers, not what it was an hour ago.
"""

from __future__ import annotations

from math import log2

from penstock.flow.budget import SourcePrior

RATIO_CLIP = 4.0
"""A slower answer teaches the typical time no more than this many times what was expected, so that
one straggler does not move it; a source that is slow all over moves it within a few answers."""

_PER_OCTAVE = 8
_LOWEST = -4 * _PER_OCTAVE
_BUCKETS = 14 * _PER_OCTAVE
_FADE = 1 / (1 - 1 / 1024)
_REFRESH = 32
_UNKNOWN_S = 0.05


class LatencyTail:
    """The latency of one source, by size."""

    def __init__(self, prior: SourcePrior | None = None) -> None:
        self.num_seen = 0
        self._first_s = prior.latency_s if prior else _UNKNOWN_S
        self._seconds_per_byte = 0.0
        self._mean_s = self._first_s
        self._mean_bytes = 0.0
        self._var = self._cov = 0.0
        self._weights = [0.0] * _BUCKETS
        self._unit = 1.0
        self._total = 0.0
        spread = prior.latency_p99_s / prior.latency_s if prior else 4.0
        self._quantiles = (1.0, min(2.0, spread), spread, spread * 2)
        self._stale = 0

    def add(self, size_bytes: int, latency_s: float) -> float:
        """Learn from one answer; return how long it counts as, stragglers cut short."""
        self.num_seen += 1
        if self.num_seen == 1:
            self._start(size_bytes, latency_s)
        expected_s = self._first_s + self._seconds_per_byte * size_bytes
        ratio = latency_s / expected_s
        bucket = int(log2(ratio) * _PER_OCTAVE - _LOWEST) if ratio > 1e-6 else 0
        self._weights[min(max(bucket, 0), _BUCKETS - 1)] += self._unit
        self._total += self._unit
        self._unit *= _FADE
        if self._unit > 1e100:
            self._rescale()
        counted_s = latency_s if ratio < RATIO_CLIP else expected_s * RATIO_CLIP
        self._fit(size_bytes, counted_s)
        self._stale += 1
        return counted_s

    def expected_s(self, size_bytes: float) -> float:
        """Return how long a request of that size takes on average, stragglers aside."""
        return self._first_s + self._seconds_per_byte * size_bytes

    def p50_s(self, size_bytes: float) -> float:
        """Return what half of the requests of that size do not exceed."""
        return self.expected_s(size_bytes) * self._ratios()[0]

    def p95_s(self, size_bytes: float) -> float:
        """Return what 95 % of the requests of that size do not exceed."""
        return self.expected_s(size_bytes) * self._ratios()[1]

    def p99_s(self, size_bytes: float) -> float:
        """Return what 99 % of the requests of that size do not exceed."""
        return self.expected_s(size_bytes) * self._ratios()[2]

    def p999_s(self, size_bytes: float) -> float:
        """Return what all but one in a thousand do not exceed, as far as so few answers tell."""
        return self.expected_s(size_bytes) * self._ratios()[3]

    @property
    def mean_bytes(self) -> float:
        """The size of a typical request lately."""
        return self._mean_bytes

    def _start(self, size_bytes: int, latency_s: float) -> None:
        self._mean_bytes = float(size_bytes)
        self._mean_s = self._first_s = max(latency_s, 1e-9)

    def _fit(self, size_bytes: int, counted_s: float) -> None:
        """Move the straight line through (size, time) towards one more point."""
        gain = max(1 / 64, 1 / self.num_seen)
        off_bytes = size_bytes - self._mean_bytes
        self._mean_bytes += gain * off_bytes
        self._mean_s += gain * (counted_s - self._mean_s)
        self._var += gain * (off_bytes * (size_bytes - self._mean_bytes) - self._var)
        self._cov += gain * (off_bytes * (counted_s - self._mean_s) - self._cov)
        # Sizes that hardly differ say nothing about bandwidth: then half of the time is the first
        # byte and half the rest. The more they differ, the more their own slope counts.
        mean_bytes = self._mean_bytes or 1.0
        ridge = 0.01 * mean_bytes * mean_bytes
        guess = 0.5 * self._mean_s / mean_bytes
        slope = (self._cov + ridge * guess) / (self._var + ridge)
        slope = min(max(slope, 0.0), 0.98 * self._mean_s / mean_bytes)
        self._seconds_per_byte = slope
        self._first_s = max(self._mean_s - slope * self._mean_bytes, 1e-9)

    def _ratios(self) -> tuple[float, float, float, float]:
        if self._stale >= _REFRESH:
            self._stale = 0
            self._quantiles = self._measured()
        return self._quantiles

    def _rescale(self) -> None:
        """Scale all weights down: fading makes new ones heavier instead of all old ones lighter."""
        self._weights = [w / self._unit for w in self._weights]
        self._total /= self._unit
        self._unit = 1.0

    def _measured(self) -> tuple[float, float, float, float]:
        """Read the four quantiles off the histogram, each at the upper edge of its bucket."""
        found: list[float] = []
        below = 0.0
        marks = [share * self._total for share in (0.5, 0.95, 0.99, 0.999)]
        for bucket, weight in enumerate(self._weights):
            below += weight
            while len(found) < 4 and below >= marks[len(found)] * (1 - 1e-12):
                found.append(2.0 ** ((bucket + 1 + _LOWEST) / _PER_OCTAVE))
        found += [found[-1]] * (4 - len(found))
        return found[0], found[1], found[2], found[3]
