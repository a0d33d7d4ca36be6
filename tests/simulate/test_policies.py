"""What policies decide: who reads what from where."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.lru import lru_bytes
from tests.simulate.coverage import Coverage, coverage_of
from tests.simulate.scenarios import cached, flat, scenario, tables, tier

from penstock.flow.bound import belady_bytes, lru_hit_ratio
from penstock.simulate import run
from penstock.simulate.job import SimulatedJob
from penstock.simulate.policies.base import sharded
from penstock.simulate.policies.evicting import lru_hits, min_hits
from penstock.simulate.policies.frequency import place
from penstock.simulate.policies.locality import reassigned


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0, 1.5])
@pytest.mark.parametrize("spread", [0, 9_000])
def test_ours_reads_the_bound(share: float, spread: int) -> None:
    sizes = {"sample_bytes": 100_000, "spread_bytes": spread}
    result = run(cached(share, dataset=sizes), "ours")
    # One sample of rounding on each node, in each epoch after the first.
    assert 1.0 <= result.byte_ratio <= 1.0 + 4 * 2 * 140_000 / result.bound_bytes
    assert result.num_visited == 1200


def test_small_samples_are_fetched_in_runs() -> None:
    # 32 rows of 4 kB are a unit: with a latency of 20 ms that is what makes the first epoch.
    machine = {**tables()["machine"], "tiers": [tier("memory", 10**9)]}
    machine["store"] = {**machine["store"], "latency_s": 0.02, "latency_p99_s": 0.02}
    made = scenario(
        dataset={"num_samples": 12_800, "sample_bytes": 4096},
        job={"epochs": 1, "compute_samples_s": 1e6},
        loader={"threads": 64},
        machine={**machine, "store": {**machine["store"], "throughput": flat(1e9)}},
    )
    ours, plain = run(made, "ours"), run(made, "double-buffering")
    assert ours.byte_ratio == 1.0
    # A request brings 32 samples, of which a step may need only one at first.
    assert ours.time_s < plain.time_s / 10


def test_locality_moves_what_the_formula_says_and_reads_the_same_from_the_store() -> None:
    sizes = {"num_samples": 40_960, "sample_bytes": 70_000}
    made = cached(1.01, dataset=sizes, job={"nodes": 8, "batch": 64, "ranks": 2, "epochs": 3})
    fixed, local = run(made, "ours"), run(made, "ours-locality")
    assert fixed.store_bytes == local.store_bytes == fixed.bound_bytes
    used = 3 * 40_960 * 70_000
    assert fixed.peer_bytes / used == pytest.approx(7 / 8, rel=0.01)
    expected = math.sqrt((1 - 1 / 8) / (2 * math.pi * 128))
    assert local.peer_bytes / used == pytest.approx(expected, rel=0.1)
    assert local.num_visited == 40_960


def test_room_for_more_than_the_set_holds_copies_that_come_from_peers_once() -> None:
    sizes = {"num_samples": 2_400, "sample_bytes": 70_000}
    made = cached(4.0, dataset=sizes, job={"nodes": 4, "batch": 25, "epochs": 8})
    result = run(made, "ours")
    assert result.byte_ratio == 1.0
    # Every node keeps what it has used: of the uses in epoch e, (3/4)**e are of something new.
    expected = sum(0.75 * 0.75**e for e in range(8)) * 2_400 * 70_000
    assert result.peer_bytes == pytest.approx(expected, rel=0.05)


@settings(max_examples=30, deadline=None)
@given(
    epochs=st.lists(st.permutations(range(12)), min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 9), min_size=12, max_size=12),
    capacity=st.integers(0, 60),
)
def test_lru_hits_are_those_of_an_lru_cache(
    epochs: list[list[int]], sizes: list[int], capacity: int
) -> None:
    string, by_id = np.concatenate(epochs), np.array(sizes)
    read = by_id[string][~lru_hits(string, by_id[string], capacity)].sum()
    # One that is larger than the cache empties it here and passes through there.
    if by_id.max() <= capacity:
        assert read == lru_bytes(string, by_id, capacity)


@settings(max_examples=30, deadline=None)
@given(string=st.lists(st.integers(0, 8), min_size=1, max_size=60), capacity=st.integers(0, 8))
def test_min_hits_are_the_most_that_any_cache_has(string: list[int], capacity: int) -> None:
    uses = np.array(string)
    missed = len(uses) - int(min_hits(uses, np.ones(len(uses), int), capacity).sum())
    assert missed == belady_bytes(uses, np.ones(9, int), capacity)


def test_lru_follows_its_closed_form_on_one_node() -> None:
    result = run(cached(0.5, job={"nodes": 1, "epochs": 6}), "lru")
    hits = result.local_bytes / (5 * 1_200_000)
    assert hits == pytest.approx(lru_hit_ratio(0.5), abs=0.03)


@pytest.mark.parametrize(
    ("nodes", "epochs", "held", "covered", "local", "reads"),
    [
        (4, 90, 1, 0.82, 0.31, 17.4),
        (16, 90, 0.5, 0.43, 0.06, 52.0),
        (16, 90, 1, 0.71, 0.12, 27.4),
        (16, 90, 4, 1.00, 0.38, 4.0),
        (256, 10, 1, 0.66, 0.12, 4.4),
    ],
)
def test_frequency_placement_covers_as_little_as_was_measured(
    *, nodes: int, epochs: int, held: float, covered: float, local: float, reads: float
) -> None:
    found = _coverage(nodes, epochs, held, "random", num_samples=6144)
    assert found.covered == pytest.approx(covered, abs=0.015)
    assert found.local == pytest.approx(local, abs=0.01)
    assert found.reads == pytest.approx(reads, rel=0.05)
    assert found.local + found.remote + found.store == pytest.approx(1.0)


def test_ties_by_index_make_workers_keep_the_same() -> None:
    found = _coverage(64, 10, 2, "index", num_samples=6144)
    assert found.covered == pytest.approx(0.61, abs=0.015)
    assert found.reads == pytest.approx(6.0, rel=0.05)


def _coverage(nodes: int, epochs: int, held: float, ties: str, num_samples: int) -> Coverage:
    machine = {**tables()["machine"], "tiers": [tier("memory", 1)]}
    made = scenario(
        dataset={"num_samples": num_samples, "sample_bytes": 1000},
        job={"nodes": nodes, "epochs": epochs, "batch": 4},
        machine=machine,
    ).with_cache(held, num_samples * 1000)
    job = SimulatedJob(made)
    return coverage_of(job, place(job, ties=ties))


def test_copies_of_nopfs_come_from_peers_as_published_and_from_the_store_as_released() -> None:
    made = cached(4.0, job={"epochs": 10, "nodes": 4})
    published, released = run(made, "nopfs"), run(made, "nopfs-released")
    assert published.store_bytes < released.store_bytes
    assert released.store_bytes >= 3.5 * 1_200_000


@settings(max_examples=20, deadline=None)
@given(
    nodes=st.sampled_from([2, 3, 8]),
    ranks=st.sampled_from([1, 2]),
    batch=st.sampled_from([3, 8]),
    share=st.sampled_from([0.4, 1.0]),
)
def test_reassigning_keeps_global_batches_and_shares(
    nodes: int, ranks: int, batch: int, share: float
) -> None:
    made = cached(1.0, job={"nodes": nodes, "ranks": ranks, "batch": batch})
    job = SimulatedJob(made.with_cache(share, 1_200_000))
    uses, held = job.accesses(1), sharded(job, 0)
    moved = reassigned(job, uses, held[uses.ids])
    for step in range(job.num_steps):
        before, after = uses.steps == step, moved.steps == step
        assert sorted(uses.ids[before]) == sorted(moved.ids[after])
        for worker in range(job.num_workers):
            mine = [
                int((a.workers[s] == worker).sum()) for a, s in ((uses, before), (moved, after))
            ]
            assert mine[0] == mine[1]


def test_reassigning_moves_about_the_root_of_the_batch() -> None:
    made = cached(1.0, dataset={"num_samples": 40_960}, job={"nodes": 16, "batch": 64})
    job = SimulatedJob(made)
    held = np.random.default_rng(1).permutation(sharded(job, 0))  # As a hash would spread them.
    uses = job.accesses(0)
    moved = reassigned(job, uses, held[uses.ids])
    share = float((held[moved.ids] != job.nodes_of(moved.workers)).mean())
    assert share == pytest.approx(math.sqrt((1 - 1 / 16) / (2 * math.pi * 64)), rel=0.1)


def test_deepio_at_will_leaves_samples_out_and_says_how_many() -> None:
    result = run(cached(0.25), "deepio-opportunistic")
    assert result.num_visited == pytest.approx(300, abs=4)
    assert result.store_bytes == pytest.approx(0.25 * 1_200_000, rel=0.01)
    ordered = run(cached(0.25), "deepio-ordered")
    assert ordered.num_visited == 1200
    assert ordered.store_bytes == pytest.approx((0.25 + 3 * 0.75) * 1_200_000, rel=0.01)


def test_parallel_staging_stays_with_its_shards() -> None:
    result = run(cached(0.5), "parallel-staging")
    assert result.num_visited == pytest.approx(600, abs=4)
    assert result.peer_bytes == 0
    more = run(cached(2.0), "parallel-staging")
    # Twice its shard: one from the store, one from peers.
    assert more.peer_bytes == pytest.approx(1_200_000, rel=0.02)


def test_lbann_needs_the_whole_set_in_memory() -> None:
    assert "1.2 MB do not fit into 1.19 MB" in run(cached(0.99), "lbann-dynamic").why_not
    result = run(cached(1.01), "lbann-dynamic")
    assert result.byte_ratio == 1.0
    assert run(cached(1.01), "lbann-preloading").start_s == pytest.approx(0.3)


def test_coordl_keeps_what_came_first_and_never_evicts() -> None:
    result = run(cached(0.5), "coordl")
    assert result.byte_ratio == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("policy", ["deepio-ordered", "nopfs", "lru", "belady", "coordl"])
def test_a_cache_without_a_tier_says_so(policy: str) -> None:
    assert "no tier" in run(scenario(), policy).why_not
