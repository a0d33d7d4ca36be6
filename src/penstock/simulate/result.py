"""The result of a simulated run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyResult:
    """Times and bytes of one policy in one scenario."""

    policy: str
    nodes: int
    cache_share: float
    """Capacity of all tiers of all nodes, over the data set."""
    why_not: str = ""
    """Why the policy cannot run here; then all numbers are zero."""
    time_s: float = 0.0
    start_s: float = 0.0
    """Time before the first step, in which the policy loads its caches."""
    epoch_s: tuple[float, ...] = ()
    bound_s: float = 0.0
    """Time of computing alone, with the barrier after every step."""
    least_s: float = 0.0
    """The least time of any loader with a cache of this capacity."""
    least_later_s: float = 0.0
    """The least time of an epoch after the first."""
    store_bytes: float = 0.0
    bound_bytes: float = 0.0
    """The fewest bytes that any cache of this capacity has to read from the store."""
    local_bytes: float = 0.0
    peer_bytes: float = 0.0
    num_visited: int = 0
    """Samples that were used at least once."""
    num_samples: int = 0

    @property
    def time_ratio(self) -> float:
        """The time over the time of computing alone."""
        return self.time_s / self.bound_s if self.bound_s else 0.0

    @property
    def stall_share(self) -> float:
        """The share of the time in which the job does not compute, the start included.

        A step waits for its slowest node, so a stall of one node is a stall of all.
        """
        return 1 - self.bound_s / self.time_s if self.time_s else 0.0

    @property
    def byte_ratio(self) -> float:
        """Bytes from the store over the fewest possible."""
        return self.store_bytes / self.bound_bytes if self.bound_bytes else 0.0

    @property
    def visited_share(self) -> float:
        """The share of the samples that were used."""
        return self.num_visited / self.num_samples if self.num_samples else 0.0
