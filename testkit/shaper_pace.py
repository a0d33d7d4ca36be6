"""Rates as arithmetic: how many bytes may go now, when may a request pass. Time is an argument.

Both limits remember only a moment: the time up to which everything allowed has been used. Who asks
late may catch up, by so much and no more.
"""

from __future__ import annotations

import math

REQUEST_BURST_S = 0.1
"""Requests of so much time may come at once."""
BYTE_BURST_S = 0.002
"""Bytes of so much time may go at once after a silence."""
LATE_MAX_S = 0.05
"""A loop that the machine kept from running makes up for so much time."""
CHUNK_BYTES_MIN, CHUNK_BYTES_MAX = 4 * 2**10, 64 * 2**10
CHUNK_S = 0.002
"""A piece of a body takes about so long, within the two bounds: small enough to be smooth."""
UNPACED_BYTES = 2**20
"""A piece where nothing is limited."""


class ByteRate:
    """Bytes a second. `factor` divides the rate from now on."""

    def __init__(self, bytes_s: float | None) -> None:
        self._bytes_s = bytes_s if bytes_s is not None else math.inf
        self._factor = 1.0
        self._used_until_s = -math.inf

    def set_factor(self, factor: float) -> None:
        """Be so many times slower than at first."""
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
        """Forget what was left unused: somebody begins to send after a silence."""
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
