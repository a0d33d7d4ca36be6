"""How many requests a source should have in flight: congestion control for stores.

While a source has room, twice the requests bring twice the bytes, each in the same time. Once its
link is full, more requests bring nothing and each takes longer (Little: in flight = rate × time).
So the place to be is just beyond that knee, where a request takes `FULL` times as long as in an
empty queue: full link, short queue.

The state machine changes the level, lets the requests of the old level drain, measures a *round* of
completions at the new one, and compares. What decides is the *elasticity*, the share of a change of
level that shows up as a change of rate: 1 for an empty link, 0 for a full one.

* GROW: double while that brings bytes (slow start), then settle at the knee.
* HOLD: stay, and watch the time per request against that of an empty queue (`base_s`).
* UP: a quarter more, tried now and then, at once when the queue is short; kept if it brings bytes.
* DOWN: fewer, tried when requests take long. If the rate holds, they were only queueing, and fewer
  it stays. If it falls with them, the source itself is slow: the time seen is the new `base_s`, and
  the level goes back up. Once in a while, and when the base is unknown, it goes down until the rate
  falls, only to see that time. This is how a stale base dies, in both directions.

Rounds in which the flow had too little to ask for show nothing about the link and change nothing. A
throttle mark cuts the level at once, at most once per round trip, and makes the next trial wait.
"""

from __future__ import annotations

from math import ceil, inf, log

FULL = 1.75
"""Where to settle: time per request over that of an empty queue."""
_SHORT = 1.4
"""Below this the queue may be too short to keep a jittery link full: try more at once."""
_LONG = 2.5
"""Above this requests queue for nothing: try fewer at once."""
_AT_LEVEL = 0.85
"""Share of the level that must have been in flight for a round to count."""

_SAME = 0.75
"""Rates of two rounds at one level that differ more are not of the same source any more."""
_GROW_MIN = 0.4
_UP_STEEP = 0.75
_DOWN_MAX = 0.25
"""Elasticities: what makes GROW go on, UP turn into GROW, and DOWN stay."""

_PROBE_S, _PROBE_AGAIN_S = 1.0, 0.2
"""Between two trials of more; and after one that was kept, or while the queue is short."""
_REFRESH_S, _LOOK_AGAIN_S = 10.0, 3.0
"""How long a base counts before it is sought again, and one that was not clear."""
_PATIENCE_MIN_S, _PATIENCE_MAX_S = 0.5, 4.0
"""How long to keep still after a throttle mark; doubled while trials run into further marks."""
_MARKS_MAX, _MARKS_SHARE, _MARKS_SMALL = 2.0, 0.03, 0.25
"""A cut needs this many marks; each answer takes a share of one back. A rare mark is the price of
being near a store's limit, and cheaper than staying far away from it; the more so where the level
is so small that one request less is a large cut."""
MARKS_MAX = 8
"""How many refusals one read reports at most: a read that was refused for minutes is one read."""
_CEILING_S = 10.0
"""How long the level of the last throttle mark stands in the way of doubling."""

_ROUND_MIN, _TRIAL_MIN, _ROUND_MAX = 16, 32, 256
_ROUND_S = 0.05
"""Least completions of a round, of a trial, and most of any. Where they come fast a round lasts at
least `_ROUND_S`, because counting is noisy."""

GROW, HOLD, UP, DOWN = range(4)


class RequestLimit:
    """The level of one source."""

    def __init__(self, *, requests_min: int, requests_max: int, start: int = 8) -> None:
        self._min, self._max = requests_min, requests_max
        self.level = min(max(start, requests_min), requests_max)
        """Requests that may be in flight now."""
        self.mode = GROW
        self.base_s = 0.0
        """Time of a request in an empty queue; 0 before it was seen."""
        self.latency_s = 0.0
        """Time of a request lately."""
        self.rate_bytes_s = 0.0
        """Bytes a second when the level was used to the full."""
        self._safe = self.level
        """The level to go back to when a trial fails."""
        self._ref_rate = self._ref_in_flight = 0.0
        """The round to compare with; rate 0 if there is none."""
        self._base_at_s = self._probe_at_s = self._deaf_until_s = self._quiet_until_s = 0.0
        self._is_seeking = False
        self._is_starting = True
        self._throttled_s = -inf
        self._marks = 0.0
        self._patience_s = _PATIENCE_MIN_S
        self._ceiling = requests_max + 1
        self._ceiling_at_s = 0.0
        self._round_at_s = 0.0
        self._skip = self.level
        self._need = self._round(self.level)
        self._clear()

    def is_throttled(self, now_s: float) -> bool:
        """Return whether the source asked us to slow down just now."""
        return now_s < self._throttled_s + _PATIENCE_MIN_S

    # -- what happens --------------------------------------------------------------------------

    def done(self, now_s: float, size_bytes: int, latency_s: float, in_flight: int) -> None:
        """Note an answer; `in_flight` counts it too, `latency_s` has stragglers cut short."""
        if self._marks:
            self._marks = max(0.0, self._marks - max(_MARKS_SHARE, _MARKS_SMALL / self.level))
        if self._skip:
            self._skip -= 1
            self._round_at_s = now_s
            return
        self._count += 1
        self._bytes += size_bytes
        self._latency_sum_s += latency_s
        self._in_flight_sum += in_flight
        if self._count >= self._need:
            self._close(now_s)

    def throttled(self, now_s: float, in_flight: int) -> None:
        """Note that the source asked us to slow down."""
        self._throttled_s = now_s
        self._marks += 1.0
        if self._marks < _MARKS_MAX or now_s < self._deaf_until_s or in_flight > self.level:
            return  # The last cut has not worked yet: it may take all of what is in flight.
        self._marks = 0.0
        self._ceiling, self._ceiling_at_s = self.level, now_s
        if self.level > self._safe and self.mode in (GROW, UP):
            # Our own trial did this: the level before it was fine.
            self._patience_s = min(self._patience_s * 2, _PATIENCE_MAX_S)
            level = self._safe
        else:
            level = min(int(self.level * 0.85), self.level - 1)
        self._deaf_until_s = now_s + max(self.latency_s, self.base_s, 0.01)
        self._quiet_until_s = now_s + self._patience_s
        self._hold(level)

    # -- rounds --------------------------------------------------------------------------------

    def _close(self, now_s: float) -> None:
        """End a round and decide by it."""
        elapsed_s = now_s - self._round_at_s
        if elapsed_s <= 0:
            self._need += self.level  # All of a burst came at once: its rate shows with the next.
            return
        rate = max(self._bytes, 1) / elapsed_s
        latency_s = max(self._latency_sum_s / self._count, 1e-9)
        in_flight = self._in_flight_sum / self._count
        self._need = self._round(self.level, self._count / elapsed_s)
        self._round_at_s = now_s
        self._clear()
        if self.mode == HOLD and self._ref_rate:
            latency_s = (latency_s + self.latency_s) / 2
        self.latency_s = latency_s
        if self.mode != DOWN:
            self._learn_base(latency_s)
        if in_flight < _AT_LEVEL * self.level:
            if self.mode in (UP, DOWN):
                self._hold(self._safe)
            return
        self.rate_bytes_s = rate if self.mode != HOLD else (self.rate_bytes_s + rate) / 2
        (self._grow, self._stay, self._up, self._down)[self.mode](now_s, rate, in_flight)

    def _grow(self, now_s: float, rate: float, in_flight: float) -> None:
        elasticity = self._elasticity(rate, in_flight) if self._ref_rate else 1.0
        if self._is_starting and self._ref_rate and elasticity > _UP_STEEP:
            self._base_at_s = now_s  # There was no queue at the level before.
        if elasticity < _GROW_MIN:
            level = self.level
            if self.latency_s > FULL * self.base_s:
                level = ceil(level * FULL * self.base_s / self.latency_s)
            self._refer(rate, in_flight)
            self._probe_at_s = now_s + _PROBE_S
            self._hold(max(level, self._safe))
            return
        self._refer(rate, in_flight)
        self._safe = self.level
        if self.level == self._max or not self._may_double(now_s):
            self._hold(self.level)
        else:
            self._to(self.level * 2)

    def _stay(self, now_s: float, rate: float, in_flight: float) -> None:
        before = self._ref_rate
        if before and _SAME < rate / before < 1 / _SAME:
            rate = (rate + before) / 2
            in_flight = (in_flight + self._ref_in_flight) / 2
        self._refer(rate, in_flight)
        if not _SAME < before / rate < 1 / _SAME:
            return  # The source has changed, or we have: nothing to compare with yet.
        ratio = self.latency_s / self.base_s
        self._is_seeking = now_s - self._base_at_s > _REFRESH_S
        if self.level > self._min and (ratio > _LONG or self._is_seeking):
            self._try_fewer(ratio)
        elif self._may_try_more(now_s, ratio):
            # With a short queue a large step does no harm, and shows more clearly what it brings.
            self.mode = GROW if ratio < _SHORT and self._may_double(now_s) else UP
            factor = 2.0 if self.mode == GROW else 1.25
            self._to(max(self.level + 1, round(self.level * factor)))

    def _up(self, now_s: float, rate: float, in_flight: float) -> None:
        elasticity = self._elasticity(rate, in_flight)
        ratio = self.latency_s / self.base_s
        if elasticity < (0.15 if ratio < _SHORT else 0.3 if ratio < FULL else 0.5):
            self._probe_at_s = now_s + _PROBE_S
            self._hold(self._safe)
            return
        self._patience_s = max(self._patience_s / 2, _PATIENCE_MIN_S)
        if self.level > 1.2 * self._ceiling:
            self._ceiling = self._max + 1  # The marks were transient: there is no such limit.
        self._refer(rate, in_flight)
        self._safe = self.level
        if elasticity >= _UP_STEEP and self._may_double(now_s):
            self.mode = GROW
            self._to(self.level * 2)
        else:
            self._probe_at_s = now_s + _PROBE_AGAIN_S
            self._hold(self.level)

    def _down(self, now_s: float, rate: float, in_flight: float) -> None:
        elasticity = self._elasticity(rate, in_flight)
        if elasticity <= _DOWN_MAX:
            self._refer(rate, in_flight)
            self._safe = self.level
            self.base_s = min(self.base_s, self.latency_s)
            ratio = self.latency_s / self.base_s
            if self.level > self._min and (self._is_seeking or ratio > FULL):
                self._try_fewer(ratio)
            else:
                self._base_at_s = now_s
                self._hold(self.level)
            return
        is_known = self._base_at_s > -inf and 0.8 < self.latency_s / self.base_s < 2
        self.base_s = (self.base_s + self.latency_s) / 2 if is_known else self.latency_s
        self._base_at_s = now_s
        if elasticity < _UP_STEEP:
            self._base_at_s -= _REFRESH_S - _LOOK_AGAIN_S  # Some of it was a queue.
        # Little: the time per request at the level before was this many times the base.
        ratio = (self._ref_in_flight / self._ref_rate) / (in_flight / rate)
        share = min(FULL / ratio, 1.5 if self._ceiling > self._max else 1.0)
        self._hold(max(self.level, round(self._safe * share)))

    # -- small change --------------------------------------------------------------------------

    def _try_fewer(self, ratio: float) -> None:
        """Begin a DOWN: by half when the base is to be found, else towards the knee."""
        self.mode = DOWN
        share = 0.5 if self._is_seeking else min(max(FULL / ratio, 0.5), 0.7)
        self._to(min(self.level - 1, round(self.level * share)))

    def _may_try_more(self, now_s: float, ratio: float) -> bool:
        early_s = _PROBE_S - _PROBE_AGAIN_S if ratio < _SHORT else 0.0
        is_time = now_s >= max(self._probe_at_s - early_s, self._quiet_until_s)
        return is_time and self.level < self._max

    def _may_double(self, now_s: float) -> bool:
        if now_s - self._ceiling_at_s > _CEILING_S:
            self._ceiling = self._max + 1
        return self.level * 2 < self._ceiling or self._ceiling > self._max

    def _learn_base(self, latency_s: float) -> None:
        if not self.base_s or latency_s < 0.7 * self.base_s:
            # The source has changed: its time without a queue must be measured again soon.
            self.base_s, self._base_at_s = latency_s, -inf
        elif latency_s < self.base_s:
            # A step towards it, since the least of many noisy rounds would be too low.
            self.base_s += 0.3 * (latency_s - self.base_s)

    def _elasticity(self, rate: float, in_flight: float) -> float:
        change = log(in_flight / self._ref_in_flight)
        if abs(change) < 0.02:
            return 0.0
        return log(rate / self._ref_rate) / change

    def _refer(self, rate: float, in_flight: float) -> None:
        self._ref_rate, self._ref_in_flight = rate, in_flight

    def _hold(self, level: int) -> None:
        self.mode = HOLD
        self._is_starting = False
        if level != self.level:
            self._ref_rate = 0.0
            self._to(level)
        self._safe = self.level

    def _to(self, level: int) -> None:
        """Change the level; what was asked for under the old one drains first."""
        self._skip = self.level
        self.level = min(max(level, self._min), self._max)
        self._need = self._round(self.level, least=_ROUND_MIN if self.mode == GROW else _TRIAL_MIN)
        self._clear()

    def _clear(self) -> None:
        self._count = self._bytes = self._in_flight_sum = 0
        self._latency_sum_s = 0.0

    @staticmethod
    def _round(level: int, done_s: float = 0.0, least: int = _ROUND_MIN) -> int:
        """Return the completions of a round: whole turns of the level, so that bursts even out."""
        return level * ceil(min(max(least, done_s * _ROUND_S), _ROUND_MAX) / level)
