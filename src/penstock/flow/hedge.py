"""Second copies: asking again for what is late while its step is near.

This is about the last of a fetch's sources, the one that must deliver; what is late at an earlier
one is asked of the next (`fallback`).

One request in a hundred may take a hundred times as long as the others, and a batch waits for its
slowest. A second copy, made when a request has been in flight for longer than nearly all others
take, cuts that tail. But a copy is load. So it is made only

* when its step is near: predicted to be needed sooner than the late request can be counted on;
* when the source serves others meanwhile, and has not just asked us to slow down: where everything
  is slow, copies make it slower;
* while it has a *token*. A source begins with a few and earns a small share of one with each
  request, so copies are at most that share of all requests, and a few at once. While the training
  loop waits for the late request itself, one copy a moment needs no token: at the end of an epoch
  no further requests earn any.

A late request gives its place to its copy: requests that hang must not keep their own copies from
beginning. Before a source's tail is known, a request is late when it takes several times as long as
the first answers did: a run may be over before there are enough of them, and the first batch is
waited for like any other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from penstock.flow.pace import StepPace
from penstock.flow.requests import SourceRequest
from penstock.flow.source import FlowSource

TOKEN_SHARE = 0.05
"""Copies for each request that is no copy."""
HEDGES_MAX = 2
"""Copies of one fetch beside the first request, at its last source."""
WAITED_S = 0.5
"""Without a token, the training loop's wait allows one copy each time this has passed."""
TOKENS_MAX = 8.0
"""Copies that may be made at once after a quiet time."""
LATE = 1.25
"""Late is this many times what 19 in 20 requests of the size do not exceed."""
LATE_S_MIN = 0.05
"""Sooner than this nothing is late: on a busy machine threads wait as long for their turn."""
SEEN_MIN = 32
"""Answers before a source's tail is believed."""
EARLY_LATE, EARLY_LATE_S_MIN = 5.0, 0.5
"""Before that: late is this many times what answers take on average, and never sooner than this."""
LOOK_S_MIN = 0.005
"""Between two looks."""


@dataclass(frozen=True, slots=True)
class HedgeScan:
    """What looking over the requests in flight has shown."""

    due: list[SourceRequest]
    """Those that deserve a second copy, oldest first; each has taken its token."""
    again_s: float
    """When to look again."""


def look(requests: Iterable[SourceRequest], pace: StepPace, now_s: float) -> HedgeScan:
    """Find the requests in flight that deserve a second copy."""
    late: list[SourceRequest] = []
    num_late: dict[FlowSource, int] = {}
    again_s = inf
    for request in requests:
        tracked, source = request.tracked, request.source
        if request.place + 1 < len(tracked.fetch.sources):
            continue
        if tracked.num_hedges >= HEDGES_MAX or tracked.is_there:
            continue
        if not request.is_counted_on:
            continue
        late_s = _late_s(source, tracked.fetch.size_bytes)
        if now_s - request.began_s < late_s:
            again_s = min(again_s, request.began_s + late_s)
        else:
            late.append(request)
            num_late[source] = num_late.get(source, 0) + 1
            again_s = min(again_s, now_s + late_s / 8)
    due = [r for r in late if _is_due(r, num_late[r.source], pace, now_s)]
    return HedgeScan(due, max(again_s, now_s + LOOK_S_MIN))


def _late_s(source: FlowSource, size_bytes: int) -> float:
    """Return how long a request may take before it is late."""
    if source.tail.num_seen < SEEN_MIN:
        return max(EARLY_LATE_S_MIN, EARLY_LATE * source.tail.expected_s(size_bytes))
    return max(LATE_S_MIN, LATE * source.tail.p95_s(size_bytes))


def _is_due(request: SourceRequest, num_late: int, pace: StepPace, now_s: float) -> bool:
    source = request.source
    if source.limit.is_throttled(now_s):
        return False
    if not (is_overtaken(request, num_late) and is_near(request, pace, now_s)):
        return False
    if source.tokens >= 1.0:
        source.tokens -= 1.0
    elif not _is_waited_for(request, pace) or now_s - source.hedged_s < WAITED_S:
        return False
    source.hedged_s = now_s
    return True


def _is_waited_for(request: SourceRequest, pace: StepPace) -> bool:
    return pace.waiting_step is not None and request.tracked.fetch.step <= pace.waiting_step


def is_overtaken(request: SourceRequest, num_late: int) -> bool:
    """Whether this request is slow rather than its source.

    Since it began, its source has answered half as many again as were in flight before it; or
    hardly any other request of the source is late.
    """
    source = request.source
    if source.num_done - request.num_done_before > 1.5 * request.num_ahead + 2:
        return True
    return num_late <= max(1, source.in_flight // 4)


def is_near(request: SourceRequest, pace: StepPace, now_s: float) -> bool:
    """Whether the step may need the bytes before the request can be counted on to bring them.

    Latencies have heavy tails: what has been late for so long may well be late for as long again.
    """
    fetch = request.tracked.fetch
    fresh_s = request.source.tail.p99_s(fetch.size_bytes)
    return pace.needed_s(fetch.step, now_s) - now_s < max(now_s - request.began_s, fresh_s)
