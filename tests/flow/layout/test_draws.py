"""Draws: everybody gets the same, in proportion to weights, and losing one moves only its wins."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.flow.layout.draws import NOBODY, best_draws, costs_of, minus_log

KEYS = np.arange(4_000)
WEIGHTS = st.lists(st.integers(1, 1_000), min_size=2, max_size=7)


def names_of(weights: list[int]) -> list[str]:
    return [f"node-{i}" for i in range(len(weights))]


def winners(weights: list[int], keys: np.ndarray = KEYS) -> np.ndarray:
    return best_draws(keys, names_of(weights), weights, 1)[0]


def test_draws_are_pinned() -> None:
    assert winners([5, 5, 5], KEYS[:16]).tolist() == EVEN
    assert winners([1, 2, 9], KEYS[:16]).tolist() == UNEVEN
    bits = minus_log(np.array([0.1, 0.5, 0.999, 2.0**-53])).view(np.uint64).tolist()
    assert bits == LOG_BITS


EVEN = [2, 0, 1, 0, 0, 0, 1, 1, 1, 2, 2, 1, 0, 1, 1, 1]
UNEVEN = [2, 2, 1, 2, 2, 2, 2, 2, 1, 2, 2, 1, 2, 1, 2, 1]
LOG_BITS = [4612367379483402644, 4604418534313441775, 4562256816298761075, 4630367062351886330]


@given(st.floats(2.0**-54, 1 - 2.0**-53))
def test_the_logarithm_is_one(h: float) -> None:
    assert minus_log(np.array([h]))[0] == pytest.approx(-np.log(h), rel=5e-9, abs=1e-16)


@given(weights=WEIGHTS, num_best=st.integers(1, 5))
def test_the_best_are_those_with_the_smallest_costs(weights: list[int], num_best: int) -> None:
    names = names_of(weights)
    costs = np.stack([costs_of(KEYS, n, w) for n, w in zip(names, weights, strict=True)])
    best = best_draws(KEYS, names, weights, num_best)
    by_cost = np.argsort(costs, axis=0, kind="stable")[:num_best]
    assert np.array_equal(best[: len(weights)], by_cost)
    assert (best[len(weights) :] == NOBODY).all()


@given(weights=WEIGHTS, lost=st.integers(0, 6))
def test_losing_a_node_moves_only_its_share(weights: list[int], lost: int) -> None:
    gone = lost % len(weights)
    rest = [0 if n == gone else w for n, w in enumerate(weights)]
    before, after = winners(weights), winners(rest)
    assert (before[before != after] == gone).all()


@given(weights=WEIGHTS)
def test_nodes_win_in_proportion_to_their_weights(weights: list[int]) -> None:
    counts = np.bincount(winners(weights), minlength=len(weights))
    p = np.array(weights) / sum(weights)
    z = (counts - p * len(KEYS)) / np.sqrt(p * (1 - p) * len(KEYS))
    assert abs(z).max() < 5


@given(weights=WEIGHTS, seed=st.integers(0, 9))
def test_the_order_of_names_does_not_matter(weights: list[int], seed: int) -> None:
    names = names_of(weights)
    shuffled = np.random.default_rng(seed).permutation(len(weights))
    there = best_draws(KEYS[:500], [names[i] for i in shuffled], [weights[i] for i in shuffled], 2)
    assert np.array_equal(shuffled[there], best_draws(KEYS[:500], names, weights, 2))


def test_without_weights_nobody_draws() -> None:
    assert (best_draws(KEYS[:3], ["a", "b"], [0, 0], 2) == NOBODY).all()
    assert (best_draws(KEYS[:3], [], [], 2) == NOBODY).all()
