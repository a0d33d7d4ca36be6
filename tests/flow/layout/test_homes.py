"""Homes: everybody agrees, capacities are kept, and losing a node moves only what it had."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.errors import OptionError
from penstock.flow.layout.homes import HOLDERS_MAX, NOBODY, HomeNode, Homes, cluster_homes
from penstock.flow.layout.spans import Spans

LENGTHS = st.lists(st.integers(0, 900), min_size=1, max_size=200)
CAPACITIES = st.lists(st.integers(0, 60_000), min_size=1, max_size=7)


def homes_of(lengths: list[int] | np.ndarray, capacities: list[int]) -> Homes:
    nodes = [HomeNode(name=f"node-{i}", capacity_bytes=c) for i, c in enumerate(capacities)]
    spans = Spans(span_bytes=1024, lengths=np.asarray(lengths, np.int64))
    return cluster_homes(spans, nodes)


def even(num_spans: int, num_nodes: int, times: float) -> Homes:
    """Spans of a thousand bytes on nodes that together hold so many times all of them."""
    return homes_of(
        np.full(num_spans, 1_000), [int(1_000 * num_spans * times / num_nodes)] * num_nodes
    )


def held_bytes(homes: Homes) -> list[int]:
    """Return what each node keeps, by row."""
    rows = [homes.holders == n for n in range(len(homes.nodes))]
    return [int((row * homes.spans.lengths).sum()) for row in rows]


def check(homes: Homes) -> None:
    """No node keeps more than it can, nor a span twice, and holders stand in the first rows."""
    kept = [int(homes.spans.lengths[homes.holds(n)].sum()) for n in range(len(homes.nodes))]
    assert all(k <= n.capacity_bytes for k, n in zip(kept, homes.nodes, strict=True))
    assert all(h <= k for h, k in zip(held_bytes(homes), kept, strict=True))
    some = np.sort(homes.holders, axis=0)
    assert not ((some[1:] == some[:-1]) & (some[1:] != NOBODY)).any()
    assert not ((homes.holders[:-1] == NOBODY) & (homes.holders[1:] != NOBODY)).any()


def test_homes_are_pinned() -> None:
    homes = homes_of([400, 300, 500, 0, 200, 600, 100, 300], [900, 1_500, 2_000])
    assert homes.holders.tolist() == PINNED
    assert homes.without([2]).holders.tolist() == WITHOUT
    assert homes.home_of(np.array([0, 1023, 1024, 7 * 1024 + 5])).tolist() == [
        PINNED[0][n] for n in (0, 0, 1, 7)
    ]


PINNED = [[2, 0, 1, 1, 1, 0, 2, 1], [-1, 2, 2, 2, 2, -1, -1, -1]]
WITHOUT = [[1, 0, 1, 1, 1, 0, 1, 1], [-1] * 8]


def test_thousands_of_homes_are_pinned() -> None:
    lengths = 900 + np.arange(5_000) * 7_919 % 400
    homes = homes_of(lengths, [600_000, 900_000, 1_400_000, 5_000_000, 3_000_000, 2_500_000])
    later = homes.without([0, 4])
    found = [xxhash.xxh3_64_intdigest(h.holders.astype("<i8").tobytes()) for h in (homes, later)]
    assert found == [2019345831417600962, 14893839353947373299]


@given(lengths=LENGTHS, capacities=CAPACITIES, lost=st.sets(st.integers(0, 6)))
@example(lengths=[1, 1], capacities=[1, 1, 1], lost={0})
@example(lengths=[900] * 100, capacities=[60_000] * 7, lost={0, 1, 2, 3, 4})
def test_no_node_keeps_more_than_it_can(
    lengths: list[int], capacities: list[int], lost: set[int]
) -> None:
    homes = homes_of(lengths, capacities)
    check(homes)
    check(homes.without({n % len(capacities) for n in lost}))
    ends = np.cumsum(lengths)
    placed = homes.holders[0] != NOBODY
    assert (ends[placed] <= sum(capacities)).all(), "the first bytes of the layout only"
    # What stays without a home is less than a span for each node, and those past the capacity.
    placeable = int(homes.spans.lengths[ends <= sum(capacities)].sum())
    assert int(homes.spans.lengths[placed].sum()) >= placeable - 900 * len(capacities)


@given(lengths=LENGTHS, capacities=CAPACITIES, lost=st.sets(st.integers(0, 6), max_size=4))
def test_only_spans_of_lost_nodes_move(
    lengths: list[int], capacities: list[int], lost: set[int]
) -> None:
    gone = {n % len(capacities) for n in lost}
    before = homes_of(lengths, capacities)
    after = before.without(gone)
    home = before.holders[0]
    moved = home != after.holders[0]
    assert np.isin(home[moved], list(gone)).all()
    assert not np.isin(after.holders, list(gone)).any()
    assert not any(after.holds(n).any() for n in gone)
    for row in before.holders[1:]:
        living = ~np.isin(row, [NOBODY, *gone])
        promoted = moved & living
        assert (after.holders[0][promoted] != NOBODY).all(), "a copy takes the place of its home"


@given(lengths=LENGTHS, capacities=CAPACITIES, seed=st.integers(0, 99))
def test_all_who_know_the_same_agree(lengths: list[int], capacities: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    homes = homes_of(lengths, capacities)
    there = rng.permutation(len(capacities))
    shuffled = cluster_homes(homes.spans, [homes.nodes[i] for i in there])
    back = np.append(there, NOBODY)
    assert np.array_equal(back[shuffled.holders], homes.holders), "whatever the order of nodes"
    lost = rng.permutation(len(capacities))[:3].tolist()
    together, one_by_one = homes.without(lost), homes
    for n in lost:
        one_by_one = one_by_one.without([n])
    assert np.array_equal(together.holders, one_by_one.holders), "whatever the order of losses"


@given(times=st.sampled_from([0.4, 1.0, 1.5, 3.0, 9.0]), num_nodes=st.integers(2, 9))
def test_room_is_used_for_one_more_copy_of_everything_after_the_other(
    times: float, num_nodes: int
) -> None:
    homes = even(2_000, num_nodes, times)
    counts = (homes.holders != NOBODY).sum(axis=1) / 2_000
    # Where a node cannot hold everything it leaves room for what it takes over from a lost one.
    reserve = 1 / (num_nodes - 1) if num_nodes > 2 and times < num_nodes else 0
    used = max(min(times, 1.0), times - reserve)
    rows = min(used, HOLDERS_MAX, num_nodes)
    assert counts.sum() == pytest.approx(rows, abs=0.05)
    assert (counts[:-1] >= counts[1:]).all()
    whole = int(rows + 0.02)
    assert (counts[:whole] > 0.98).all()
    share = min(1.0, used / num_nodes)
    assert [homes.holds(n).mean() for n in range(num_nodes)] == pytest.approx(
        [share] * num_nodes, abs=0.05
    )


def test_where_each_node_can_hold_everything_every_node_does() -> None:
    for num_nodes in (1, 2, HOLDERS_MAX + 3):
        homes = homes_of([500] * 100, [50_000 + n for n in range(num_nodes)])
        assert all(homes.holds(n).all() for n in range(num_nodes))
        assert all(homes.without([0]).holds(n).all() for n in range(1, num_nodes))


def test_capacities_beyond_the_set_weigh_nothing() -> None:
    homes = homes_of([500] * 4_000, [2_000_000, 2_000_000_000])
    shares = np.bincount(homes.holders[0]) / 4_000
    assert shares == pytest.approx([0.5, 0.5], abs=0.04)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=6))
def test_homes_are_in_proportion_to_capacity(parts: list[int]) -> None:
    homes = homes_of(np.full(4_000, 10), [part * 40_000 for part in parts])
    weights = np.minimum(np.array(parts) * 40_000, 40_000)
    p = weights / weights.sum()
    z = (np.bincount(homes.holders[0], minlength=len(parts)) - p * 4_000) / np.sqrt(p * 4_000)
    assert abs(z).max() < 5


@pytest.mark.parametrize("times", [0.5, 1.0, 1.3])
def test_adding_a_node_moves_little_more_than_its_share(times: float) -> None:
    capacity = int(1_000 * 20_000 * times / 8)
    nine, eight = homes_of(np.full(20_000, 1_000), [capacity] * 9), even(20_000, 8, times)
    both = (nine.holders[0] != NOBODY) & (eight.holders[0] != NOBODY)
    moved = (nine.holders[0] != eight.holders[0])[both].mean()
    to_ninth = (nine.holders[0] == 8)[both].mean()
    assert to_ninth == pytest.approx(1 / 9, abs=0.01)
    # What full nodes spill is the square root of what they hold.
    assert moved < to_ninth + (0.04 if times <= 1 else 0.01)


def test_losing_a_node_that_had_copies_costs_no_home() -> None:
    homes = even(8_000, 4, 2.1)
    after = homes.without([1])
    assert (after.holders[0] != NOBODY).all()
    assert np.array_equal(after.holders[0] != homes.holders[0], homes.holders[0] == 1)


def test_what_has_no_other_holder_takes_the_room_of_copies() -> None:
    homes = even(8_000, 4, 1.2)  # After a loss the others hold 0.9 of it.
    after = homes.without([1])
    check(after)
    assert (after.holders[0] != NOBODY).mean() == pytest.approx(0.9, abs=0.01)
    assert (after.holders[1:] != NOBODY).sum() < 80


def test_nonsense_is_refused() -> None:
    with pytest.raises(OptionError, match="-1 bytes"):
        HomeNode(name="a", capacity_bytes=-1)
    spans = Spans(span_bytes=1024, lengths=np.array([1, 2]))
    with pytest.raises(OptionError, match="different names"):
        cluster_homes(spans, [HomeNode(name="a", capacity_bytes=1)] * 2)
    assert (homes_of([1, 2], [0, 0]).holders == NOBODY).all()
    assert (homes_of([1, 2], []).holders == NOBODY).all()
    assert (homes_of([1, 2], [9, 9]).without([0, 1]).holders == NOBODY).all()
