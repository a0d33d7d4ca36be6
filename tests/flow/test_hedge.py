"""When a second copy is due, and when it is not."""

from __future__ import annotations

import pytest
from tests.flow.story import LATENCY_S, Story

from penstock.flow import Begin, Consumed, Failed, Throttled, Waiting


@pytest.fixture(autouse=True)
def one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy each, so that a story is short; what a second one does has a test of its own."""
    monkeypatch.setattr("penstock.flow.hedge.HEDGES_MAX", 1)


def test_a_late_fetch_of_the_next_step_gets_one_copy_and_no_more() -> None:
    story = Story(pace_s=0.05)
    (late,) = story.want(1)
    assert story.wait(LATENCY_S) == []
    assert story.wait(10.0) == [Begin(number=late, attempt=1, source="store")]
    assert story.flow.num_hedges == 1


def test_a_copy_that_is_late_itself_gets_one_where_more_are_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.flow.hedge.HEDGES_MAX", 2)
    story = Story(pace_s=0.05)
    (late,) = story.want(1)
    assert story.wait(10.0) == [
        Begin(number=late, attempt=1, source="store"),
        Begin(number=late, attempt=2, source="store"),
    ]


def test_a_late_fetch_of_a_far_step_is_left_alone_until_it_is_near() -> None:
    story = Story(pace_s=1.0)
    (late,) = story.want(1, ahead=20)
    assert story.wait(5.0) == []
    assert story.wait(10.0) == [Begin(number=late, attempt=1, source="store")]


def test_waiting_for_a_step_makes_it_near() -> None:
    story = Story(pace_s=1.0)
    (late,) = story.want(1, ahead=5)
    assert story.wait(0.5) == []
    waiting = Waiting(step=story.step + 5, at_s=story.now_s)
    assert story.flow.on(waiting) == [Begin(number=late, attempt=1, source="store")]


def test_the_copy_goes_to_the_next_source_where_there_is_one() -> None:
    story = Story("peer", "store", pace_s=0.05)
    (late,) = story.want(1)
    assert story.wait(0.4) == [Begin(number=late, attempt=1, source="store")]


def test_the_first_answer_counts_and_the_second_only_frees_its_place() -> None:
    story = Story(pace_s=0.05)
    (late,) = story.want(1)
    story.wait(1.0)
    before = story.flow.rates().sources["store"].latency_p99_s
    assert story.flow.in_flight("store") == 2
    assert story.arrive(late, attempt=1) == []
    assert (story.flow.in_flight("store"), story.flow.stage_bytes) == (1, 1000)
    story.flow.on(Consumed(step=story.step, at_s=story.now_s))
    story.now_s += 5.0
    assert story.arrive(late, attempt=0) == []
    assert (story.flow.in_flight("store"), story.flow.stage_bytes) == (0, 0)
    for _ in range(40):  # the tail is looked at now and then
        (number,) = story.want(1)
        story.now_s += LATENCY_S
        story.arrive(number)
    assert story.flow.rates().sources["store"].latency_p99_s >= before


def test_a_step_that_is_taken_gives_its_room_away_whatever_a_late_copy_does() -> None:
    story = Story(pace_s=0.05)
    (late,) = story.want(1)
    story.wait(1.0)
    story.arrive(late, attempt=1)
    story.consume()
    assert (story.flow.in_flight("store"), story.flow.stage_bytes) == (1, 0)
    story.arrive(late, attempt=0)
    assert story.flow.in_flight("store") == 0


def test_when_one_copy_fails_the_other_is_waited_for() -> None:
    story = Story("peer", "store", pace_s=0.05)
    (late,) = story.want(1)
    story.wait(0.4)
    assert story.flow.on(Failed(number=late, attempt=0, at_s=story.now_s)) == []
    actions = story.flow.on(Failed(number=late, attempt=1, at_s=story.now_s))
    assert [type(action).__name__ for action in actions] == ["GiveUp"]


def test_where_all_are_late_copies_do_not_come_in_crowds() -> None:
    story = Story(pace_s=0.05)
    story.want(4)
    story.flow.on(Waiting(step=story.step, at_s=story.now_s))
    assert story.wait(0.5) == []
    assert story.flow.in_flight("store") == 4 <= story.flow.limit("store") - 4


def test_one_that_others_overtake_is_late_even_among_other_late_ones() -> None:
    story = Story(pace_s=0.05)
    late = story.want(3)
    story.flow.on(Waiting(step=story.step, at_s=story.now_s))
    begun: list[int] = []
    for _ in range(30):
        (number,) = story.want(1, ahead=1)
        story.now_s += LATENCY_S
        begun += [a.number for a in story.arrive(number) if isinstance(a, Begin)]
    assert begun == late


def test_copies_are_a_small_share_of_all_requests() -> None:
    story = Story(pace_s=0.05, num_seen=1000)
    for _ in range(200):  # every fetch is late from now on, one at a time
        (late,) = story.want(1)
        story.wait(1.0)
        story.arrive(late)
        story.arrive(late, attempt=1)
        story.step += 1
        story.flow.on(Consumed(step=story.step - 1, at_s=story.now_s))
    assert 8 <= story.flow.num_hedges <= 8 + 0.05 * 200 + 1


def test_a_source_that_asked_us_to_slow_down_gets_no_copies() -> None:
    story = Story(pace_s=0.05)
    story.want(1)
    for _ in range(5):
        story.flow.on(Throttled(source="store", at_s=story.now_s))
        assert story.wait(0.3) == []
    assert len(story.wait(2.0)) == 1


@pytest.mark.parametrize("latency_s", [LATENCY_S, 0.3])
def test_a_source_that_is_hardly_known_gets_a_copy_after_several_times_its_answers(
    latency_s: float,
) -> None:
    story = Story(num_seen=0)
    *answered, late = story.want(8)
    story.flow.on(Waiting(step=0, at_s=0.0))
    story.wait(latency_s)
    for number in answered:
        story.arrive(number)
    assert story.wait(3 * latency_s) == []
    assert story.wait(max(0.5, 3 * latency_s)) == [Begin(number=late, attempt=1, source="store")]


def test_a_source_that_has_not_answered_at_all_gets_no_copies() -> None:
    story = Story(num_seen=0)
    story.want(8)
    story.flow.on(Waiting(step=0, at_s=0.0))
    assert story.wait(60.0) == []


def test_a_copy_a_moment_needs_no_token_while_the_loop_waits_for_it() -> None:
    story = Story(pace_s=0.05, num_seen=400)
    source = story.flow._sources["store"]
    late = story.want(3)
    source.tokens = 0.0
    assert story.wait(5.0) == [], "the loop has other steps to take"
    story.flow.on(Waiting(step=story.step, at_s=story.now_s))
    for _ in range(20):  # the source answers others meanwhile
        (number,) = story.want(1, ahead=9)
        story.now_s += LATENCY_S
        story.arrive(number)
        source.tokens = 0.0
    begun = [a for a in story.wait(1.2) if isinstance(a, Begin)]
    assert {a.number for a in begun} <= set(late)
    assert 2 <= len(begun) <= 3


def test_requests_that_hang_leave_their_places_to_their_copies() -> None:
    story = Story(pace_s=0.05)
    hung = story.want(story.flow.limit("store"))
    story.flow.on(Waiting(step=story.step, at_s=story.now_s))
    for number in hung[2:]:
        story.now_s += LATENCY_S / 4
        story.arrive(number)
    others = story.want(story.flow.limit("store") - 2)
    assert story.flow.in_flight("store") == story.flow.limit("store")
    attempts = story.wait(1.0)
    assert {a.number for a in attempts if isinstance(a, Begin)} >= set(hung[:2])
    assert others
