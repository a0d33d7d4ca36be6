"""Blocks are read whole, window by window."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import OptionError
from penstock.order import BlocksOrder
from penstock.order.blocks import _layout

sizes_lists = st.lists(st.integers(0, 9), min_size=1, max_size=30).filter(any)


def order_of(sizes: list[int], window_blocks: int, seed: int = 7) -> BlocksOrder:
    starts = np.concatenate([[0], np.cumsum(sizes)])
    return BlocksOrder(block_starts=starts, seed=seed, window_blocks=window_blocks)


def num_windows(order: BlocksOrder) -> int:
    return -(-order.num_blocks // order.window_blocks)


def blocks_of(order: BlocksOrder, epoch: int, window: int) -> npt.NDArray[np.int64]:
    first = window * order.window_blocks
    return _layout(order, epoch).block_at[first : first + order.window_blocks]


@given(sizes=sizes_lists, window_blocks=st.integers(1, 8), epoch=st.integers(0, 9))
def test_a_window_uses_exactly_the_samples_of_its_blocks(
    sizes: list[int], window_blocks: int, epoch: int
) -> None:
    order = order_of(sizes, window_blocks)
    for window in range(num_windows(order)):
        blocks = blocks_of(order, epoch, window)
        assert len(blocks) <= window_blocks
        wanted = [np.arange(order.block_starts[b], order.block_starts[b + 1]) for b in blocks]
        ids = order.ids(epoch, *_layout(order, epoch).window_bounds(window))
        assert np.array_equal(np.sort(ids), np.sort(np.concatenate(wanted)))


@given(sizes=sizes_lists, window_blocks=st.integers(1, 8), epoch=st.integers(0, 9))
def test_windows_use_every_block_once(sizes: list[int], window_blocks: int, epoch: int) -> None:
    order = order_of(sizes, window_blocks)
    blocks = [blocks_of(order, epoch, window) for window in range(num_windows(order))]
    assert np.array_equal(np.sort(np.concatenate(blocks)), np.arange(len(sizes)))


@given(sizes=sizes_lists, window_blocks=st.integers(1, 8))
def test_a_position_lies_within_the_bounds_of_its_window(
    sizes: list[int], window_blocks: int
) -> None:
    order = order_of(sizes, window_blocks)
    for position in range(order.num_samples):
        layout = _layout(order, 0)
        first, end = layout.window_bounds(layout.window_of(position))
        assert first <= position < end


def test_blocks_come_in_another_sequence_in_each_epoch_and_for_each_seed() -> None:
    sequences = {
        tuple(blocks_of(order_of([1] * 50, 50, seed), epoch, 0))
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(sequences) == 25


def test_samples_of_a_window_are_mixed_across_its_blocks() -> None:
    order = order_of([100] * 40, 8)
    blocks = order.ids(0, *_layout(order, 0).window_bounds(2)) // 100
    changes = np.count_nonzero(np.diff(blocks))
    assert 799 * 7 / 8 - 60 < changes < 799 * 7 / 8 + 60  # ±6 deviations


def test_one_window_over_all_blocks_is_as_free_as_a_global_order() -> None:
    ids = order_of([100] * 40, 40).ids(0, 0, 4000)
    assert abs(np.corrcoef(ids, np.arange(4000))[0, 1]) < 0.06


def test_orders_that_differ_only_in_the_block_table_are_different() -> None:
    assert order_of([2, 3], 2) == order_of([2, 3], 2)
    assert order_of([2, 3], 2) != order_of([3, 2], 2)
    assert order_of([2, 3], 2).describe() != order_of([3, 2], 2).describe()


def test_the_table_of_blocks_cannot_be_changed_afterwards() -> None:
    starts = np.array([0, 2, 5])
    order = BlocksOrder(block_starts=starts, seed=7, window_blocks=1)
    starts[1] = 4
    assert order.block_starts.tolist() == [0, 2, 5]
    with pytest.raises(ValueError, match="read-only"):
        order.block_starts[1] = 4


@pytest.mark.parametrize("starts", [[0], [], [1, 5], [0, 5, 4], [[0, 1]]])
def test_a_table_that_is_no_prefix_sum_is_refused(starts: list[int]) -> None:
    with pytest.raises(OptionError, match="block_starts"):
        BlocksOrder(block_starts=np.array(starts), seed=7, window_blocks=1)


def test_windows_without_blocks_are_refused() -> None:
    with pytest.raises(OptionError, match="window_blocks must be at least 1, got 0"):
        order_of([2, 3], 0)
