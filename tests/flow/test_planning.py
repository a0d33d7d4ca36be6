"""When another batch is planned, and when the tiers are filled ahead."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.flow.cost import REQUESTS_MAX
from penstock.flow.planning import (
    BATCHES_MAX,
    NEAR_SPARE,
    REQUESTS_MIN,
    may_fill,
    may_plan,
    requests_max,
)

sizes = st.integers(0, 1 << 40)


def asked_for_nothing() -> int:
    raise AssertionError("the flow was asked how far to look ahead, and that does not matter here")


@given(size_bytes=sizes, was_near=st.booleans(), most=sizes)
def test_one_batch_is_planned_however_small_the_stage(
    size_bytes: int, was_near: bool, most: int
) -> None:
    assert may_plan(
        num_batches=0,
        size_bytes=size_bytes,
        was_near=was_near,
        num_makers=1,
        stage_bytes_max=most,
        look_ahead_bytes=asked_for_nothing,
    )


@given(st.integers(1, 2 * BATCHES_MAX), st.integers(1, 64), st.booleans(), st.tuples(*[sizes] * 3))
def test_more_are_planned_only_within_every_bound(
    num_batches: int, num_makers: int, was_near: bool, bytes_: tuple[int, int, int]
) -> None:
    size_bytes, most, ahead = bytes_
    if may_plan(
        num_batches=num_batches,
        size_bytes=size_bytes,
        was_near=was_near,
        num_makers=num_makers,
        stage_bytes_max=most,
        look_ahead_bytes=lambda: ahead,
    ):
        assert size_bytes < most
        assert num_batches < BATCHES_MAX
        assert num_batches < num_makers + NEAR_SPARE if was_near else size_bytes < ahead


def test_tiers_are_filled_while_twice_the_requests_under_way_do_not_wait() -> None:
    assert may_fill(num_waiting=15, requests_limit=8)
    assert not may_fill(num_waiting=16, requests_limit=8)


@given(st.integers(1, 1000))
def test_ranks_of_a_node_share_its_requests_down_to_a_least_number(num_ranks: int) -> None:
    each = requests_max(num_ranks)
    assert REQUESTS_MIN <= each <= REQUESTS_MAX
    assert each == REQUESTS_MIN or each * num_ranks <= REQUESTS_MAX
