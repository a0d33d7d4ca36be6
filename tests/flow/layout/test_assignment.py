"""Assignment: the global batch stays what it is, shares are kept, and as little moves as can be."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.flow.layout.assignment import assign_local

RANKS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), min_size=1, max_size=12)


def shares(taken: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    return np.split(taken, np.cumsum(sizes)[:-1])


def test_an_assignment_is_pinned() -> None:
    homes = np.array([2, 0, 0, 0, 0, 1, -1, -1, 2, 5, 0, 1])
    taken = assign_local(homes, np.array([0, 0, 1, 1, 2]), np.array([2, 1, 2, 2, 5]))
    assert taken.tolist() == [1, 2, 3, 5, 7, 9, 11, 0, 4, 6, 8, 10]


@given(ranks=RANKS, seed=st.integers(0, 999))
def test_every_sample_is_computed_once_and_nobody_moves_needlessly(
    ranks: list[tuple[int, int]], seed: int
) -> None:
    node_of_rank = np.array([node for node, _ in ranks])
    sizes = np.array([size for _, size in ranks])
    homes = np.random.default_rng(seed).integers(-1, 6, int(sizes.sum()))
    taken = assign_local(homes, node_of_rank, sizes)
    assert sorted(taken.tolist()) == list(range(len(homes)))
    at = np.repeat(node_of_rank, sizes)
    quota = np.bincount(node_of_rank, sizes, minlength=6)
    wanted = np.bincount(homes[homes >= 0], minlength=6)
    stayed = int((homes[taken] == at).sum())
    assert stayed == int(np.minimum(quota, wanted).sum()), "as many as there is room for at home"
    for node in range(6):
        mine = taken[at == node]
        in_order = [
            share for share, r in zip(shares(taken, sizes), ranks, strict=True) if r[0] == node
        ]
        assert np.array_equal(np.sort(mine), mine), "in the order of the batch"
        assert sum(map(len, in_order)) == quota[node]


def test_samples_without_a_home_go_to_the_emptiest() -> None:
    homes = np.array([0, 0, 0, 1, 1, 2, -1, -1, -1, -1, -1, -1])
    taken = assign_local(homes, np.arange(3), np.array([4, 4, 4]))
    got = [int((homes[share] < 0).sum()) for share in shares(taken, np.array([4, 4, 4]))]
    assert got == [1, 2, 3]


@pytest.mark.parametrize("num_nodes", [4, 8, 16])
@pytest.mark.parametrize("batch", [32, 64, 256])
def test_the_share_that_moves_is_the_one_foreseen(num_nodes: int, batch: int) -> None:
    rng = np.random.default_rng(num_nodes * batch)
    moved, steps = 0, 400
    ranks, sizes = np.arange(num_nodes), np.full(num_nodes, batch)
    for _ in range(steps):
        homes = rng.integers(0, num_nodes, num_nodes * batch)
        taken = assign_local(homes, ranks, sizes)
        moved += int((homes[taken] != np.repeat(ranks, sizes)).sum())
    expected = math.sqrt((1 - 1 / num_nodes) / (2 * math.pi * batch))
    assert moved / (steps * num_nodes * batch) == pytest.approx(expected, rel=0.1)
