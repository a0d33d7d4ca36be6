"""Falling back: asking the next source for what this one does not bring in time.

A fetch has sources, best first: a peer that keeps its bytes, perhaps another one, and last the
store that owns them. The next source is asked, while the first has not answered yet,

* when the request has been in flight for longer than the *next* source usually takes. What this
  source usually takes does not matter: if the whole source is ten times slower than before, none of
  its requests stands out, and every step would wait for them. To wait as long as the other source
  takes, and then to ask it, takes at most twice as long as the better of the two;
* when the step is near: the next source would be only just in time for it;
* when the next source has not just asked us to slow down.

There are no tokens here, unlike in `hedge`: tokens ration second copies to a share of all requests,
and every request to a slow peer is late. Three things bound the extra load. A source is asked for a
fetch once, so a slow peer costs the next source at most what that peer keeps, as if it were lost. A
peer whose fetches are far ahead of their steps is left alone, however slow it is. And these fetches
wait at the next source in line with all others, earliest step first, inside its limit: those that
their first source brings in the meantime are never requested there. A source that answers quicker
than the next one is never late.

If most of the requests in flight at a source are late, the fetches that still wait for a place
there would be late, too. Those of near steps leave that line and go to the next source, as far as
it has room for them.

A *deferred* request is not late: its source is alive and will answer when it has the bytes, and to
ask the store would read them twice. The next source is asked only when the training loop has waited
for the step for seconds, and only if this flow waits there for nothing else that belongs to that
step or an earlier one. Otherwise the store is slow for everybody, and asking it twice makes it
slower. A source on which the training loop has waited in vain like that is *behind*: until it
delivers something that it had deferred, its other deferred fetches are asked for elsewhere as soon
as their steps are near. So a node that cannot fetch what others count on costs one long wait, not
one for each step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from math import inf

from penstock.flow.hedge import LATE, LATE_S_MIN, LOOK_S_MIN, SEEN_MIN
from penstock.flow.pace import StepPace
from penstock.flow.requests import SourceRequest, TrackedFetch
from penstock.flow.source import FlowSource

PATIENCE_S = 5.0
"""The training loop's wait after which a deferred fetch is asked for elsewhere."""
_UNKNOWN = 4.0
_UNKNOWN_S = 1.0
"""While nothing is known about the next source, a request is late after `_UNKNOWN` times what 19 in
20 requests of this source do not exceed, or after `_UNKNOWN_S`, whichever is sooner."""
_NEAR = 4.0
"""Near is this many times what nearly all requests of the next source take: it may have to bring
the whole share of a peer, not one fetch."""
_FIRST_STEPS = 3
"""Near, before the training loop's pace is known."""
_AGAIN_S = 0.1
"""Between two looks at what is deferred while the training loop waits, or a source is behind."""

SourceOf = Callable[[str], FlowSource]


@dataclass(slots=True)
class FallbackScan:
    """What looking over the open requests has shown."""

    due: list[SourceRequest] = field(default_factory=list)
    """Those whose next source should be asked now, oldest first."""
    num_late: dict[FlowSource, int] = field(default_factory=dict)
    """By source, the requests in flight that the next source would probably have answered."""
    again_s: float = inf
    """When to look again."""

    @property
    def slow(self) -> list[FlowSource]:
        """The sources most of whose requests in flight are late."""
        return [source for source, late in self.num_late.items() if 2 * late > source.in_flight]


def late_after_s(source: FlowSource, following: FlowSource, size_bytes: int) -> float:
    """Return how long a request of a source may take before the following one is asked."""
    if following.tail.num_seen >= SEEN_MIN or following.has_prior:
        return max(LATE_S_MIN, LATE * following.tail.p95_s(size_bytes))
    if source.tail.num_seen >= SEEN_MIN:
        return min(_UNKNOWN_S, max(LATE_S_MIN, _UNKNOWN * source.tail.p95_s(size_bytes)))
    return _UNKNOWN_S


def is_near(tracked: TrackedFetch, following: FlowSource, pace: StepPace, now_s: float) -> bool:
    """Whether the following source would be only just in time, if it were asked now."""
    return now_s >= _near_at_s(tracked, following, pace, now_s)


def look_for_fallbacks(
    requests: Iterable[SourceRequest], source_of: SourceOf, pace: StepPace, now_s: float
) -> FallbackScan:
    """Find what is in flight and should be asked of its next source."""
    found = FallbackScan()
    for request in requests:
        tracked, place = request.tracked, request.place + 1
        if request.is_beaten or place == len(tracked.fetch.sources):
            continue
        # The next source may have been tried and have failed already: then it is the one after it.
        place = min(max(place, tracked.num_tried), len(tracked.fetch.sources) - 1)
        following = source_of(tracked.fetch.sources[place])
        late_s = late_after_s(request.source, following, tracked.fetch.size_bytes)
        late_at_s = request.began_s + late_s
        if now_s < late_at_s:
            found.again_s = min(found.again_s, late_at_s)
            continue
        found.num_late[request.source] = found.num_late.get(request.source, 0) + 1
        if not may_turn(request) or following.limit.is_throttled(now_s):
            found.again_s = min(found.again_s, now_s + late_s)
            continue
        near_at_s = _near_at_s(tracked, following, pace, now_s)
        if now_s >= near_at_s:
            found.due.append(request)
        # The pace may change before: look now and then.
        found.again_s = min(found.again_s, max(near_at_s, now_s + late_s / 8), now_s + late_s)
    found.again_s = max(found.again_s, now_s + LOOK_S_MIN)
    return found


def look_deferred(
    deferred: Collection[SourceRequest],
    requests: Collection[SourceRequest],
    source_of: SourceOf,
    pace: StepPace,
    now_s: float,
) -> FallbackScan:
    """Find what is deferred and has been waited for too long."""
    step, is_behind = pace.waiting_step, any(request.source.is_behind for request in deferred)
    if step is None and not is_behind:
        return FallbackScan()
    left_s = PATIENCE_S - pace.waited_s(now_s)
    if left_s > 0 and not is_behind:
        return FallbackScan(again_s=now_s + max(left_s, LOOK_S_MIN))
    found = FallbackScan(again_s=now_s + _AGAIN_S)
    late_step = step if step is not None and left_s <= 0 else -1
    busy = _steps_at(requests, deferred)
    for request in deferred:
        tracked = request.tracked
        if not may_turn(request):
            continue
        following = source_of(tracked.fetch.sources[tracked.num_tried])
        if tracked.fetch.step > late_step and not (
            request.source.is_behind and is_near(tracked, following, pace, now_s)
        ):
            continue
        in_line = following.ready[0][0] if following.ready else inf
        is_busy = min(in_line, busy.get(following, inf)) <= tracked.fetch.step
        if not (is_busy or following.limit.is_throttled(now_s)):
            found.due.append(request)
    return found


def _steps_at(
    requests: Collection[SourceRequest], deferred: Collection[SourceRequest]
) -> dict[FlowSource, int]:
    """Return the first step that waits for each source, and for no other."""
    spare = {
        request.tracked.fetch.number
        for request in (*requests, *deferred)
        if request.place + 1 < len(request.tracked.fetch.sources)
    }
    steps: dict[FlowSource, int] = {}
    for request in requests:
        fetch = request.tracked.fetch
        if fetch.number not in spare:
            steps[request.source] = min(steps.get(request.source, fetch.step), fetch.step)
    return steps


def may_turn(request: SourceRequest) -> bool:
    """Whether a fetch has not arrived, has a source left, and waits for this request alone."""
    tracked = request.tracked
    if tracked.num_tried == len(tracked.fetch.sources) or not request.is_counted_on:
        return False
    return not (tracked.is_queued or tracked.is_there)


def _near_at_s(tracked: TrackedFetch, following: FlowSource, pace: StepPace, now_s: float) -> float:
    fetch = tracked.fetch
    if pace.step_s is None and fetch.step > pace.last_step + _FIRST_STEPS:
        return now_s + _UNKNOWN_S  # Nobody knows yet how fast steps go by, and all seem needed now.
    soon_s = max(LATE_S_MIN, _NEAR * following.tail.p99_s(fetch.size_bytes))
    return pace.needed_s(fetch.step, now_s) - soon_s
