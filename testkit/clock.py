"""Time that tests own."""

from __future__ import annotations


class VirtualClock:
    """A `penstock.clock.Clock` whose time passes only when somebody sleeps."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        """Return the seconds slept so far."""
        return self._now_s

    def sleep(self, seconds: float) -> None:
        """Move time forward at once."""
        assert seconds >= 0, seconds
        self._now_s += seconds
