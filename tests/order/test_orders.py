"""Every order is a bijection that can be sought, undone, pickled and compared."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import OptionError
from penstock.order import (
    BlocksOrder,
    GlobalOrder,
    MixtureOrder,
    Order,
    SequentialOrder,
    order_hash,
)

seeds = st.integers(0, 2**64 - 1)
epochs = st.integers(0, 1000)


@st.composite
def bijective_orders(draw: st.DrawFn) -> Order:
    kind = draw(st.sampled_from(["global", "sequential", "blocks"]))
    if kind == "global":
        return GlobalOrder(num_samples=draw(st.integers(1, 500)), seed=draw(seeds))
    if kind == "sequential":
        return SequentialOrder(num_samples=draw(st.integers(1, 500)))
    sizes = draw(st.lists(st.integers(0, 20), min_size=1, max_size=40).filter(any))
    starts = np.concatenate([[0], np.cumsum(sizes)])
    window_blocks = draw(st.integers(1, 12))
    return BlocksOrder(block_starts=starts, seed=draw(seeds), window_blocks=window_blocks)


def small_orders() -> list[Order]:
    return [
        GlobalOrder(num_samples=40, seed=7),
        SequentialOrder(num_samples=40),
        BlocksOrder(block_starts=np.arange(0, 41, 4), seed=7, window_blocks=3),
        MixtureOrder(sizes=(10, 30), weights=(1, 1), seed=7, period=8),
    ]


@given(order=bijective_orders(), epoch=epochs)
def test_an_epoch_uses_every_sample_once(order: Order, epoch: int) -> None:
    ids = order.ids(epoch, 0, order.num_samples)
    assert ids.dtype == np.int64
    assert np.array_equal(np.sort(ids), np.arange(order.num_samples))


@given(order=bijective_orders(), epoch=epochs, data=st.data())
def test_positions_undo_ids_in_any_order_and_number(
    order: Order, epoch: int, data: st.DataObject
) -> None:
    asked = data.draw(st.lists(st.integers(0, order.num_samples - 1), max_size=30))
    ids = order.ids(epoch, 0, order.num_samples)
    assert order.positions(epoch, ids[asked]).tolist() == asked


@given(order=bijective_orders(), epoch=epochs, data=st.data())
def test_any_range_can_be_sought(order: Order, epoch: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, order.num_samples))
    stop = data.draw(st.integers(start, order.num_samples))
    whole = order.ids(epoch, 0, order.num_samples)
    assert np.array_equal(order.ids(epoch, start, stop), whole[start:stop])


def test_orders_are_pinned_by_value() -> None:
    global_, sequential, blocks, mixture = small_orders()
    assert global_.ids(0, 0, 10).tolist() == [5, 11, 20, 21, 37, 28, 34, 29, 35, 24]
    assert global_.ids(1, 30, 40).tolist() == [37, 6, 9, 16, 36, 2, 13, 11, 0, 1]
    assert sequential.ids(5, 3, 7).tolist() == [3, 4, 5, 6]
    assert blocks.ids(0, 0, 14).tolist() == [15, 9, 14, 13, 11, 37, 12, 8, 10, 38, 36, 39, 17, 19]
    assert blocks.ids(1, 26, 40).tolist() == [
        34,
        39,
        37,
        35,
        27,
        24,
        25,
        32,
        26,
        38,
        20,
        21,
        22,
        23,
    ]
    assert mixture.ids(0, 0, 16).tolist() == [
        2,
        34,
        1,
        19,
        3,
        22,
        20,
        5,
        25,
        27,
        9,
        7,
        6,
        15,
        0,
        18,
    ]
    assert mixture.ids(1, 30, 40).tolist() == [4, 1, 9, 32, 3, 0, 38, 6, 31, 10]
    big = GlobalOrder(num_samples=1_281_167, seed=42)
    assert big.ids(89, 1_281_160, 1_281_167).tolist() == [
        147103,
        1266350,
        909687,
        841598,
        1013122,
        138976,
        1087254,
    ]


def test_descriptions_are_pinned_by_value() -> None:
    assert [order_hash(order) for order in small_orders()] == [
        "b94e749569e9c7f3",
        "189b5261a733284d",
        "b1c125fcd14039a4",
        "df9b3ecc30380552",
    ]


@pytest.mark.parametrize("order", small_orders(), ids=lambda order: order.mode)
def test_an_order_survives_pickling(order: Order) -> None:
    copy = pickle.loads(pickle.dumps(order))
    assert copy == order
    assert hash(copy) == hash(order)
    assert np.array_equal(copy.ids(3, 0, 40), order.ids(3, 0, 40))


@pytest.mark.parametrize("order", small_orders(), ids=lambda order: order.mode)
def test_positions_outside_the_epoch_are_refused(order: Order) -> None:
    for start, stop in ((-1, 3), (0, 41), (5, 4)):
        with pytest.raises(OptionError, match="40 samples"):
            order.ids(0, start, stop)
    with pytest.raises(OptionError, match="epoch must be at least 0, got -1"):
        order.ids(-1, 0, 1)
    for sample_id in (-1, 40):
        with pytest.raises(OptionError, match="between 0 and 39"):
            order.positions(0, [sample_id])


def test_epochs_and_seeds_agree_as_rarely_as_chance() -> None:
    num_samples = 100_000
    lists = [
        GlobalOrder(num_samples=num_samples, seed=seed).ids(epoch, 0, num_samples)
        for seed in (0, 1)
        for epoch in (0, 1, 2)
    ]
    for i, first in enumerate(lists):
        for second in lists[:i]:
            assert int((first == second).sum()) < 8  # one on average
            assert abs(np.corrcoef(first, second)[0, 1]) < 4 / num_samples**0.5


def test_nonsense_is_refused_at_birth() -> None:
    with pytest.raises(OptionError, match="got 0"):
        GlobalOrder(num_samples=0, seed=1)
    with pytest.raises(OptionError, match="seed"):
        GlobalOrder(num_samples=5, seed=-1)
    with pytest.raises(OptionError, match="got 0"):
        SequentialOrder(num_samples=0)
