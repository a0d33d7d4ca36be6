"""The policies that are only compared with: who reads what from where."""

from __future__ import annotations

import math

import numpy as np
import pytest
from benchmarks.policies import POLICIES
from benchmarks.policies.belady import min_hits
from benchmarks.policies.locality import reassigned
from benchmarks.policies.shards import sharded
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulate.scenarios import cached, scenario

from penstock.flow.bound import belady_bytes
from penstock.simulate import run
from penstock.simulate.job import SimulatedJob


@settings(max_examples=30, deadline=None)
@given(string=st.lists(st.integers(0, 8), min_size=1, max_size=60), capacity=st.integers(0, 8))
def test_min_hits_are_the_most_that_any_cache_has(string: list[int], capacity: int) -> None:
    uses = np.array(string)
    missed = len(uses) - int(min_hits(uses, np.ones(len(uses), int), capacity).sum())
    assert missed == belady_bytes(uses, np.ones(9, int), capacity)


def test_copies_of_nopfs_come_from_peers_as_published_and_from_the_store_as_released() -> None:
    made = cached(4.0, job={"epochs": 10, "nodes": 4})
    published, released = run(made, POLICIES["nopfs"]), run(made, POLICIES["nopfs-released"])
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
    result = run(cached(0.25), POLICIES["deepio-opportunistic"])
    assert result.num_visited == pytest.approx(300, abs=4)
    assert result.store_bytes == pytest.approx(0.25 * 1_200_000, rel=0.01)
    ordered = run(cached(0.25), POLICIES["deepio-ordered"])
    assert ordered.num_visited == 1200
    assert ordered.store_bytes == pytest.approx((0.25 + 3 * 0.75) * 1_200_000, rel=0.01)


def test_lbann_needs_the_whole_set_in_memory() -> None:
    assert "1.2 MB do not fit into 1.19 MB" in run(cached(0.99), POLICIES["lbann-dynamic"]).why_not
    result = run(cached(1.01), POLICIES["lbann-dynamic"])
    assert result.byte_ratio == 1.0
    assert run(cached(1.01), POLICIES["lbann-preloading"]).start_s == pytest.approx(0.3)


def test_coordl_keeps_what_came_first_and_never_evicts() -> None:
    result = run(cached(0.5), POLICIES["coordl"])
    assert result.byte_ratio == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("policy", ["deepio-ordered", "belady", "coordl"])
def test_a_cache_without_a_tier_says_so(policy: str) -> None:
    assert "no tier" in run(scenario(), POLICIES[policy]).why_not
