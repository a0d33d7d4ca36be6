"""How a flow behaves on stores that are slow, jittery, limited, throttling or straggling.

Everything here runs in virtual time on the small store of `model`; times and rates are the model's,
so they are the same on every machine.
"""

from __future__ import annotations

import pytest
from tests.flow.model import Log, ModelStore, Run

MB = 1e6


def delay_p99_s(log: Log, from_s: float = 0.0) -> float:
    waits = sorted(wait_s for at_s, wait_s in log.stalls if at_s >= from_s)
    return waits[int(0.99 * len(waits))]


@pytest.mark.parametrize("sigma", [0.0, 0.2, 0.6])
def test_a_link_is_filled_within_a_second_and_its_queue_stays_short(sigma: float) -> None:
    log = Run(ModelStore(sigma=sigma)).until(4.0)
    assert log.rate(0.5, 1.0) >= 95 * MB
    assert log.rate(1.0, 4.0) >= 97 * MB
    base_s = 0.02 + 110_000 / 100e6
    assert log.latency_s(1.0, 4.0) < 2 * base_s, "requests wait for each other"


@pytest.mark.parametrize("sigma", [0.0, 0.2, 0.8])
def test_where_connections_are_the_limit_all_that_are_allowed_are_used(sigma: float) -> None:
    store = ModelStore(sigma=sigma, bytes_s=2e9, connection_bytes_s=10 * MB)
    run = Run(store, requests_max=64)
    run.until(1.0)
    assert run.flow.limit("store") == 64


def test_large_objects_on_a_slow_link_get_few_requests() -> None:
    run = Run(ModelStore(bytes_s=5 * MB))
    log = run.until(12.0)
    assert log.rate(6.0, 12.0) >= 4.75 * MB
    assert run.flow.limit("store") <= 5
    assert log.latency_s(6.0, 12.0) < 3 * (0.02 + 110_000 / 5e6)


@pytest.mark.parametrize("requests_s", [200, 700])
def test_a_cap_on_requests_is_nearly_reached_with_few_refusals(requests_s: int) -> None:
    log = Run(ModelStore(bytes_s=1e9, requests_s=requests_s)).until(12.0)
    cap_bytes_s = requests_s * 110_000
    assert log.rate(3.0, 12.0) >= 0.85 * cap_bytes_s
    late = [at_s for at_s in log.throttles if at_s >= 3.0]
    assert len(late) <= 0.02 * sum(at_s >= 3.0 for at_s in log.begins)


def test_a_storm_of_refusals_is_over_soon_after_it_ends() -> None:
    store = ModelStore(refuse=(2.0, 4.0))
    log = Run(store).until(8.0)
    assert log.rate(1.0, 2.0) >= 97 * MB
    assert log.rate(7.0, 8.0) >= 95 * MB


SLOW = {
    "bandwidth": {"slow_bytes": 10.0},
    "latency": {"slow_latency": 10.0},
    "both": {"slow_bytes": 10.0, "slow_latency": 10.0},
}


@pytest.mark.parametrize("sigma", [0.2, 0.6])
@pytest.mark.parametrize("kind", SLOW)
def test_two_seconds_after_a_slow_time_the_rate_is_back(kind: str, sigma: float) -> None:
    log = Run(ModelStore(sigma=sigma, slow=(2.0, 7.0), **SLOW[kind])).until(9.5)
    before = log.rate(1.0, 2.0)
    assert log.rate(4.0, 7.0) <= 0.4 * before, "the model was not slow"
    assert log.rate(8.5, 9.5) >= 0.9 * before
    assert log.latency_s(8.5, 9.5) < (3 if sigma < 0.5 else 4) * 0.0211


def test_a_source_that_is_slow_for_good_is_not_taken_for_a_queue() -> None:
    """Ten times the latency needs more requests, not fewer."""
    run = Run(ModelStore(slow=(3.0, 99.0), slow_latency=10.0))
    run.until(8.0)
    assert run.flow.limit("store") == 64


def test_second_copies_cut_the_tail_and_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ModelStore(straggler_share=0.01, straggler_s=2.0)
    hedged = Run(store, compute_s=0.0365, stage_bytes=24 << 20)
    with_copies = hedged.until(10.0)
    assert 0 < hedged.flow.num_hedges <= 0.06 * len(with_copies.begins)
    monkeypatch.setattr("penstock.flow.flow.TOKEN_SHARE", 0.0)
    monkeypatch.setattr("penstock.flow.source.TOKENS_FIRST", 0.0)
    monkeypatch.setattr("penstock.flow.hedge.WAITED_S", float("inf"))
    alone = Run(store, compute_s=0.0365, stage_bytes=24 << 20)
    without = alone.until(10.0)
    assert alone.flow.num_hedges == 0
    assert delay_p99_s(with_copies, 1.0) < 0.25 * delay_p99_s(without, 1.0)
    assert len(with_copies.stalls) > 1.5 * len(without.stalls), "steps done in the same time"


def test_where_everything_is_slow_there_are_hardly_any_copies() -> None:
    store = ModelStore(slow=(3.0, 8.0), slow_latency=10.0, slow_bytes=10.0)
    run = Run(store, stage_bytes=8 << 20)
    run.until(3.0)
    before = run.flow.num_hedges
    log = run.until(8.0)
    slow = sum(at_s >= 3.0 for at_s in log.begins)
    assert run.flow.num_hedges - before <= 0.05 * slow


def test_a_slow_consumer_has_its_stage_filled_and_no_more() -> None:
    run = Run(ModelStore(), compute_s=0.1)
    log = run.until(8.0)
    step_bytes = run.batch * run.size_bytes
    used_bytes_s = step_bytes / 0.1
    assert delay_p99_s(log, 1.0) == 0.0
    assert log.rate(4.0, 8.0) == pytest.approx(used_bytes_s, rel=0.05)
    target = run.flow.look_ahead_bytes
    assert used_bytes_s * 0.5 <= target <= used_bytes_s * 2
    assert target - step_bytes <= run.flow.stage_bytes <= target + step_bytes
    limits = {limit for at_s, limit in log.limits if at_s > 4.0}
    assert len(limits) <= 1, "rounds without enough to ask for say nothing about the link"


def test_a_consumer_just_below_the_stores_rate_does_not_wait() -> None:
    step_s = 32 * 110_000 / 100e6 / 0.95
    log = Run(ModelStore(), compute_s=step_s).until(10.0)
    waited_s = sum(wait_s for at_s, wait_s in log.stalls if at_s >= 1.0)
    assert waited_s <= 0.01 * 9.0


def test_look_ahead_grows_with_the_tail_and_stays_inside_the_budget() -> None:
    calm = Run(ModelStore(), compute_s=0.1, stage_bytes=512 << 20)
    calm.until(6.0)
    wild = Run(ModelStore(straggler_share=0.01), compute_s=0.1, stage_bytes=512 << 20)
    wild.until(6.0)
    assert wild.flow.look_ahead_bytes > 1.5 * calm.flow.look_ahead_bytes
    tight = Run(ModelStore(straggler_share=0.01), compute_s=0.1, stage_bytes=32 << 20)
    log = tight.until(6.0)
    assert tight.flow.look_ahead_bytes == 32 << 20
    assert log.stage_bytes_max <= 32 << 20


def test_one_batch_at_a_time_when_the_budget_is_smaller_than_a_batch() -> None:
    run = Run(ModelStore(), stage_bytes=1 << 20)
    log = run.until(3.0)
    assert len(log.stalls) > 10
    assert log.stage_bytes_max == run.batch * run.size_bytes


def run_with_peers(compute_s: float, **slow: object) -> Run:
    """Three peers on links of their own, one of which may be slow from the third second on."""
    peers = {
        name: ModelStore(latency_s=0.002, bytes_s=1e9, **(slow if name == "peer:b" else {}))
        for name in ("peer:a", "peer:b", "peer:c")
    }
    run = Run(ModelStore(), compute_s=compute_s, peers=peers, stage_bytes=64 << 20)
    run.until(3.0)
    run.log.asked.clear()
    return run


@pytest.mark.parametrize("compute_s", [0.0, 0.05])
def test_of_peers_that_are_well_the_store_is_asked_for_nothing(compute_s: float) -> None:
    run = run_with_peers(compute_s)
    log = run.until(8.0)
    assert run.flow.num_hedges == 0
    assert max(log.asked.values()) - min(log.asked.values()) <= run.batch + run.flow.limit("store")


@pytest.mark.parametrize("factor", [10.0, 100.0, 10_000.0])
def test_no_step_waits_for_a_peer_that_has_become_slow(factor: float) -> None:
    run = run_with_peers(0.05, slow=(3.0, 99.0), slow_latency=factor, slow_bytes=factor)
    log = run.until(13.0)
    asked, num = log.asked, sum(at_s >= 3.0 for at_s, _ in log.stalls) * run.batch
    waited_s = sum(wait_s for at_s, wait_s in log.stalls if at_s >= 3.0)
    assert waited_s <= 0.01 * 10.0
    assert asked["store"] <= 0.52 * num, "its own quarter, and the slow peer's"
    if factor == 10.0:
        assert asked["store"] <= 0.26 * num, "it is slow, but in time"
