"""Homes: everybody agrees, capacities are kept, and losing a node moves only what it had."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import OptionError
from penstock.plan.homes import NOBODY, Node, best_nodes, homes_of, minus_log
from penstock.plan.placement import Layout, offsets_of

UNITS = np.arange(4_000)
CAPACITIES = st.lists(st.integers(1, 1_000), min_size=2, max_size=7)


def nodes_of(capacities: list[int]) -> list[Node]:
    return [Node(name=f"node-{i}", capacity_bytes=c) for i, c in enumerate(capacities)]


def layout_of_sizes(lengths: list[int] | np.ndarray) -> Layout:
    array = np.asarray(lengths, np.int64)
    return Layout(offsets=offsets_of(array), lengths=array, size_bytes=int(array.sum()))


def test_homes_are_pinned() -> None:
    even = best_nodes(UNITS[:16], nodes_of([5, 5, 5]))
    uneven = best_nodes(UNITS[:16], nodes_of([1, 2, 9]))
    assert even.tolist() == EVEN
    assert uneven.tolist() == UNEVEN
    bits = minus_log(np.array([0.1, 0.5, 0.999, 2.0**-53])).view(np.uint64).tolist()
    assert bits == LOG_BITS


EVEN = [2, 0, 1, 0, 0, 0, 1, 1, 1, 2, 2, 1, 0, 1, 1, 1]
UNEVEN = [2, 2, 1, 2, 2, 2, 2, 2, 1, 2, 2, 1, 2, 1, 2, 1]
LOG_BITS = [4612367379483402644, 4604418534313441775, 4562256816298761075, 4630367062351886330]


@given(st.floats(2.0**-54, 1 - 2.0**-53))
def test_the_logarithm_is_one(h: float) -> None:
    assert minus_log(np.array([h]))[0] == pytest.approx(-np.log(h), rel=5e-9, abs=1e-16)


@given(capacities=CAPACITIES, lost=st.integers(0, 6))
def test_losing_a_node_moves_only_its_share(capacities: list[int], lost: int) -> None:
    nodes = nodes_of(capacities)
    gone = nodes[lost % len(nodes)]
    rest = [n for n in nodes if n is not gone]
    before = [nodes[n] for n in best_nodes(UNITS, nodes).tolist()]
    after = [rest[n] for n in best_nodes(UNITS, rest).tolist()]
    moved = [b for b, a in zip(before, after, strict=True) if a is not b]
    assert all(b is gone for b in moved)


@given(capacities=CAPACITIES)
def test_nodes_win_in_proportion_to_their_capacity(capacities: list[int]) -> None:
    counts = np.bincount(best_nodes(UNITS, nodes_of(capacities)), minlength=len(capacities))
    p = np.array(capacities) / sum(capacities)
    z = (counts - p * len(UNITS)) / np.sqrt(p * (1 - p) * len(UNITS))
    assert abs(z).max() < 5


@given(capacities=CAPACITIES, seed=st.integers(0, 9))
def test_the_order_of_nodes_does_not_matter(capacities: list[int], seed: int) -> None:
    nodes = nodes_of(capacities)
    shuffled = np.random.default_rng(seed).permutation(len(nodes))
    there = [nodes[i] for i in shuffled]
    home = [nodes[n].name for n in best_nodes(UNITS[:500], nodes)]
    assert home == [there[n].name for n in best_nodes(UNITS[:500], there)]


@given(
    capacities=st.lists(st.integers(0, 60_000), min_size=1, max_size=5),
    sizes=st.lists(st.integers(0, 900), min_size=1, max_size=200),
)
def test_no_node_holds_more_than_it_can(capacities: list[int], sizes: list[int]) -> None:
    layout = layout_of_sizes(sizes)
    homes = homes_of(layout, nodes_of(capacities))
    held = [int(layout.lengths[homes == n].sum()) for n in range(len(capacities))]
    assert all(h <= c for h, c in zip(held, capacities, strict=True))
    ends = layout.offsets + layout.lengths
    assert (ends[homes != NOBODY] <= sum(capacities)).all(), "the first bytes of the layout only"
    # What stays without a home is less than a unit for each node, and those past the capacity.
    placeable = int(layout.lengths[ends <= sum(capacities)].sum())
    assert sum(held) >= placeable - 900 * len(capacities)


def test_a_cluster_holds_what_its_nodes_hold_together() -> None:
    layout = layout_of_sizes(np.full(10_000, 1_000))
    nodes = nodes_of([1_000_000, 3_000_000, 2_000_000])
    homes = homes_of(layout, nodes)
    held = [int((homes == n).sum()) * 1_000 for n in range(3)]
    assert sum(held) == 6_000_000
    everything = homes_of(layout, nodes_of([10_000_000, 10_000_000]))
    assert (everything != NOBODY).all()


def test_losing_a_node_of_a_full_cluster_moves_little_more_than_its_share() -> None:
    layout = layout_of_sizes(np.full(20_000, 1_000))
    nodes = nodes_of([5_000_000] * 5)
    before = homes_of(layout, nodes)
    after = homes_of(layout, nodes[:4])
    stayed = (before == after)[(before != 4) & (before != NOBODY)]
    assert (before != NOBODY).all()
    assert stayed.mean() > 0.97, "what full nodes spill is the square root of what they hold"


def test_nonsense_is_refused() -> None:
    with pytest.raises(OptionError, match="-1 bytes"):
        Node(name="a", capacity_bytes=-1)
    with pytest.raises(OptionError, match="different names"):
        best_nodes(UNITS, [Node(name="a", capacity_bytes=1)] * 2)
    assert (homes_of(layout_of_sizes([1, 2]), nodes_of([0, 0])) == NOBODY).all()
    assert (homes_of(layout_of_sizes([1, 2]), []) == NOBODY).all()
