"""Rate limits as arithmetic: when bytes and requests may pass. Time is an argument.

A limit keeps one number: the time up to which its allowance is used. A caller that comes late may
catch up, but only by a bounded time.
"""

from __future__ import annotations

import math

REQUEST_BURST_S = 0.1
"""A burst of requests may use this much time ahead."""
BYTE_BURST_S = 0.002
"""After a silence, bytes may use this much time ahead."""
LATE_MAX_S = 0.05
"""A loop that the machine delayed makes up for this much time."""
CHUNK_BYTES_MIN, CHUNK_BYTES_MAX = 4 * 2**10, 64 * 2**10
CHUNK_S = 0.002
"""The time of one piece of a body, within the two bounds: short enough to be smooth."""
UNPACED_BYTES = 2**20
"""A piece where nothing is limited."""


class ByteRate:
    """Bytes a second. `factor` divides the rate from now on."""

    def __init__(self, bytes_s: float | None) -> None:
        self._bytes_s = bytes_s if bytes_s is not None else math.inf
        self._factor = 1.0
        self._used_until_s = -math.inf

    def set_factor(self, factor: float) -> None:
        """Divide the first rate by a factor."""
        self._factor = factor

    @property
    def bytes_s(self) -> float:
        """The rate now."""
        return self._bytes_s / self._factor

    @property
    def chunk_bytes(self) -> int:
        """How much to send in one piece."""
        if self._bytes_s == math.inf:
            return UNPACED_BYTES
        return int(min(max(self.bytes_s * CHUNK_S, CHUNK_BYTES_MIN), CHUNK_BYTES_MAX))

    def begin(self, now_s: float) -> None:
        """Drop unused allowance, because sending begins after a silence."""
        self._used_until_s = max(self._used_until_s, now_s - BYTE_BURST_S)

    def ready_at_s(self) -> float:
        """Return when the next piece may go."""
        return self._used_until_s

    def spend(self, size_bytes: int, now_s: float) -> None:
        """Count bytes that have gone."""
        if self._bytes_s != math.inf:
            start_s = max(self._used_until_s, now_s - LATE_MAX_S)
            self._used_until_s = start_s + size_bytes / self.bytes_s


class RequestRate:
    """Requests a second."""

    def __init__(self, requests_s: float | None) -> None:
        self._requests_s = requests_s if requests_s is not None else math.inf
        self._used_until_s = -math.inf

    def wait_s(self, now_s: float, factor: float = 1.0) -> float:
        """Return how long a request that comes now would have to wait."""
        # At least one may always come after a silence, however low the rate.
        return max(
            0.0, self._used_until_s - max(0.0, REQUEST_BURST_S - self._each_s(factor)) - now_s
        )

    def take(self, now_s: float, factor: float = 1.0) -> None:
        """Count a request, which comes or waits from now on."""
        self._used_until_s = max(self._used_until_s, now_s) + self._each_s(factor)

    def _each_s(self, factor: float) -> float:
        return factor / self._requests_s
