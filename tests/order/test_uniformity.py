"""Statistics cannot tell the keyed permutation from a uniform one.

All keys are fixed, so these are regression tests: a change that makes the network worse shows.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from penstock.order import Permutation, key_of

_NUM_MEMBERS = 200_000


def chi_square_z(counts: npt.NDArray[np.integer], expected: float, freedom: int) -> float:
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    return (chi_square - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7])
def test_every_list_of_a_few_values_is_equally_likely(size: int) -> None:
    members = np.repeat(np.arange(_NUM_MEMBERS), size)
    values = np.tile(np.arange(size), _NUM_MEMBERS)
    lists = Permutation(size=size, key=5).forward(values, members).reshape(-1, size)
    _, counts = np.unique(lists @ 8 ** np.arange(size, dtype=np.uint64), return_counts=True)
    num_lists = math.factorial(size)
    assert len(counts) == num_lists
    assert abs(chi_square_z(counts, _NUM_MEMBERS / num_lists, num_lists - 1)) < 4


@pytest.mark.parametrize("size", [12, 25, 64, 65, 100])
@pytest.mark.parametrize("distance", [1, 2, 8, 11])
def test_every_pair_of_images_is_equally_likely(size: int, distance: int) -> None:
    family = Permutation(size=size, key=9)
    members = np.arange(_NUM_MEMBERS)
    first = family.forward(np.zeros_like(members), members).view(np.int64)
    second = family.forward(np.full_like(members, distance), members).view(np.int64)
    pairs = np.bincount(first * size + second, minlength=size * size).reshape(size, size)
    assert not np.diagonal(pairs).any()
    counts = pairs[~np.eye(size, dtype=bool)]
    assert abs(chi_square_z(counts, _NUM_MEMBERS / len(counts), len(counts) - 1)) < 4


@pytest.mark.parametrize("size", [1000, 65_536, 300_007, 1_000_000])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_where_a_value_lands_does_not_depend_on_where_it_was(size: int, seed: int) -> None:
    image = Permutation(size=size, key=key_of(seed, "test")).forward(np.arange(size))
    cells = min(64, math.isqrt(size // 8))
    rows = np.arange(size) * cells // size
    for columns in (image.view(np.int64) * cells // size, image.view(np.int64) % cells):
        counts = np.bincount(rows * cells + columns)
        assert abs(chi_square_z(counts, size / cells**2, (cells - 1) ** 2)) < 4.5


@pytest.mark.parametrize("size", [65_536, 300_007, 1_000_000])
@pytest.mark.parametrize("lag", [1, 2, 7, 256, 1024])
def test_neighbours_land_any_distance_apart(size: int, lag: int) -> None:
    image = Permutation(size=size, key=key_of(4, "test")).forward(np.arange(size)).view(np.int64)
    gaps = (image[lag:] - image[:-lag]) % size
    counts = np.bincount(gaps * 64 // size, minlength=64)
    assert abs(chi_square_z(counts, len(gaps) / 64, 63)) < 4.5


def test_two_keys_agree_as_often_as_chance() -> None:
    size = 100_000
    images = [Permutation(size=size, key=key).forward(np.arange(size)) for key in range(20)]
    agreements = sum(
        int((first == second).sum()) for i, first in enumerate(images) for second in images[:i]
    )
    # 190 pairs that agree once each on average, as a Poisson number.
    assert abs(agreements - 190) < 4 * math.sqrt(190)
