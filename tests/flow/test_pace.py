"""The consumer's own pace, and the look-ahead that it asks for."""

from __future__ import annotations

import pytest

from penstock.flow.pace import DEPTH_S_MIN, GENEROUS, STEPS_MIN, StepPace, depth_bytes


def paced(step_s: float, *, num_steps: int = 20, size_bytes: int = 1000) -> StepPace:
    pace = StepPace()
    for step in range(num_steps):
        pace.consumed(step, step * step_s, size_bytes)
    return pace


def test_waiting_for_us_does_not_make_a_consumer_slow() -> None:
    pace = StepPace()
    now_s = 0.0
    for step in range(30):
        now_s += 0.1  # its own work
        pace.waiting(step, now_s)
        now_s += 0.7  # ours
        pace.consumed(step, now_s, 1000)
    assert pace.step_s == pytest.approx(0.1)
    assert pace.steps_s == pytest.approx(10.0)


def test_a_pause_is_not_the_pace() -> None:
    pace = paced(0.1)
    pace.consumed(20, 1.9 + 60.0, 1000)
    assert pace.step_s == pytest.approx(0.1)


def test_steps_that_are_long_again_and_again_count() -> None:
    pace, now_s = StepPace(), 0.0
    for step in range(40):
        now_s += 1.0 if step % 4 == 3 else 0.1
        pace.consumed(step, now_s, 1000)
    assert 0.2 < (pace.step_s or 0) < 0.35


def test_a_change_of_pace_is_learnt_within_a_few_steps() -> None:
    pace = paced(1e-4)
    for step in range(20, 40):
        pace.consumed(step, 1.0 + step * 0.5, 1000)
    assert pace.step_s == pytest.approx(0.5)


def test_several_steps_at_once_share_their_time() -> None:
    pace = StepPace()
    for turn in range(10):
        pace.consumed(turn * 4 + 3, turn * 1.0, 4000)
    assert pace.step_s == pytest.approx(0.25)
    assert pace.bytes_per_step == pytest.approx(1000)
    pace.consumed(3, 99.0, 4000)  # long gone
    assert pace.step_s == pytest.approx(0.25)


def test_a_step_is_needed_when_those_before_it_are_done() -> None:
    pace = paced(0.1)  # the last one, 19, at 1.9
    assert pace.needed_s(24, 1.95) == pytest.approx(2.4)
    assert pace.needed_s(20, 5.0) == 5.0, "overdue is now"
    pace.waiting(20, 5.0)
    assert pace.needed_s(20, 5.5) == 5.5
    assert pace.needed_s(22, 5.5) == pytest.approx(5.7)
    assert StepPace().needed_s(7, 1.0) == 1.0, "before the first step all is near"


def test_the_depth_covers_the_tail_several_times() -> None:
    pace = paced(0.1, size_bytes=1_000_000)  # 10 MB/s
    depth = depth_bytes(pace, tail_s=2.0, source_bytes_s=100e6, in_flight_bytes=0)
    assert depth == pytest.approx(GENEROUS * (2.0 + 0.01) * 10e6)


def test_the_depth_has_floors_in_time_steps_and_requests() -> None:
    fast = paced(0.1, size_bytes=1_000_000)
    calm = {"tail_s": 0.001, "source_bytes_s": 1e9}
    assert depth_bytes(fast, **calm, in_flight_bytes=0) == pytest.approx(DEPTH_S_MIN * 10e6)
    slow = paced(10.0, size_bytes=1_000_000)
    assert depth_bytes(slow, **calm, in_flight_bytes=0) == STEPS_MIN * 1_000_000
    assert depth_bytes(slow, **calm, in_flight_bytes=50e6) == 100e6


def test_no_more_is_planned_than_the_source_could_bring() -> None:
    hasty = paced(1e-5, size_bytes=1_000_000)
    depth = depth_bytes(hasty, tail_s=0.5, source_bytes_s=10e6, in_flight_bytes=0)
    assert depth == pytest.approx(GENEROUS * (0.5 + 0.1) * 10e6)


def test_a_source_that_was_never_used_to_the_full_is_no_bound() -> None:
    pace = paced(0.1, size_bytes=1_000_000)
    depth = depth_bytes(pace, tail_s=1.0, source_bytes_s=0.0, in_flight_bytes=0)
    assert depth == pytest.approx(GENEROUS * 10e6)
