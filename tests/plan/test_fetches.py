"""Fetches: every use is served in time, every unit is fetched once, by its home."""

from __future__ import annotations

import tracemalloc
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.dataset.dataset import Dataset
from penstock.dataset.part import Ints, Rows, make_part
from penstock.errors import OptionError
from penstock.order import GlobalOrder, Order, SequentialOrder
from penstock.plan import fetches as fetches_module
from penstock.plan.fetches import Demand, Fetches, Fetching, uses
from penstock.plan.homes import NOBODY, Node, cluster_homes
from penstock.plan.placement import layout_of
from penstock.plan.spans import spans_of
from penstock.plan.units import Units
from penstock.storage.base import ObjectInfo
from penstock.storage.memory import MemoryStore
from penstock.world import World

Sets = dict[str, penstock.Dataset]
NAMES = ["small_tar", "mixed_tar", "two_tables", "parquet", "files", "several_parts"]


def demand_of(dataset: penstock.Dataset, world: World, size: int, drop_last: bool) -> Demand:
    order = GlobalOrder(num_samples=len(dataset), seed=3)
    return Demand(
        dataset=dataset, order=order, world=world, global_batch_size=size, drop_last=drop_last
    )


@settings(max_examples=40)
@given(
    num_samples=st.integers(5, 60),
    size=st.integers(4, 80),
    ranks=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    position=st.integers(0, 59),
    at_once=st.sampled_from([1, 20, 1 << 16]),
)
def test_uses_are_what_the_steps_of_all_ranks_say(
    num_samples: int, size: int, ranks: tuple[int, int], position: int, at_once: int
) -> None:
    order = GlobalOrder(num_samples=num_samples, seed=1)
    position = min(position, num_samples - 1)
    num_ranks, num_nodes = max(ranks), min(ranks)
    expected: dict[int, list[list[int]]] = {node: [] for node in range(num_nodes)}
    for epoch in (2, 3):
        start = position if epoch == 2 else 0
        steps = penstock.order.Steps(
            num_samples=num_samples, global_batch_size=size, num_ranks=num_ranks, start=start
        )
        whole = order.ids(epoch, 0, num_samples)
        for step in range(steps.num_steps):
            for row in expected.values():
                row.append([])
            for rank in range(num_ranks):
                places, _ = steps.positions(step, rank)
                ids = whole[places].tolist()
                expected[World(rank=rank, num_ranks=num_ranks, num_nodes=num_nodes).node][-1] += ids
    dataset = Dataset(store=MemoryStore("none"), parts=[])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetches_module, "_POSITIONS_AT_ONCE", at_once)
        for node, rows in expected.items():
            rank = next(r for r in range(num_ranks) if r * num_nodes // num_ranks == node)
            world = World(rank=rank, num_ranks=num_ranks, num_nodes=num_nodes)
            demand = Demand(dataset=dataset, order=order, world=world, global_batch_size=size)
            found = list(uses(demand, epoch=2, position=position, end_epoch=4))
            used = np.concatenate([u.ids[u.is_mine] for u in found])
            at = np.concatenate([u.steps[u.is_mine] for u in found])
            assert [used[at == s].tolist() for s in range(len(rows))] == rows


def fetches_of(
    demand: Demand, units: Units, homes: Ints, *, present: Ints | None = None, gap: int = 5_000
) -> list[Fetches]:
    flags = np.zeros(units.num_units, bool)
    if present is not None:
        flags[present] = True
    fetching = Fetching(demand, units, homes, present=flags, gap_bytes=gap)
    return list(fetching.ahead(end_epoch=2))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_nodes", [1, 3])
@pytest.mark.parametrize("share", [0.0, 0.4, 2.0])
def test_every_use_is_served_by_its_step(
    datasets: Sets, monkeypatch: pytest.MonkeyPatch, name: str, num_nodes: int, share: float
) -> None:
    monkeypatch.setattr(fetches_module, "_POSITIONS_AT_ONCE", 40)
    dataset = datasets[name][::-1]
    units = Units.of(dataset)
    capacity = int(units.size_bytes * share / num_nodes)
    nodes = [Node(name=f"n{i}", capacity_bytes=capacity) for i in range(num_nodes)]
    layout = layout_of(units)
    homes = cluster_homes(spans_of(layout), nodes).home_of(layout.offsets)
    filled: dict[int, int] = {}
    for node in range(num_nodes):
        world = World(rank=node, num_ranks=num_nodes, num_nodes=num_nodes)
        demand = demand_of(dataset, world, 12, drop_last=False)
        found = fetches_of(demand, units, homes)
        for fetches in found:
            rows = zip(fetches.fills.units.tolist(), fetches.fills.steps.tolist(), strict=True)
            for unit, step in rows:
                assert homes[unit] == node
                assert unit not in filled, "once, by its home, whoever uses it"
                filled[unit] = step
        _check_served(demand, units, homes, found)
    for use in uses(demand_of(dataset, World(), 12, drop_last=False), end_epoch=2):
        for number, table, local, where in _by_table(dataset, use.ids):
            found_units, _ = units.locate(number, table, local)
            for unit, step in zip(found_units.tolist(), use.steps[where].tolist(), strict=True):
                assert homes[unit] == NOBODY or filled[unit] <= step
    assert set(filled) == set(np.flatnonzero(homes != NOBODY).tolist())


def _by_table(dataset: penstock.Dataset, ids: Ints) -> list[tuple[int, int, Ints, Ints]]:
    numbers = {id(b): n for n, b in enumerate(dataset.bound)}
    return [
        (numbers[id(bound)], table, local, where)
        for bound, where, local in dataset.groups(ids)
        for table in range(len(bound.part.tables))
    ]


def _check_served(demand: Demand, units: Units, homes: Ints, found: list[Fetches]) -> None:
    """Every sample of this node that has no home here is read or asked for, by its step."""
    dataset, node = demand.dataset, demand.world.node
    assert isinstance(dataset, Dataset)
    for use, fetches in zip(uses(demand, end_epoch=2), found, strict=True):
        assert fetches.last_step == use.steps[-1]
        reads, asks = fetches.reads, fetches.asks
        assert (np.diff(reads.steps) >= 0).all()
        asked = set(zip(asks.units.tolist(), asks.inside.tolist(), asks.steps.tolist()))  # noqa: B905
        num_asked = 0
        for number, table, local, where in _by_table(dataset, use.ids):
            mine = use.is_mine[where]
            found_units, inside = units.locate(number, table, local)
            extents = dataset.bound[number].part.tables[table].extents(local)
            for j in np.flatnonzero(mine).tolist():
                step, home = int(use.steps[where[j]]), homes[found_units[j]]
                if home == NOBODY:
                    holds = (
                        (reads.bound_numbers == number)
                        & (reads.tables == table)
                        & (reads.objects == extents.object[j])
                        & (reads.offsets <= extents.offset[j])
                        & (extents.offset[j] + extents.length[j] <= reads.offsets + reads.lengths)
                        & (reads.steps <= step)
                    )
                    assert holds.any()
                elif home != node:
                    assert (int(found_units[j]), int(inside[j]), step) in asked
                    num_asked += 1
        assert num_asked == len(asks.units)


def test_what_is_present_is_not_fetched_again(datasets: Sets) -> None:
    dataset = datasets["mixed_tar"]
    units = Units.of(dataset)
    here = np.zeros(units.num_units, np.int64)
    demand = demand_of(dataset, World(), 8, drop_last=True)
    present = np.arange(0, units.num_units, 2)
    found = fetches_of(demand, units, here, present=present)
    filled = np.concatenate([f.fills.units for f in found])
    assert sorted(filled.tolist()) == list(range(1, units.num_units, 2))
    assert all(len(f.reads.steps) == len(f.asks.steps) == 0 for f in found)


def test_near_ranges_are_read_together_up_to_the_gap(datasets: Sets) -> None:
    dataset = datasets["small_tar"]
    units = Units.of(dataset)
    nowhere = np.full(units.num_units, NOBODY)
    order: Order = SequentialOrder(num_samples=len(dataset))
    demand = Demand(dataset=dataset, order=order, world=World(), global_batch_size=60)
    wide, narrow = (fetches_of(demand, units, nowhere, gap=gap)[0].reads for gap in (10_000, 0))
    assert len(wide.steps) == 3, "one range for each shard"
    assert len(narrow.steps) > 100
    assert wide.lengths.sum() > narrow.lengths.sum()
    assert wide.steps.tolist() == [0, 1, 2]


def test_homes_must_be_those_of_the_units(datasets: Sets) -> None:
    dataset = datasets["small_tar"]
    units = Units.of(dataset)
    with pytest.raises(OptionError, match="homes"):
        fetches_of(demand_of(dataset, World(), 8, drop_last=True), units, np.zeros(3, np.int64))


def test_a_billion_samples_are_looked_through_piece_by_piece() -> None:
    count = 1_000_000_000
    rows = Rows(
        objects=[ObjectInfo(key="x.npy", size_bytes=count * 512)],
        counts=[count],
        addressing="even",
        columns={k: np.array([v]) for k, v in (("base", 0), ("stride", 512), ("width", 512))},
    )
    part = make_part(format="npy", fields=(), tables=[rows])
    dataset = Dataset(store=MemoryStore("none"), parts=[part])
    order = GlobalOrder(num_samples=count, seed=1)
    demand = Demand(dataset=dataset, order=order, world=World(), global_batch_size=4_096)
    units = Units.of(dataset)
    homes = np.zeros(units.num_units, np.int8)
    homes[units.num_units // 2 :] = NOBODY
    present = np.zeros(units.num_units, bool)
    tracemalloc.start()
    fetching = Fetching(demand, units, homes, present=present, gap_bytes=0)
    found = list(islice(fetching.ahead(epoch=7, position=count - 70_000), 4))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 300e6
    assert found[-1].last_step > 70_000 // 4_096 + 1, "across the end of the epoch"
    num_fetches = sum(len(f.fills.units) + len(f.reads.steps) for f in found)
    assert num_fetches > 200_000
