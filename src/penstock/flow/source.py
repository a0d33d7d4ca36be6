"""One source, as a flow sees it: what waits for it, what is in flight, how fast it answers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from penstock.flow.budget import REQUESTS_FIRST, FlowBudget, SourcePrior
from penstock.flow.limit import RequestLimit
from penstock.flow.requests import SourceRequest, TrackedFetch
from penstock.flow.tail import LatencyTail

BEATEN_MAX = 8
"""Late requests under way that do not count against the limit; see `beat`."""
TOKENS_FIRST = 4.0
"""Copies that may be made before a source has earned any."""
_METER_S = 0.1
_METER_GAIN = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRates:
    """What a source does at the moment."""

    bytes_s: float
    """Delivered lately, pauses included."""
    full_bytes_s: float
    """Delivered when as much was asked for as the limit allowed."""
    latency_p50_s: float
    latency_p99_s: float
    in_flight: int
    limit: int


class FlowSource:
    """The state of one source."""

    def __init__(self, name: str, budget: FlowBudget, prior: SourcePrior | None) -> None:
        self.name = name
        self.limit = RequestLimit(
            requests_min=budget.requests_min,
            requests_max=budget.requests_max,
            start=prior.requests if prior else REQUESTS_FIRST,
        )
        self.tail = LatencyTail(prior)
        self.has_prior = prior is not None
        self.prior_bytes_s = prior.bytes_s if prior else 0.0
        self.ready: list[tuple[int, int, TrackedFetch]] = []
        """Heap of (step, number, fetch) that may begin as soon as there is room."""
        self.hedges: deque[TrackedFetch] = deque()
        """Second copies that wait for room; they go before everything else."""
        self.in_flight = 0
        self.num_beaten = 0
        """Requests under way that are not counted in flight; see `beat`."""
        self.is_behind = False
        """Whether the training loop has waited in vain for something that it had deferred."""
        self.num_done = 0
        self.tokens = TOKENS_FIRST
        """Copies that may still be made; see `hedge`."""
        self.hedged_s = 0.0
        """When the last one was due."""
        self.bytes_s = 0.0
        self._meter_at_s = 0.0
        self._meter_bytes = 0

    def answered(self, request: SourceRequest, now_s: float, *, moved: bool) -> None:
        """Release a request's place, and learn from it if bytes came over the wire.

        The time of a deferred request is that of another node's fetch and says nothing about this
        source: only its bytes count, as delivered.
        """
        size_bytes = request.tracked.fetch.size_bytes
        if moved and request.is_deferred:
            self.is_behind = self.is_behind and request.tracked.is_there
            self._meter(now_s, size_bytes)
        elif moved:
            counted_s = self.tail.add(size_bytes, now_s - request.began_s)
            self.limit.done(now_s, size_bytes, counted_s, self.in_flight)
            self._meter(now_s, size_bytes)
        self.leave(request)

    def leave(self, request: SourceRequest) -> None:
        """Take note that a request is over."""
        if request.is_beaten:
            self.num_beaten -= 1
        elif not request.is_deferred:
            self.in_flight -= 1
        self.num_done += 1

    def defer(self, request: SourceRequest) -> None:
        """Give the place of a request to others: it waits at the source for bytes to come there.

        No thread waits for it meanwhile, so there may be any number; the stage bounds their bytes.
        """
        if request.is_beaten:
            request.is_beaten = False
            self.num_beaten -= 1
        else:
            self.in_flight -= 1
        request.is_deferred = True

    def beat(self, request: SourceRequest) -> None:
        """Give the place of a request to others: it is late, or another copy of it was quicker.

        It is still under way, and may be for long. At most `BEATEN_MAX` are left out of the count:
        the threads that carry requests are not many more than the limit.
        """
        is_counted = not (request.is_beaten or request.is_deferred)
        if is_counted and self.num_beaten < BEATEN_MAX:
            request.is_beaten = True
            self.num_beaten += 1
            self.in_flight -= 1

    def has_room(self, step: int) -> bool:
        """Return whether one more fetch of a step would begin at once, or as the next of all."""
        if self.in_flight < self.limit.level:
            return True
        return not self.ready or self.ready[0][0] > step

    def rates(self) -> SourceRates:
        """Return what the source does at the moment."""
        size_bytes = self.tail.mean_bytes
        return SourceRates(
            bytes_s=self.bytes_s,
            full_bytes_s=self.full_bytes_s,
            latency_p50_s=self.tail.p50_s(size_bytes),
            latency_p99_s=self.tail.p99_s(size_bytes),
            in_flight=self.in_flight + self.num_beaten,
            limit=self.limit.level,
        )

    @property
    def full_bytes_s(self) -> float:
        """Bytes a second when used to the full: measured, else believed; 0 if not known."""
        return self.limit.rate_bytes_s or self.prior_bytes_s or self.bytes_s

    def _meter(self, now_s: float, size_bytes: int) -> None:
        self._meter_bytes += size_bytes
        elapsed_s = now_s - self._meter_at_s
        if elapsed_s < _METER_S:
            return
        gain = 1 - (1 - _METER_GAIN) ** (elapsed_s / _METER_S) if self.bytes_s else 1.0
        self.bytes_s += gain * (self._meter_bytes / elapsed_s - self.bytes_s)
        self._meter_at_s, self._meter_bytes = now_s, 0
