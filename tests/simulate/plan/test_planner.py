"""Plans: bytes as counted by hand or by trying it, times as the busiest resource says."""

from __future__ import annotations

import tracemalloc
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.simulate.plan.sizes import summary_of_sizes

import penstock
from penstock.dataset.dataset import Dataset
from penstock.dataset.part import Rows, make_part
from penstock.errors import OptionError
from penstock.flow.layout.homes import NOBODY, HomeNode, cluster_homes
from penstock.flow.layout.placement import layout_of
from penstock.flow.layout.spans import spans_of
from penstock.flow.layout.units import Units
from penstock.machine import Curve, LinkModel, Machine, StoreModel, TierModel
from penstock.order import GlobalOrder
from penstock.simulate.plan.planner import RunPlan, make_plan
from penstock.simulate.plan.summary import Summary, summary_of
from penstock.simulate.plan.traffic import epoch_bytes, held_by, moved_share
from penstock.simulate.plan.what_if import blocks_first_gain_s, what_if
from penstock.simulate.plan.work import Work
from penstock.storage.base import ObjectInfo
from penstock.storage.memory import MemoryStore
from penstock.world import World

Sets = dict[str, penstock.Dataset]
SIZES = np.random.default_rng(5).integers(70_000, 150_000, 3_000)


def machine_of(memory: int = 0, disk: int = 0, **more: object) -> Machine:
    kinds = [("memory", memory, 8e9), ("disk", disk, 2e9)]
    tiers = tuple(
        TierModel(kind=kind, capacity_bytes=size, read=Curve.flat(rate), write=Curve.flat(rate))  # type: ignore[arg-type]
        for kind, size, rate in kinds
        if size
    )
    facts: dict[str, object] = {
        "store": StoreModel(
            latency_s=0.02,
            latency_p99_s=0.1,
            throughput=Curve(counts=(1, 20), bytes_s=(50e6, 1000e6)),
        ),
        "link": LinkModel(bytes_s=1.25e9),
        "cores": 8,
    }
    return Machine(tiers=tiers, **(facts | more))  # type: ignore[arg-type]


def plan_of(summary: Summary, machine: Machine, **work: object) -> RunPlan:
    facts: dict[str, object] = {"batch_size": 32, "num_epochs": 3}
    return make_plan(summary, Work(**(facts | work)), machine)  # type: ignore[arg-type]


def nodes(count: int, ranks: int = 1) -> World:
    return World(num_ranks=count * ranks, num_nodes=count)


@given(share=st.floats(0, 1.5), epochs=st.integers(1, 5), in_memory=st.floats(0, 1))
def test_on_one_node_the_plan_reads_the_bound(share: float, epochs: int, in_memory: float) -> None:
    summary = summary_of_sizes(SIZES)
    room = int(summary.size_bytes * share)
    memory = int(room * in_memory)
    plan = plan_of(summary, machine_of(memory, room - memory), num_epochs=epochs)
    assert plan.store_bytes == pytest.approx(plan.bound_bytes)
    later = plan.later
    served = later.of("memory").size_bytes + later.of("disk").size_bytes
    assert served + later.of("store").size_bytes == pytest.approx(summary.size_bytes)
    assert later.of("memory").size_bytes == pytest.approx(min(memory, summary.size_bytes))


@pytest.mark.parametrize(
    "name", ["small_tar", "mixed_tar", "two_tables", "parquet", "files", "several_parts"]
)
@pytest.mark.parametrize("view", ["whole", "slice", "strided"])
def test_a_summary_is_the_sum_of_the_units(datasets: Sets, name: str, view: str) -> None:
    dataset = datasets[name]
    dataset = {"whole": dataset, "slice": dataset[3:-3], "strided": dataset[::2]}[view]
    units, summary = Units.of(dataset), summary_of(dataset)
    assert (summary.num_units, summary.size_bytes) == (units.num_units, units.size_bytes)
    assert summary.num_samples == len(dataset)
    assert summary.num_reads == len(dataset) * (2 if name == "two_tables" else 1)
    assert summary.num_blocks == (units.num_units if name == "parquet" else 0)
    if name not in ("two_tables",):  # Where units of an object are taken as of one size.
        classes = [int(n).bit_length() for n in units.lengths]
        assert summary.class_counts == tuple(np.bincount(classes, minlength=64).tolist())
    half = summary.size_bytes / 2
    in_order = units.lengths[np.argsort(layout_of(units).offsets, kind="stable")]
    counted = int((np.cumsum(in_order) <= half).sum())
    assert summary.units_in(half) == pytest.approx(counted, abs=1 + 0.1 * units.num_units)
    assert summary.units_in(summary.size_bytes + 1) == units.num_units


@pytest.mark.parametrize("name", ["small_tar", "mixed_tar", "parquet"])
@pytest.mark.parametrize("num_nodes", [1, 3])
def test_fills_are_those_that_are_fetched(datasets: Sets, name: str, num_nodes: int) -> None:
    dataset = datasets[name]
    units, summary = Units.of(dataset), summary_of(dataset)
    room = int(summary.size_bytes * 0.6 / num_nodes)
    layout = layout_of(units)
    several = [HomeNode(name=str(n), capacity_bytes=room) for n in range(num_nodes)]
    homes = cluster_homes(spans_of(layout), several).home_of(layout.offsets)
    ids = GlobalOrder(num_samples=len(dataset), seed=2).ids(0, 0, len(dataset))
    ids = ids[: len(ids) // num_nodes * num_nodes]
    used_by = np.arange(len(ids)) % num_nodes
    (bound,) = dataset.bound
    used = units.locate(0, 0, ids - bound.first)[0]
    filled = int(units.lengths[np.unique(used[homes[used] != NOBODY])].sum())
    asked = int(((homes[used] != NOBODY) & (homes[used] != used_by)).sum())
    work = Work(world=nodes(num_nodes), batch_size=1, peers="fixed")
    held = held_by(machine_of(disk=room).tiers, summary, work)
    moved = epoch_bytes(summary, work, held, 0)
    largest = int(spans_of(layout).lengths.max())
    assert filled == pytest.approx(moved.filled_bytes, abs=(num_nodes + 1) * largest)
    expected = (np.isin(homes, range(num_nodes)).mean()) * (1 - 1 / num_nodes)
    assert asked / len(dataset) == pytest.approx(expected, abs=0.25)


@pytest.mark.parametrize("samples", [1, 8])
def test_nodes_on_their_own_fetch_what_their_ranks_happen_to_use(samples: int) -> None:
    num_nodes, count, share = 4, 8_000, 0.5
    summary = Summary(
        num_samples=count,
        num_reads=count,
        class_counts=(count // samples,),
        class_bytes=(count * 1_000,),
    )
    work = Work(world=nodes(num_nodes), batch_size=1, num_epochs=4)
    held = held_by(machine_of(disk=int(share * count * 1_000)).tiers, summary, work)
    order = GlobalOrder(num_samples=count, seed=1)
    seen: list[set[int]] = [set() for _ in range(num_nodes)]
    for epoch in range(4):
        read = 0
        for node in range(num_nodes):
            ids = order.ids(epoch, 0, count)[node::num_nodes]
            placed = {u for u in (ids // samples).tolist() if u < share * count / samples}
            fresh = placed - seen[node]
            seen[node] |= fresh
            read += len(fresh) * samples * 1_000 + int((ids >= share * count).sum()) * 1_000
        planned = epoch_bytes(summary, work, held, epoch).store.size_bytes
        assert planned == pytest.approx(read, rel=0.04)


@pytest.mark.parametrize("num_epochs", [1, 2, 90, 5_000])
def test_epochs_that_stand_for_others_add_up_to_all(num_epochs: int) -> None:
    summary = summary_of_sizes(SIZES)
    machine = machine_of(disk=summary.size_bytes // 2)
    plan = plan_of(summary, machine, world=nodes(16), num_epochs=num_epochs)
    every = [plan.epoch(e) for e in range(num_epochs)]
    assert sum(count for _, count in plan.epochs()) == num_epochs
    assert plan.store_bytes == pytest.approx(
        sum(e.of("store").size_bytes for e in every), rel=0.001
    )
    assert plan.total_s == pytest.approx(sum(e.seconds for e in every), rel=0.001)
    assert len(list(plan.epochs())) < 150


def test_blocks_that_do_not_stay_are_read_again() -> None:
    num_blocks, samples = 200, 20
    summary = Summary(
        num_samples=num_blocks * samples,
        num_reads=num_blocks * samples,
        class_counts=(num_blocks,),
        class_bytes=(num_blocks * 1_000_000,),
        num_blocks=num_blocks,
    )
    for stage_blocks in (1, 50, 150, 200):
        work = Work(stage_bytes=stage_blocks * 1_000_000)
        moved = epoch_bytes(summary, work, held_by((), summary, work), 0)
        ids = GlobalOrder(num_samples=summary.num_samples, seed=3).ids(0, 0, summary.num_samples)
        stage: OrderedDict[int, None] = OrderedDict()
        read = 0
        for block in (ids // samples).tolist():
            if block in stage:
                stage.move_to_end(block)
                continue
            read += 1
            stage[block] = None
            if len(stage) > stage_blocks:
                stage.popitem(last=False)
        assert moved.store.num_requests == pytest.approx(read, rel=0.05, abs=1)
        assert moved.store.size_bytes == pytest.approx(read * 1e6, rel=0.05)
    by_block = Work(shuffle="blocks")
    moved = epoch_bytes(summary, by_block, held_by((), summary, by_block), 0)
    assert moved.store.size_bytes == summary.size_bytes


def test_peers_move_what_the_formula_says() -> None:
    summary = summary_of_sizes(SIZES)
    machine = machine_of(disk=-(-summary.size_bytes // 4))
    fixed = plan_of(summary, machine, world=nodes(4, 2), peers="fixed")
    assert fixed.later.of("peers").size_bytes == pytest.approx(summary.size_bytes * 3 / 4)
    assert fixed.store_bytes == summary.size_bytes
    near = plan_of(summary, machine, world=nodes(4, 2), peers="locality")
    share = (0.75 / (2 * np.pi * 64)) ** 0.5
    assert near.later.of("peers").size_bytes == pytest.approx(summary.size_bytes * share)
    assert near.later.load_s("link") == pytest.approx(summary.size_bytes * share / 4 / 1.25e9)
    alone = plan_of(summary, machine, world=nodes(4, 2))
    assert alone.later.of("peers").size_bytes == 0
    assert alone.store_bytes > 2 * summary.size_bytes


def test_room_beyond_the_set_holds_copies_of_what_was_used_once() -> None:
    summary, rng = summary_of_sizes(np.full(6_000, 1_000)), np.random.default_rng(3)
    room = summary.size_bytes // 2  # Of 4 nodes: a third of what the other three are the home of.
    work = Work(world=nodes(4), num_epochs=6, peers="fixed")
    plan = make_plan(summary, work, machine_of(disk=room))
    home, has = rng.integers(0, 4, 6_000), np.zeros((4, 6_000), bool)
    may = rng.random((4, 6_000)) < 1 / 3
    for epoch in range(6):
        user = rng.integers(0, 4, 6_000)
        from_peer = (user != home) & ~has[user, np.arange(6_000)]
        has[user, np.arange(6_000)] |= may[user, np.arange(6_000)]
        expected = plan.epoch(epoch).of("peers").size_bytes
        assert from_peer.sum() * 1_000 == pytest.approx(expected, rel=0.04)
    assert plan.is_growing
    assert plan.store_bytes == plan.bound_bytes == summary.size_bytes
    all_over = make_plan(summary, replace(work, num_epochs=99), machine_of(disk=2 * room))
    assert all_over.later.of("peers").size_bytes < 1


@pytest.mark.parametrize("batch", [8, 64, 256])
def test_the_share_that_locality_moves_is_what_balancing_moves(batch: int) -> None:
    num_nodes = 8
    random = np.random.default_rng(4)
    owners = random.integers(0, num_nodes, (400, batch * num_nodes))
    counts = np.stack([np.bincount(row, minlength=num_nodes) for row in owners])
    moved = np.maximum(0, counts - batch).sum() / counts.sum()
    assert moved_share("locality", num_nodes, batch) == pytest.approx(moved, rel=0.06)


def test_an_epoch_takes_as_long_as_its_busiest_resource() -> None:
    summary = summary_of_sizes(SIZES)
    size = summary.size_bytes
    slow_store = StoreModel(latency_s=0.001, latency_p99_s=0.01, throughput=Curve.flat(10e6))
    plan = plan_of(summary, machine_of(store=slow_store), compute_samples_s=1_000.0)
    assert plan.later.bottleneck.resource == "store"
    assert plan.later.seconds == pytest.approx(size / 10e6)
    assert plan.later.stall_share == pytest.approx(1 - 3.0 / (size / 10e6))
    plan = plan_of(summary, machine_of(disk=size, store=slow_store), compute_samples_s=1_000.0)
    assert plan.first.bottleneck.resource == "store"
    assert (plan.later.bottleneck.resource, plan.later.seconds) == ("compute", 3.0)
    assert plan.later.stall_share == 0
    assert plan.total_s == pytest.approx(size / 10e6 + 6)
    decoding = machine_of(size, decode=Curve(counts=(1, 8), bytes_s=(5e6, 40e6)))
    plan = plan_of(summary, decoding)
    assert plan.later.bottleneck.resource == "cores"
    assert plan.later.seconds == pytest.approx(size / 40e6 + size / 10e9)
    assert plan.later.stall_share is None


def test_small_samples_are_ruled_by_latency_and_blocks_first_pays() -> None:
    small = Summary(
        num_samples=1_000_000,
        num_reads=1_000_000,
        class_counts=(0,) * 18 + (15_260,),
        class_bytes=(0,) * 18 + (2_000_000_000,),
    )
    machine = machine_of()
    plan = plan_of(small, machine)
    # 64 in flight, 2 kB each in 20 ms: 6.4 MB/s of a link that carries 1 GB/s.
    assert plan.first.seconds == pytest.approx(2e9 / 6.4e6, rel=0.01)
    assert plan.requests_in_flight == 64
    assert blocks_first_gain_s(plan) == pytest.approx(plan.first.seconds - 2.0, rel=0.01)
    assert plan.reads_whole_runs, "a quarter of each run is used while it is staged"
    assert not plan_of(small, machine, stage_bytes=1_000_000).reads_whole_runs
    assert plan.merge_gap_bytes == pytest.approx(0.02 * 1e9 / 64)
    nearer = {w.what: w for w in what_if(plan)}["a store of half the latency"]
    assert nearer.gain_s == pytest.approx(plan.total_s / 2, rel=0.01)
    kept = plan_of(small, machine_of(disk=4_000_000_000))
    assert kept.first.of("store").num_requests == pytest.approx(15_260)
    assert kept.first.seconds < 10, "units are fetched whole"


def test_what_ifs_buy_what_they_touch() -> None:
    summary = summary_of_sizes(np.full(2_000_000, 100_000))
    slow = StoreModel(latency_s=0.02, latency_p99_s=0.1, throughput=Curve.flat(100e6))
    plan = plan_of(summary, machine_of(disk=50_000_000_000, store=slow), world=nodes(2))
    gains = {w.what: w for w in what_if(plan)}
    more = gains["100 GB more of tiers on each node"]
    assert more.store_bytes_saved > 90e9
    assert more.gain_s == pytest.approx(more.store_bytes_saved / 2 / 100e6)
    assert gains["a store of twice the bandwidth"].gain_s == pytest.approx(plan.total_s / 2)
    assert gains["a store of half the latency"].gain_s == 0, "the link is full"
    assert gains["cores twice as fast"].gain_s == 0
    assert gains["nodes that read from each other"].store_bytes_saved > 0
    assert "a link twice as fast" not in gains
    shared = replace(plan, work=replace(plan.work, peers="fixed"))
    others = {w.what: w for w in what_if(shared)}
    assert others["a link twice as fast"].gain_s == 0
    assert others["nodes that are each on their own"].store_bytes_saved < 0
    assert others['assignment="locality"'].plan.later.of("peers").size_bytes < 20e9
    bare = plan_of(summary, machine_of(store=slow))
    assert {w.what: w for w in what_if(bare)}["100 GB more of tiers on each node"].gain_s > 0


def test_nonsense_is_refused() -> None:
    summary = summary_of_sizes(SIZES)
    with pytest.raises(OptionError, match="global batch of 4096"):
        plan_of(summary, machine_of(), world=nodes(128))
    with pytest.raises(OptionError, match="at least 1"):
        Work(batch_size=0)
    with pytest.raises(OptionError, match="more than 0"):
        Work(compute_samples_s=0.0)
    with pytest.raises(OptionError, match="one sample"):
        summary_of_sizes(SIZES[:0])


def test_several_disks_are_filled_one_after_the_other() -> None:
    summary = summary_of_sizes(SIZES)
    first, second = (
        TierModel(kind="disk", capacity_bytes=c, read=Curve.flat(r), write=Curve.flat(r))
        for c, r in ((summary.size_bytes // 4, 4e9), (summary.size_bytes, 1e9))
    )
    plan = plan_of(summary, replace(machine_of(), tiers=(first, second)))
    assert plan.later.of("disk").size_bytes == pytest.approx(summary.size_bytes)
    assert plan.later.load_s("disk") == pytest.approx(summary.size_bytes * 0.75 / 1e9)


def test_a_billion_rows_are_planned_from_a_few_numbers() -> None:
    count, objects = 1_000_000_000, 1_000
    rows = Rows(
        objects=[ObjectInfo(key=f"{i}.npy", size_bytes=10**10) for i in range(objects)],
        counts=[count // objects] * objects,
        addressing="even",
        columns={
            name: np.full(objects, value)
            for name, value in (("base", 128), ("stride", 6_000), ("width", 6_000))
        },
    )
    part = make_part(format="npy", fields=(), tables=[rows])
    dataset = Dataset(store=MemoryStore("none"), parts=[part])
    tracemalloc.start()
    summary = summary_of(dataset)
    plan = plan_of(summary, machine_of(disk=10**12), world=nodes(16, 8))
    assert plan.total_s > 0
    assert what_if(plan)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert summary.size_bytes == count * 6_000
    assert summary.num_units == pytest.approx(count * 6_000 / (128 << 10), rel=0.01)
    assert peak_bytes < 10e6


def test_rows_of_a_tar_are_foretold_without_the_headers_between_them(datasets: Sets) -> None:
    """Tiers keep rows with their headers; a row without a place is read alone."""
    dataset = datasets["small_tar"]
    summary = summary_of(dataset)
    rows_bytes = dataset.size_bytes
    assert summary.size_bytes - summary.between_bytes == rows_bytes
    plan = plan_of(summary, machine_of(0, summary.size_bytes // 2), num_epochs=4)
    assert plan.later.of("store").size_bytes == pytest.approx(rows_bytes / 2, rel=1e-3)
    assert plan.store_bytes == pytest.approx(plan.bound_bytes)
    assert plan_of(summary, machine_of()).bound_bytes == 3 * rows_bytes
    in_runs = plan_of(summary, machine_of(), shuffle="blocks")
    assert in_runs.bound_bytes == 3 * summary.size_bytes
