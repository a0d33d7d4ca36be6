"""Steps in bulk, against sums that can be done by hand."""

from __future__ import annotations

import pytest
from benchmarks.policies import POLICIES
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulate.scenarios import cached, flat, scenario, tables

from penstock.errors import OptionError
from penstock.simulate import run, sweep

# 1,200 samples of 1 kB, 4 nodes, batches of 10: 30 steps of 10 ms computing, 3 epochs: 0.9 s.
COMPUTE_S = 0.9


def store(**changes: object) -> dict[str, object]:
    machine = tables()["machine"]
    return {**machine, "store": {**machine["store"], **changes}}


def test_perfect_is_computing_alone() -> None:
    result = run(scenario(), POLICIES["perfect"])
    assert result.time_s == pytest.approx(COMPUTE_S)
    assert (result.time_ratio, result.stall_share) == pytest.approx((1.0, 0.0))
    assert result.store_bytes == 0


def test_naive_reads_then_computes() -> None:
    # A sample takes 1 ms to read and 1 ms to compute.
    assert run(scenario(), POLICIES["naive"]).time_s == pytest.approx(2 * COMPUTE_S)


def test_latency_is_paid_by_every_request_of_a_thread() -> None:
    machine = store(latency_s=0.004, latency_p99_s=0.004)
    assert run(scenario(machine=machine), POLICIES["naive"]).time_s == pytest.approx(6 * COMPUTE_S)
    many = scenario(machine=machine, loader={"threads": 5})
    # Five threads read a sample a ms, but the store gives 1 MB/s: just enough.
    assert run(many, "double-buffering").time_s == pytest.approx(COMPUTE_S + 0.01)


def test_reading_ahead_hides_all_but_the_first_step() -> None:
    fast = scenario(machine=store(throughput=flat(2e6)))
    assert run(fast, "double-buffering").time_s == pytest.approx(COMPUTE_S + 0.005)


def test_a_slow_store_sets_the_pace() -> None:
    slow = scenario(machine=store(throughput=flat(0.25e6)))
    # Every step takes 40 ms to read; the last one is computed after that.
    assert run(slow, "double-buffering").time_s == pytest.approx(4 * COMPUTE_S + 0.01)


def test_nodes_share_what_the_store_gives_all_of_them() -> None:
    shared = {"counts": [1, 4], "bytes_s": [1e6, 2e6]}
    result = run(scenario(machine=store(shared=shared)), "double-buffering")
    assert result.time_s == pytest.approx(2 * COMPUTE_S + 0.01)


def test_a_node_that_needs_more_gets_what_others_leave() -> None:
    machine = store(shared={"counts": [1], "bytes_s": [1e6]}, throughput=flat(1e9))
    result = run(scenario(dataset={"spread_bytes": 400}, machine=machine), "double-buffering")
    # The store never idles: all bytes, and then the last step.
    assert result.time_s == pytest.approx(result.store_bytes / 1e6 + 0.01)


def test_requests_a_second_are_a_limit_of_all_nodes_together() -> None:
    result = run(scenario(machine=store(requests_s_max=2000.0)), "double-buffering")
    assert result.time_s == pytest.approx(2 * COMPUTE_S + 0.01)


def test_a_stage_of_one_step_still_overlaps() -> None:
    small = scenario(loader={"stage_bytes": 1})
    assert run(small, "double-buffering").time_s == pytest.approx(COMPUTE_S + 0.01)


def test_a_global_batch_larger_than_the_set_is_refused() -> None:
    with pytest.raises(OptionError, match=r"lower job\.batch"):
        run(scenario(job={"batch": 500}), "ours")


def test_an_unknown_policy_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(OptionError, match="did you mean 'nopfs'"):
        run(scenario(), "nopf")


def test_a_sweep_goes_through_all_combinations() -> None:
    results = list(sweep(cached(1), policies=["ours", "lru"], nodes=[2, 4], cache=[0.5, 1]))
    assert len(results) == 8
    assert [(r.nodes, round(r.cache_share, 2), r.policy) for r in results[:3]] == [
        (2, 0.5, "ours"),
        (2, 0.5, "lru"),
        (2, 1.0, "ours"),
    ]


@settings(max_examples=80, deadline=None)
@given(
    policy=st.sampled_from(list(POLICIES)),
    nodes=st.sampled_from([1, 2, 3, 8]),
    ranks=st.sampled_from([1, 2]),
    share=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    spread=st.sampled_from([0, 600]),
    drop_last=st.booleans(),
)
def test_no_policy_beats_computing_nor_the_bound(
    *, policy: str, nodes: int, ranks: int, share: float, spread: int, drop_last: bool
) -> None:
    made = cached(
        share,
        dataset={"spread_bytes": spread},
        job={"nodes": nodes, "ranks": ranks, "batch": 7, "drop_last": drop_last},
    )
    result = run(made, POLICIES[policy])
    if result.why_not or policy == "perfect":
        return
    assert result.time_s >= result.bound_s * (1 - 1e-9)
    everything = result.num_visited == result.num_samples and not drop_last
    # Shards and what is in memory are other draws: an epoch does not visit every sample once.
    if everything and policy not in ("deepio-opportunistic", "parallel-staging"):
        assert result.store_bytes >= result.bound_bytes * (1 - 1e-9)
        assert result.time_s >= result.least_s * (1 - 1e-9)
