"""The number of requests in flight, as a pure state machine."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from penstock.flow.limit import DOWN, GROW, HOLD, RequestLimit

SIZE = 100_000


class Link:
    """A link on which time per request is a function of how many share it; no jitter at all."""

    def __init__(self, limit: RequestLimit, latency_s: Callable[[int], float]) -> None:
        self.limit = limit
        self.latency_s = latency_s
        self.now_s = 0.0
        self.modes: list[int] = []
        self.levels: list[int] = []

    def answer(self, num: int, *, in_flight: int | None = None) -> None:
        for _ in range(num):
            count = self.limit.level if in_flight is None else in_flight
            time_s = self.latency_s(count)
            self.now_s += time_s / count  # Little
            self.limit.done(self.now_s, SIZE, time_s, count)
            self.modes.append(self.limit.mode)
            self.levels.append(self.limit.level)


def limit_of(requests_min: int = 1, requests_max: int = 64, start: int = 8) -> RequestLimit:
    return RequestLimit(requests_min=requests_min, requests_max=requests_max, start=start)


def shared(bytes_s: float, base_s: float = 0.02) -> Callable[[int], float]:
    return lambda count: max(base_s, count * SIZE / bytes_s)


def test_it_doubles_while_that_brings_more_and_settles_beyond_the_knee() -> None:
    link = Link(limit_of(), shared(bytes_s=100e6))  # 20 requests fill it
    link.answer(400)
    assert link.limit.mode == HOLD
    assert 20 < link.limit.level <= 40
    assert link.limit.rate_bytes_s > 99e6


def test_without_a_shared_link_it_grows_to_the_bound_and_stays() -> None:
    link = Link(limit_of(requests_max=50), lambda count: 0.03)
    link.answer(5000)
    assert link.limit.level == 50


def test_it_never_leaves_its_bounds() -> None:
    link = Link(limit_of(requests_min=2, requests_max=6, start=100), shared(bytes_s=1e6))
    assert link.limit.level == 6
    link.answer(1000)
    assert (min(link.levels), max(link.levels)) == (2, 6)
    for _ in range(50):
        link.now_s += 10.0
        link.limit.throttled(link.now_s, 2)
    assert link.limit.level == 2


def test_a_start_beyond_the_knee_is_found_out() -> None:
    """The first rounds show a queue only: the base must be looked for further down."""
    link = Link(limit_of(start=64), shared(bytes_s=100e6))
    link.answer(2000)
    assert 20 <= link.limit.level <= 40
    assert link.limit.base_s < 0.025


def test_rounds_without_enough_to_ask_for_change_nothing() -> None:
    link = Link(limit_of(), shared(bytes_s=100e6))
    link.answer(400)
    level = link.limit.level
    link.answer(20_000, in_flight=3)
    assert link.limit.level == level
    assert link.limit.mode == HOLD


def test_growth_waits_until_there_is_enough_to_ask_for() -> None:
    link = Link(limit_of(start=8), lambda count: 0.02)
    link.answer(1000, in_flight=2)
    assert (link.limit.level, link.limit.mode) == (8, GROW)
    link.answer(500)
    assert link.limit.level == 64


def test_a_queue_that_brings_nothing_is_given_up() -> None:
    link = Link(limit_of(), shared(bytes_s=100e6))
    link.answer(400)
    link.latency_s = shared(bytes_s=10e6)
    link.answer(600)
    assert link.limit.level <= 6
    assert DOWN in link.modes


def test_a_source_that_became_slow_by_itself_gets_more_requests() -> None:
    link = Link(limit_of(), shared(bytes_s=100e6))
    link.answer(400)
    link.latency_s = lambda count: 0.3
    link.answer(1500)
    assert link.limit.level == 64
    assert link.limit.base_s > 0.25


@pytest.mark.parametrize("num_slow", [100, 300, 500, 700, 2000])
def test_a_source_that_recovers_is_filled_again_at_once(num_slow: int) -> None:
    link = Link(limit_of(), shared(bytes_s=100e6))
    link.answer(400)
    link.latency_s = shared(bytes_s=10e6)
    link.answer(num_slow)
    link.latency_s = shared(bytes_s=100e6)
    recovered_s = link.now_s
    while link.limit.level < 20:
        link.answer(1)
    assert link.now_s - recovered_s < 0.6


def test_marks_cut_once_per_round_trip_and_rare_ones_not_at_all() -> None:
    link = Link(limit_of(), lambda count: 0.03)
    link.answer(1000)
    limit, now_s = link.limit, link.now_s
    limit.throttled(now_s, 64)
    assert limit.level == 64, "one mark is no reason"
    for _ in range(20):
        limit.throttled(now_s, 64)
    assert limit.level == 54
    limit.throttled(now_s + 1.0, 64)
    limit.throttled(now_s + 1.0, 64)
    assert limit.level == 54, "the cut has not worked yet"
    limit.throttled(now_s + 1.0, 54)
    assert limit.level == 45
    assert limit.is_throttled(now_s + 1.1)
    assert not limit.is_throttled(now_s + 9.0)


def test_after_a_mark_trials_wait_and_one_that_brought_it_is_taken_back() -> None:
    link = Link(limit_of(), lambda count: 0.03)
    link.answer(9)
    for _ in range(2):
        link.limit.throttled(link.now_s, 8)
    level, marked_s = link.limit.level, link.now_s
    assert level == 6
    while link.limit.level <= level:
        link.answer(1)
    assert link.now_s - marked_s >= 0.5
    for _ in range(3):
        link.limit.throttled(link.now_s, link.limit.level)
    assert link.limit.level >= level, "only the trial is taken back"


def test_a_burst_that_comes_at_one_instant_is_measured_with_the_next() -> None:
    limit = limit_of(start=4, requests_max=4)
    for burst in range(1, 40):
        for left in range(4, 0, -1):
            limit.done(burst * 0.1, SIZE, 0.1, min(4, left + 3))
    assert limit.rate_bytes_s > 0
    assert limit.level == 4


def test_a_wrong_base_is_found_out_in_time() -> None:
    link = Link(limit_of(), shared(bytes_s=100e6))
    link.answer(400)
    link.limit.base_s = 0.04  # As if learnt in a bad moment.
    start_s = link.now_s
    while link.now_s < start_s + 12.0:
        link.answer(100)
    assert link.limit.base_s < 0.025
    assert link.limit.level <= 42


def test_where_fewer_requests_bring_somewhat_less_it_looks_again_soon() -> None:
    link = Link(limit_of(requests_max=32), lambda count: 0.02 * (count / 8) ** 0.5)
    link.answer(20_000)
    starts = sum(a != DOWN and b == DOWN for a, b in pairwise(link.modes))
    assert link.now_s / starts < 7.0


def test_a_mark_in_a_bad_moment_does_not_slow_growth_for_long() -> None:
    link = Link(limit_of(), lambda count: 0.03)
    for _ in range(2):
        link.limit.throttled(link.now_s, 8)
    assert link.limit.level == 6
    while link.limit.level < 64:
        link.answer(1)
    assert link.now_s < 2.0
