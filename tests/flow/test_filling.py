"""In which order tiers are filled, and what a node says about how far it is."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from penstock.flow.filling import FillCourse, FillProgress

STEPS = 10


def course_of(start: int = 0, *, at_once: int = 3) -> FillCourse[int, int]:
    def steps_from(step: int) -> Iterator[int]:
        return iter(range(step, step + STEPS))

    return FillCourse(steps_from, start, samples_at_once=at_once)


def taken(course: FillCourse[int, int], *, for_others: bool = False) -> list[int]:
    out: list[int] = []
    while found := course.next(lambda step: 1, for_others=for_others):
        out += [step for _, step in found]
    return out


@given(st.integers(0, 5), st.integers(1, 20))
def test_every_batch_is_looked_at_once_in_order(start: int, at_once: int) -> None:
    course = course_of(start, at_once=at_once)
    assert not course.is_over(0)
    assert taken(course) == list(range(start, start + STEPS))
    assert course.is_over(0)


def test_the_first_rank_goes_over_it_again_for_the_others() -> None:
    course = course_of(4)
    steps = list(range(4, 4 + STEPS))
    assert taken(course, for_others=True) == steps + steps
    assert course.is_for_others


def test_when_homes_move_it_begins_where_the_planned_batches_end() -> None:
    course = course_of()
    taken(course, for_others=True)
    assert not course.has_moved(0, 7, 7)
    assert not course.is_over(1), "other units are ours now"
    assert course.has_moved(1, 7, 7)
    assert not course.is_for_others
    assert course.next(lambda step: 1, for_others=False)[0] == (7, 7)
    assert course.has_moved(2, None, 99)
    assert course.next(lambda step: 1, for_others=False)[0] == (0, 0)


def test_a_place_is_reached_when_everything_before_it_is_there() -> None:
    progress = FillProgress()
    progress.began(["a", "b"], 0, 10)
    progress.began(["c"], 0, 20)
    progress.began([], 0, 30)
    progress.done("c")
    assert progress.reached == (0, 0)
    progress.done("a")
    progress.done("b")
    assert progress.reached == (0, 30)


def test_a_unit_that_two_epochs_need_is_under_way_for_both() -> None:
    progress = FillProgress()
    progress.began(["a"], 0, 10)
    progress.began(["a"], 1, 10)
    progress.end()
    assert not progress.is_over
    progress.done("a")
    assert progress.is_over


def test_a_progress_mark_moves_with_time_only_while_something_is_under_way() -> None:
    progress = FillProgress()
    assert progress.progress_mark(100, 1.0) == progress.progress_mark(100, 9.0)
    progress.began(["a"], 0, 10)
    assert progress.progress_mark(100, 1.0) < progress.progress_mark(100, 9.0)
    before = progress.progress_mark(100, 9.0)
    progress.done("a")
    assert progress.progress_mark(100, 9.0) > before


def test_what_is_stopped_will_not_come() -> None:
    progress = FillProgress()
    progress.began(["a"], 0, 10)
    progress.stop()
    assert progress.is_over
