"""The keyed permutation is one to one, can be undone, and is the same for ever."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import OptionError
from penstock.order import Permutation, key_of

keys = st.integers(0, 2**64 - 1)


def test_every_size_up_to_2000_is_permuted_one_to_one_and_back() -> None:
    for size in range(1, 2001):
        values = np.arange(size)
        permutation = Permutation(size=size, key=key_of(size, "test"))
        image = permutation.forward(values)
        assert np.array_equal(np.sort(image), values), size
        assert np.array_equal(permutation.inverse(image), values), size


@given(size=st.integers(2001, 300_000), key=keys)
def test_sizes_of_several_chunks_are_permuted_one_to_one(size: int, key: int) -> None:
    image = Permutation(size=size, key=key).forward(np.arange(size))
    assert np.array_equal(np.sort(image), np.arange(size))


@given(data=st.data(), size=st.integers(1, 2**63), key=keys)
def test_huge_sizes_stay_in_range_and_go_both_ways(
    data: st.DataObject, size: int, key: int
) -> None:
    places = st.lists(st.integers(0, size - 1), min_size=1, max_size=50)
    values = np.array(data.draw(places), dtype=np.uint64)
    permutation = Permutation(size=size, key=key)
    image = permutation.forward(values)
    assert int(image.max()) < size
    assert np.array_equal(permutation.inverse(image), values)
    assert np.array_equal(permutation.forward(permutation.inverse(values)), values)


@given(size=st.integers(1, 500), key=keys, num_members=st.integers(1, 20))
def test_each_member_of_a_family_is_a_permutation(size: int, key: int, num_members: int) -> None:
    family = Permutation(size=size, key=key)
    members = np.repeat(np.arange(num_members), size)
    values = np.tile(np.arange(size), num_members)
    image = family.forward(values, members)
    assert np.array_equal(np.sort(image.reshape(num_members, size)), values.reshape(-1, size))
    assert np.array_equal(family.inverse(image, members), values)


def test_what_a_value_maps_to_does_not_depend_on_the_values_beside_it() -> None:
    permutation = Permutation(size=100_000, key=5)
    whole = permutation.forward(np.arange(100_000))
    assert np.array_equal(permutation.forward(np.arange(70_001, 70_011)), whole[70_001:70_011])
    assert permutation.forward([42]).tolist() == [int(whole[42])]
    assert len(permutation.forward(np.array([], dtype=np.int64))) == 0


def test_permutations_are_pinned_by_value() -> None:
    assert Permutation(size=12, key=7).forward(np.arange(12)).tolist() == [
        10,
        3,
        11,
        8,
        7,
        2,
        0,
        5,
        4,
        1,
        6,
        9,
    ]
    assert Permutation(size=1000, key=7).forward(np.arange(8)).tolist() == [
        276,
        811,
        400,
        902,
        896,
        434,
        918,
        216,
    ]
    assert Permutation(size=10**9, key=7).forward(np.arange(5)).tolist() == [
        806165911,
        273571425,
        60402636,
        346234929,
        606017530,
    ]
    assert Permutation(size=2**63, key=7).forward(np.arange(3)).tolist() == [
        4048928807884032792,
        5534341167879828726,
        1007355720201396788,
    ]
    assert Permutation(size=9, key=7).forward(np.arange(9), [5] * 9).tolist() == [
        3,
        0,
        8,
        7,
        6,
        2,
        4,
        5,
        1,
    ]


def test_keys_are_pinned_by_value() -> None:
    assert key_of(0) == 14374147212387527897
    assert key_of(7, "global", 0) == 6314289686679172912
    assert key_of(2**64 - 1, "window", 3, 12) == 16146205571762721479


def test_parts_of_a_key_cannot_run_into_each_other() -> None:
    alike = [("a", "b"), ("ab",), ("a", "", "b"), ("ab", ""), (1, "a"), ("a", 1), (1, 1), (11,)]
    assert len({key_of(7, *parts) for parts in alike}) == len(alike)


def test_threads_share_a_permutation() -> None:
    permutation = Permutation(size=200_003, key=3)
    with ThreadPoolExecutor(4) as pool:
        images = list(pool.map(lambda _: permutation.forward(np.arange(200_003)), range(8)))
    assert all(np.array_equal(image, images[0]) for image in images)


def test_a_permutation_survives_pickling() -> None:
    permutation = Permutation(size=10, key=3)
    assert pickle.loads(pickle.dumps(permutation)) == permutation


@pytest.mark.parametrize("values", [[10], [-1], [3, 2**62]])
def test_a_value_outside_the_range_is_refused(values: list[int]) -> None:
    with pytest.raises(OptionError, match="permutation of 10 values"):
        Permutation(size=10, key=3).forward(values)


@pytest.mark.parametrize(("size", "key"), [(0, 1), (2**63 + 1, 1), (5, -1), (5, 2**64)])
def test_sizes_and_keys_that_do_not_fit_are_refused(size: int, key: int) -> None:
    with pytest.raises(OptionError, match="got"):
        Permutation(size=size, key=key)


def test_a_seed_that_does_not_fit_is_refused() -> None:
    with pytest.raises(OptionError, match="seed"):
        key_of(-1)
