"""What a flow may use, and what it assumes about a source before its first request there."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import OptionError
from penstock.flow.cost import REQUESTS_MAX, requests_in_flight
from penstock.machine import StoreModel

REQUESTS_FIRST = 8
"""Requests in flight to begin with at a source about which nothing is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowBudget:
    """Bounds of a flow. Within them it chooses by measuring."""

    stage_bytes_max: int
    """Memory for bytes on their way and for those that wait for their step. One batch may exceed
    it, or a batch larger than the budget could never be made; so may one fill of a tier."""
    requests_max: int = REQUESTS_MAX
    """Requests in flight at one source."""
    requests_min: int = 1
    """Requests in flight that are always allowed, however slow a source is."""

    def __post_init__(self) -> None:
        if self.stage_bytes_max < 1:
            raise OptionError(
                f"stage_bytes_max must be at least 1 byte, got {self.stage_bytes_max}"
            )
        if not 1 <= self.requests_min <= self.requests_max:
            raise OptionError(
                f"requests_min must lie between 1 and requests_max ({self.requests_max}), "
                f"got {self.requests_min}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePrior:
    """A first guess about a source. Measurements replace it within a few hundred requests."""

    latency_s: float
    """A typical request, queue and transfer of a small range included."""
    latency_p99_s: float
    """The slowest in a hundred."""
    bytes_s: float
    """What the source delivers at best."""
    requests: int = REQUESTS_FIRST
    """Requests in flight to begin with."""

    def __post_init__(self) -> None:
        if not 0 < self.latency_s <= self.latency_p99_s:
            raise OptionError(
                f"latency_s must lie between 0 and latency_p99_s ({self.latency_p99_s:g}), "
                f"got {self.latency_s:g}"
            )
        if self.bytes_s <= 0 or self.requests < 1:
            raise OptionError(
                "bytes_s must be above 0 and requests at least 1, "
                f"got {self.bytes_s:g} and {self.requests}"
            )

    @classmethod
    def of_store(
        cls, store: StoreModel, request_bytes: float, *, num_ranks: int = 1
    ) -> SourcePrior:
        """Return what a measured store promises to one of a node's ranks.

        It begins with its share of the fewest requests that fill the node's link, for requests of
        that size: small ones spend most of their time waiting, so it takes more of them. It never
        begins with fewer than without a measurement, which may be of another store.
        """
        latency_s = max(store.latency_s, 1e-6)
        share = -(-requests_in_flight(store, request_bytes) // num_ranks)
        return cls(
            latency_s=latency_s,
            latency_p99_s=max(store.latency_p99_s, latency_s),
            bytes_s=max(store.throughput.bytes_s),
            requests=max(REQUESTS_FIRST, share),
        )
