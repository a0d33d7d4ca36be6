"""What a simulated run came to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyResult:
    """One policy in one scenario."""

    policy: str
    nodes: int
    cache_share: float
    """Capacity of all tiers of all nodes, over the data set."""
    why_not: str = ""
    """Why the policy cannot run here; the numbers are zero then."""
    time_s: float = 0.0
    start_s: float = 0.0
    """Before the first step: what is loaded first."""
    epoch_s: tuple[float, ...] = ()
    bound_s: float = 0.0
    """Computing alone, with the barrier after every step."""
    least_s: float = 0.0
    """What any loader needs with a cache of this capacity: computing, or the store at its best."""
    least_later_s: float = 0.0
    """The same for an epoch after the first."""
    store_bytes: float = 0.0
    bound_bytes: float = 0.0
    """The least that any cache of this capacity could read."""
    local_bytes: float = 0.0
    peer_bytes: float = 0.0
    num_visited: int = 0
    """Samples that were used at least once."""
    num_samples: int = 0

    @property
    def time_ratio(self) -> float:
        """The time over that of computing alone."""
        return self.time_s / self.bound_s if self.bound_s else 0.0

    @property
    def stall_share(self) -> float:
        """Of the time, how much is not spent computing: waiting for bytes, the start included.

        Of the whole job: a step waits for its slowest node, so one node's stall is everyone's.
        """
        return 1 - self.bound_s / self.time_s if self.time_s else 0.0

    @property
    def byte_ratio(self) -> float:
        """The store's bytes over the least."""
        return self.store_bytes / self.bound_bytes if self.bound_bytes else 0.0

    @property
    def visited_share(self) -> float:
        """Samples that were used, over all."""
        return self.num_visited / self.num_samples if self.num_samples else 0.0
