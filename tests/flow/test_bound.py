"""The bound: no cache reads less, and a shared one that never evicts reads no more."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.lru import lru_bytes

from penstock.errors import OptionError
from penstock.flow.bound import (
    belady_bytes,
    epochs_bound,
    lru_hit_ratio,
    windows_bound,
)
from penstock.order import GlobalOrder

SHARES = [0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9]


def shuffled_epochs(num_samples: int, num_epochs: int) -> npt.NDArray[np.int64]:
    order = GlobalOrder(num_samples=num_samples, seed=5)
    return np.concatenate([order.ids(e, 0, num_samples) for e in range(num_epochs)])


def static_bytes(ids: npt.ArrayLike, sizes: npt.NDArray[np.int64], cache_bytes: int) -> int:
    """What a cache reads that takes samples until it is full and then keeps them."""
    resident: set[int] = set()
    held = read = 0
    for i in np.asarray(ids).tolist():
        if i in resident:
            continue
        read += int(sizes[i])
        if held + sizes[i] <= cache_bytes:
            resident.add(i)
            held += int(sizes[i])
    return read


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("uneven", [False, True])
def test_belady_and_a_static_cache_meet_the_bound_on_plain_epochs(
    share: float, uneven: bool
) -> None:
    random = np.random.default_rng(1)
    sizes = random.integers(1, 2_000, 1_000) if uneven else np.full(1_000, 1_000)
    total = int(sizes.sum())
    capacity = int(total * share)
    ids = shuffled_epochs(1_000, 8)
    bound = epochs_bound(total, capacity, 8)
    assert belady_bytes(ids, sizes, capacity) == bound, "divisible samples: to the byte"
    rounding = int(sizes.max()) if uneven else 0
    assert bound <= static_bytes(ids, sizes, capacity) <= bound + 7 * rounding


@pytest.mark.parametrize("share", SHARES)
def test_the_closed_form_of_lru_is_what_lru_does(share: float) -> None:
    count, epochs = 20_000, 11
    sizes = np.full(count, 7)
    ids = shuffled_epochs(count, epochs)
    read = lru_bytes(ids, sizes, int(share * count) * 7)
    hits = 1 - (read - 7 * count) / (7 * count * (epochs - 1))
    assert hits == pytest.approx(lru_hit_ratio(share), abs=0.0015)


def test_lru_is_far_above_the_bound() -> None:
    sizes = np.full(1_000, 1)
    ids = shuffled_epochs(1_000, 5)
    assert lru_bytes(ids, sizes, 200) > 1.2 * epochs_bound(1_000, 200, 5) - 200
    assert lru_bytes(ids, sizes, 1_000) == epochs_bound(1_000, 1_000, 5)


def best_bytes(ids: tuple[int, ...], sizes: tuple[int, ...], capacity: int) -> int:
    """Try every way to keep single bytes: the exact minimum for divisible samples."""

    @cache
    def best(at: int, kept: tuple[int, ...]) -> int:
        if at == len(ids):
            return 0
        i = ids[at]
        full = (*kept[:i], sizes[i], *kept[i + 1 :])
        choices: set[tuple[int, ...]] = {()}
        for amount in full:
            choices = {(*c, k) for c in choices for k in range(amount + 1)}
        fits = [c for c in choices if sum(c) <= capacity]
        return sizes[i] - kept[i] + min(best(at + 1, c) for c in fits)

    return best(0, (0,) * len(sizes))


@given(
    sizes=st.lists(st.integers(1, 3), min_size=3, max_size=3),
    ids=st.lists(st.integers(0, 2), max_size=9),
    capacity=st.integers(0, 6),
)
def test_nothing_reads_less_than_belady(sizes: list[int], ids: list[int], capacity: int) -> None:
    assert belady_bytes(ids, sizes, capacity) == best_bytes(tuple(ids), tuple(sizes), capacity)


@given(
    sizes=st.lists(st.integers(1, 50), min_size=8, max_size=8),
    ids=st.lists(st.integers(0, 7), max_size=60),
    capacity=st.integers(0, 200),
    cuts=st.lists(st.integers(0, 60), max_size=4),
)
def test_bounds_stay_below_what_any_cache_reads(
    sizes: list[int], ids: list[int], capacity: int, cuts: list[int]
) -> None:
    least = belady_bytes(ids, sizes, capacity)
    assert least <= lru_bytes(ids, sizes, capacity)
    assert least <= static_bytes(ids, np.array(sizes), capacity)
    edges = [0, *sorted(min(c, len(ids)) for c in cuts), len(ids)]
    windows = [set(ids[a:b]) for a, b in pairwise(edges)]
    distinct = [sum(sizes[i] for i in w) for w in windows]
    assert windows_bound(distinct, capacity) <= least


def test_what_is_warm_need_not_be_read() -> None:
    assert epochs_bound(100, 60, 3, warm_bytes=60) == 40 * 3
    assert epochs_bound(100, 60, 3) == 100 + 40 * 2
    assert epochs_bound(100, 60, 0) == 0
    assert windows_bound([100, 100, 30], 60, warm_bytes=20) == 80 + 40 + 0
    with pytest.raises(OptionError, match="negative"):
        epochs_bound(100, -1, 3)
    with pytest.raises(OptionError, match="epochs"):
        epochs_bound(100, 1, -3)
    with pytest.raises(OptionError, match="share"):
        lru_hit_ratio(-0.1)
