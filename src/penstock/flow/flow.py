"""The flow: which fetch begins when and from where, one event at a time.

Four questions, each asked in its own module. May its bytes use memory yet (`stage`: earliest step
first, inside the budget)? May its source have one more request in flight (`limit`)? Is a request so
late that its next source should be asked (`fallback`), or the last one again (`hedge`)? Beside
them `pace` watches the consumer and `tail` the sources, and together they say how far ahead to
plan.

A flow has no clock and does nothing itself: it is told what happened and when, and answers with
what to do. The same events always give the same actions, so a run can be replayed, and a simulator
drives the very code that a loader does.

>>> from penstock.flow.events import Fetch
>>> flow = Flow(budget=FlowBudget(stage_bytes_max=1000))
>>> fetch = Fetch(number=0, step=0, size_bytes=100, sources=("store",))
>>> flow.on(Wanted(fetches=(fetch,), at_s=0.0))
[Begin(number=0, attempt=0, source='store')]
>>> flow.on(Arrived(number=0, attempt=0, at_s=0.02)), flow.stage_bytes
([], 100)
>>> flow.on(Consumed(step=0, at_s=0.03)), flow.stage_bytes
([], 0)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import Any

from penstock.flow.budget import FlowBudget, SourcePrior
from penstock.flow.events import (
    Action,
    Arrived,
    Begin,
    Consumed,
    Deferred,
    Event,
    Failed,
    GiveUp,
    Throttled,
    Tick,
    Waiting,
    Wanted,
)
from penstock.flow.fallback import is_near, look_deferred, look_for_fallbacks
from penstock.flow.hedge import LOOK_S_MIN, TOKEN_SHARE, TOKENS_MAX, look
from penstock.flow.pace import StepPace, depth_bytes
from penstock.flow.requests import SourceRequest, TrackedFetch
from penstock.flow.source import FlowSource, SourceRates
from penstock.flow.stage import StageBudget

_UNKNOWN_SHARE = 4
"""While nothing is known yet, the budget divided by this is planned ahead."""
_DEPTH_S = 0.02
"""Between two looks at all sources for the look-ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowRates:
    """What a flow and its surroundings do at the moment."""

    sources: dict[str, SourceRates]
    steps_s: float
    """Steps a second that the consumer would take if it never waited; 0 if not known."""
    bytes_s: float
    """Staged bytes a second that this takes."""
    stage_bytes: int
    look_ahead_bytes: int
    num_hedges: int
    """Second copies so far."""


class Flow:
    """Turns events into actions."""

    def __init__(
        self, *, budget: FlowBudget, prior: Mapping[str, SourcePrior] | None = None
    ) -> None:
        self._budget = budget
        self._prior = dict(prior or {})
        self._sources: dict[str, FlowSource] = {}
        self._stage = StageBudget(budget.stage_bytes_max)
        self._pace = StepPace()
        self._tracked: dict[int, TrackedFetch] = {}
        self._requests: dict[tuple[int, int], SourceRequest] = {}
        """In flight, in the order in which they began."""
        self._deferred: dict[tuple[int, int], SourceRequest] = {}
        """Open, but put aside by their source, in that order."""
        self._now_s = 0.0
        self._look_at_s = inf
        """When to look for late requests next."""
        self._num_hedges = 0
        self._depth_until_s, self._depth_step, self._depth_bytes = -inf, -1, 0
        """How long the look-ahead that was computed last is good, and for which step."""
        self._actions: list[Action] = []
        self._handlers: dict[type[Event], Any] = {
            Wanted: self._wanted,
            Arrived: self._arrived,
            Deferred: self._put_aside,
            Failed: self._failed,
            Throttled: self._throttled,
            Consumed: self._consumed,
            Waiting: self._waiting,
            Tick: self._ticked,
        }

    # -- what it tells -------------------------------------------------------------------------

    def on(self, event: Event) -> list[Action]:
        """Take note of an event; return what is to be done now, in order."""
        # Threads report in any order: time does not run backwards here.
        self._now_s = max(self._now_s, event.at_s)
        self._handlers[type(event)](event)
        if self._now_s >= self._look_at_s:
            self._look_for_late()
        actions, self._actions = self._actions, []
        return actions

    @property
    def wake_s(self) -> float | None:
        """When to send a `Tick` if nothing else happens before; None if there is no need."""
        return self._look_at_s if self._look_at_s < inf else None

    @property
    def look_ahead_bytes(self) -> int:
        """Bytes of stage that should be planned beyond the last step taken; see `planned_bytes`."""
        budget_bytes = self._budget.stage_bytes_max
        if not self._pace.bytes_per_step:
            return max(1, budget_bytes // _UNKNOWN_SHARE)
        # Every source has a say in it, and there may be a thousand: it is asked for more often
        # than it changes.
        if self._now_s >= self._depth_until_s or self._pace.last_step != self._depth_step:
            self._depth_until_s = self._now_s + _DEPTH_S
            self._depth_step = self._pace.last_step
            self._depth_bytes = self._needed_bytes()
        return max(1, min(self._depth_bytes, budget_bytes))

    def _needed_bytes(self) -> int:
        pace = self._pace
        tail_s = source_bytes_s = in_flight_bytes = 0.0
        for source in self._sources.values():
            size_bytes = source.tail.mean_bytes
            tail_s = max(tail_s, source.tail.p999_s(size_bytes))
            source_bytes_s += source.full_bytes_s
            in_flight_bytes += source.limit.level * size_bytes
        depth = depth_bytes(
            pace, tail_s=tail_s, source_bytes_s=source_bytes_s, in_flight_bytes=in_flight_bytes
        )
        return int(depth)

    @property
    def planned_bytes(self) -> int:
        """Bytes of stage that are planned and not used up: queued, in flight or staged."""
        return self._stage.planned_bytes

    @property
    def planned_fill_bytes(self) -> int:
        """Bytes for tiers that are planned and have not arrived."""
        return self._stage.planned_fill_bytes

    @property
    def stage_bytes(self) -> int:
        """Bytes that count against the stage's budget now."""
        return self._stage.staged_bytes

    @property
    def num_hedges(self) -> int:
        """Second copies so far."""
        return self._num_hedges

    def in_flight(self, source: str) -> int:
        """Return the number of requests in flight at a source, deferred ones left out."""
        known = self._sources.get(source)
        return known.in_flight + known.num_beaten if known is not None else 0

    def limit(self, source: str) -> int:
        """Return how many requests a source may have in flight now."""
        return self._source(source).limit.level

    def rates(self) -> FlowRates:
        """Return what the flow and its surroundings do at the moment."""
        return FlowRates(
            sources={name: source.rates() for name, source in self._sources.items()},
            steps_s=self._pace.steps_s,
            bytes_s=self._pace.steps_s * self._pace.bytes_per_step,
            stage_bytes=self._stage.staged_bytes,
            look_ahead_bytes=self.look_ahead_bytes,
            num_hedges=self._num_hedges,
        )

    # -- events --------------------------------------------------------------------------------

    def _wanted(self, event: Wanted) -> None:
        for fetch in event.fetches:
            assert fetch.number not in self._tracked, f"fetch {fetch.number} is wanted twice"
            assert fetch.sources, f"fetch {fetch.number} has no source"
            tracked = TrackedFetch(fetch)
            self._tracked[fetch.number] = tracked
            self._stage.want(tracked)
        self._admit()

    def _arrived(self, event: Arrived) -> None:
        request = self._take_out(event.number, event.attempt)
        if request is None:
            return
        source, tracked = request.source, request.tracked
        # Before anything else begins: the place that this frees decides what may begin.
        source.answered(request, self._now_s, moved=event.moved)
        if not tracked.is_there:
            tracked.is_there = True
            self._beat_others(tracked)
            if tracked.is_unwanted or not tracked.fetch.staged:
                self._forget(tracked)
        self._begin_at(source)

    def _beat_others(self, tracked: TrackedFetch) -> None:
        """Free the places of copies that were too late.

        Not at an earlier source: one that is slower than the next is slow for other fetches, too,
        and must not get more work because of it.
        """
        last = len(tracked.fetch.sources) - 1
        for attempt in range(tracked.num_attempts):
            request = self._requests.get((tracked.fetch.number, attempt))
            if request is not None and request.place == last:
                request.source.beat(request)
                self._begin_at(request.source)

    def _put_aside(self, event: Deferred) -> None:
        request = self._requests.pop((event.number, event.attempt), None)
        if request is None:
            return
        self._deferred[event.number, event.attempt] = request
        request.source.defer(request)
        # Both its memory, if it is a fill, and its place at the source go to others at once.
        self._stage.put_aside(request.tracked)
        self._admit()
        self._begin_at(request.source)
        # The next look may be far off: it was set for requests that were expected to answer.
        if request.source.is_behind or self._pace.waiting_step is not None:
            self._look_at_s = min(self._look_at_s, self._now_s + LOOK_S_MIN)

    def _take_out(self, number: int, attempt: int) -> SourceRequest | None:
        key = number, attempt
        request = self._requests.pop(key, None) or self._deferred.pop(key, None)
        if request is not None:
            request.tracked.open_attempts &= ~(1 << attempt)
        return request

    def _failed(self, event: Failed) -> None:
        request = self._take_out(event.number, event.attempt)
        if request is None:
            return
        source, tracked = request.source, request.tracked
        source.leave(request)
        # Otherwise another attempt may still bring it, or it waits in line at its next source.
        if not (tracked.is_there or tracked.is_queued or tracked.open_attempts):
            if tracked.num_tried < len(tracked.fetch.sources):
                self._begin_at(self._make_ready(tracked))
            else:
                self._actions.append(GiveUp(number=event.number))
                self._forget(tracked)
        self._begin_at(source)

    def _throttled(self, event: Throttled) -> None:
        source = self._source(event.source)
        source.limit.throttled(self._now_s, source.in_flight)

    def _consumed(self, event: Consumed) -> None:
        gone = self._stage.consume(event.step)
        for tracked in gone:
            del self._tracked[tracked.fetch.number]
        size_bytes = sum([tracked.fetch.size_bytes for tracked in gone])
        self._pace.consumed(event.step, self._now_s, size_bytes)
        self._admit()

    def _waiting(self, event: Waiting) -> None:
        self._pace.waiting(event.step, self._now_s)
        self._look_for_late()  # All fetches of the step are near now, whatever the pace was.

    def _ticked(self, event: Tick) -> None:
        """Looking for late requests is all there is to do; `on` does it when it is time."""

    # -- actions -------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give memory to the fetches whose turn it is, and begin those that can."""
        admitted = self._stage.admit()
        if not admitted:
            return
        for tracked in admitted:
            self._make_ready(tracked)
        for source in self._sources.values():
            if source.ready:
                self._begin_at(source)

    def _make_ready(self, tracked: TrackedFetch) -> FlowSource:
        """Queue a fetch at the next of its sources, and return that."""
        fetch = tracked.fetch
        source = self._source(fetch.sources[tracked.num_tried])
        tracked.num_tried += 1
        tracked.is_queued = True
        heappush(source.ready, (fetch.step, fetch.number, tracked))
        return source

    def _begin_at(self, source: FlowSource) -> None:
        """Begin what waits for a source while it may have more in flight; copies go first."""
        level = source.limit.level
        while source.in_flight < level and source.hedges:
            tracked = source.hedges.popleft()
            if tracked.open_attempts and not tracked.is_there:
                self._num_hedges += 1
                self._begin(tracked, source)
        while source.in_flight < level and source.ready:
            tracked = heappop(source.ready)[2]
            tracked.is_queued = False
            # It may have come from an earlier source while it waited in line here.
            if not tracked.is_there:
                self._num_hedges += tracked.open_attempts > 0
                source.tokens = min(source.tokens + TOKEN_SHARE, TOKENS_MAX)
                self._begin(tracked, source)

    def _begin(self, tracked: TrackedFetch, source: FlowSource) -> None:
        number, attempt = tracked.fetch.number, tracked.num_attempts
        self._requests[number, attempt] = SourceRequest(
            tracked,
            source,
            attempt,
            tracked.num_tried - 1,
            self._now_s,
            source.in_flight,
            source.num_done,
        )
        tracked.num_attempts += 1
        tracked.open_attempts |= 1 << attempt
        source.in_flight += 1
        if self._look_at_s == inf:
            self._look_at_s = self._now_s + LOOK_S_MIN
        self._actions.append(Begin(number=number, attempt=attempt, source=source.name))

    def _forget(self, tracked: TrackedFetch) -> None:
        """Stop caring for a fetch; its room goes to others."""
        self._stage.release(tracked)
        del self._tracked[tracked.fetch.number]
        self._admit()

    def _source(self, name: str) -> FlowSource:
        source = self._sources.get(name)
        if source is None:
            source = FlowSource(name, self._budget, self._prior.get(name))
            self._sources[name] = source
        return source

    # -- late requests -------------------------------------------------------------------------

    def _look_for_late(self) -> None:
        """Ask again for what is late: the next source, or the last one for a second copy."""
        requests, pace, now_s = self._requests.values(), self._pace, self._now_s
        again = look(requests, pace, now_s)
        found = look_for_fallbacks(requests, self._source, pace, now_s)
        overdue = look_deferred(self._deferred.values(), requests, self._source, pace, now_s)
        self._look_at_s = overdue.again_s if self._deferred else inf
        if self._requests:
            self._look_at_s = min(self._look_at_s, again.again_s, found.again_s)
        for request in again.due:
            request.tracked.num_hedges += 1
            request.source.hedges.append(request.tracked)
            request.source.beat(request)
            self._begin_at(request.source)
        for request in overdue.due:
            request.source.is_behind = True
        for request in (*found.due, *overdue.due):
            self._begin_at(self._make_ready(request.tracked))
        for source in found.slow:
            self._take_over(source)

    def _take_over(self, slow: FlowSource) -> None:
        """Give what waits for a slow source and is near to the next, while that has room for it."""
        while slow.ready:
            step, _, tracked = slow.ready[0]
            if not tracked.is_there:
                if tracked.num_tried == len(tracked.fetch.sources):
                    return
                following = self._source(tracked.fetch.sources[tracked.num_tried])
                is_far = not is_near(tracked, following, self._pace, self._now_s)
                if is_far or following.limit.is_throttled(self._now_s):
                    return
                if not following.has_room(step):
                    return
                heappop(slow.ready)
                self._begin_at(self._make_ready(tracked))
            else:
                heappop(slow.ready)
