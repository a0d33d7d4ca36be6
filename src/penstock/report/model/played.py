"""What playing a run in virtual time gives, whichever loader it has."""

from __future__ import annotations

from dataclasses import dataclass

STALL_NONE = 0.03
"""A loop that waits for less of its time is limited by its own work."""


@dataclass(frozen=True, kw_only=True)
class Played:
    """A run as it was played, scaled to its real length."""

    step_s: float
    """Mean of the last epoch."""
    epoch_s: tuple[float, ...]
    stall_share: float
    """In the last epoch."""
    store_bytes: float
    peer_bytes: float
    memory_bytes: float
    limit: str


def nearest_limit(needs: dict[str, float], step_s: float, otherwise: str) -> str:
    """Return the resource whose least time for a step comes closest to it.

    >>> nearest_limit({"store": 0.9, "cores": 0.2}, 1.0, "latency")
    'store'
    >>> nearest_limit({"store": 0.1, "cores": 0.2}, 1.0, "latency")
    'latency'
    """
    most = max(needs, key=lambda name: needs[name])
    return most if needs[most] > 0.5 * step_s else otherwise
