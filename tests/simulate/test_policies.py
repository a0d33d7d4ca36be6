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

from penstock.flow.bound import lru_hit_ratio
from penstock.simulate import run
from penstock.simulate.job import SimulatedJob
from penstock.simulate.policies.frequency import place
from penstock.simulate.policies.lru import lru_hits


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


def test_parallel_staging_stays_with_its_shards() -> None:
    result = run(cached(0.5), "parallel-staging")
    assert result.num_visited == pytest.approx(600, abs=4)
    assert result.peer_bytes == 0
    more = run(cached(2.0), "parallel-staging")
    # Twice its shard: one from the store, one from peers.
    assert more.peer_bytes == pytest.approx(1_200_000, rel=0.02)


@pytest.mark.parametrize("policy", ["nopfs", "lru"])
def test_a_cache_without_a_tier_says_so(policy: str) -> None:
    assert "no tier" in run(scenario(), policy).why_not
