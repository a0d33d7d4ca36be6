"""A flow begins what is needed first, inside its limits, and never gets stuck."""

from __future__ import annotations

import pytest

from penstock.errors import OptionError
from penstock.flow import (
    Action,
    Arrived,
    Begin,
    Consumed,
    Failed,
    Fetch,
    Flow,
    FlowBudget,
    GiveUp,
    SourcePrior,
    Throttled,
    Tick,
    Waiting,
    Wanted,
)
from penstock.machine import Curve, StoreModel


def fetch(
    number: int, step: int, *sources: str, size_bytes: int = 100, staged: bool = True
) -> Fetch:
    return Fetch(
        number=number,
        step=step,
        size_bytes=size_bytes,
        sources=sources or ("store",),
        staged=staged,
    )


def wanted(*fetches: Fetch, at_s: float = 0.0) -> Wanted:
    return Wanted(fetches=fetches, at_s=at_s)


def begun(actions: list[Action]) -> list[int]:
    return [action.number for action in actions if isinstance(action, Begin)]


def flow_of(stage_bytes_max: int = 10_000, requests: int = 8) -> Flow:
    budget = FlowBudget(stage_bytes_max=stage_bytes_max, requests_max=requests, requests_min=1)
    prior = SourcePrior(latency_s=0.02, latency_p99_s=0.05, bytes_s=1e8, requests=requests)
    return Flow(budget=budget, prior={"store": prior, "peer": prior})


def test_the_earliest_step_begins_first_and_then_the_lowest_number() -> None:
    flow = flow_of(requests=2)
    actions = flow.on(wanted(fetch(0, 5), fetch(1, 3), fetch(2, 3), fetch(3, 1, staged=False)))
    assert begun(actions) == [3, 1]
    assert begun(flow.on(Arrived(number=3, attempt=0, at_s=0.1))) == [2]
    assert begun(flow.on(Arrived(number=1, attempt=0, at_s=0.1))) == [0]


def test_staged_bytes_count_until_their_step_is_consumed() -> None:
    flow = flow_of(stage_bytes_max=250)
    assert begun(flow.on(wanted(*(fetch(n, n) for n in range(4))))) == [0, 1]
    assert flow.on(Arrived(number=0, attempt=0, at_s=0.1)) == []
    assert flow.stage_bytes == 200
    assert begun(flow.on(Consumed(step=0, at_s=0.2))) == [2]
    assert flow.planned_bytes == 300


def test_a_batch_larger_than_the_budget_begins_whole_and_alone() -> None:
    flow = flow_of(stage_bytes_max=50)
    assert begun(flow.on(wanted(fetch(0, 0), fetch(1, 0), fetch(2, 1)))) == [0, 1]
    for number in (0, 1):
        flow.on(Arrived(number=number, attempt=0, at_s=0.1))
    assert begun(flow.on(Consumed(step=0, at_s=0.2))) == [2]


def test_fills_of_tiers_take_room_only_on_their_way() -> None:
    flow = flow_of(stage_bytes_max=400)
    fills = [fetch(n, 9, staged=False) for n in range(3)]
    assert begun(flow.on(wanted(*fills))) == [0]
    assert begun(flow.on(Arrived(number=0, attempt=0, at_s=0.1))) == [1]
    assert flow.stage_bytes == 0
    assert flow.planned_fill_bytes == 200


def test_neither_fills_nor_stage_starve_the_other() -> None:
    flow = flow_of(stage_bytes_max=400)
    staged = [fetch(n, n) for n in range(8)]
    fills = [fetch(100 + n, 0, staged=False) for n in range(8)]
    assert sorted(begun(flow.on(wanted(*staged, *fills)))) == [0, 1, 2, 100]


def test_a_full_source_does_not_hold_up_another() -> None:
    flow = flow_of(requests=1)
    actions = flow.on(wanted(fetch(0, 0), fetch(1, 0), fetch(2, 7, "peer")))
    assert begun(actions) == [0, 2]
    assert (flow.in_flight("store"), flow.in_flight("peer")) == (1, 1)
    assert (flow.in_flight("other"), flow.limit("store")) == (0, 1)


def test_after_a_failure_comes_the_next_source_and_in_the_end_it_is_given_up() -> None:
    flow = flow_of()
    flow.on(wanted(fetch(0, 0, "peer", "store")))
    assert flow.on(Failed(number=0, attempt=0, at_s=0.1)) == [
        Begin(number=0, attempt=1, source="store")
    ]
    assert flow.on(Failed(number=0, attempt=1, at_s=0.2)) == [GiveUp(number=0)]
    assert flow.stage_bytes == flow.planned_bytes == flow.in_flight("store") == 0


def test_unknown_numbers_change_nothing() -> None:
    flow = flow_of()
    for event in (
        Arrived(number=7, attempt=0, at_s=0.1),
        Failed(number=7, attempt=0, at_s=0.1),
        Tick(at_s=0.1),
    ):
        assert flow.on(event) == []
    assert flow.wake_s is None


def test_a_step_that_goes_by_without_its_bytes_leaves_nothing_behind() -> None:
    flow = flow_of(requests=1)
    flow.on(wanted(fetch(0, 0), fetch(1, 0)))
    assert flow.on(Consumed(step=0, at_s=0.1)) == []
    assert begun(flow.on(Arrived(number=0, attempt=0, at_s=0.2))) == [1]
    flow.on(Arrived(number=1, attempt=0, at_s=0.3))
    assert flow.stage_bytes == flow.planned_bytes == 0


def test_what_is_wanted_for_a_step_gone_by_leaves_when_it_arrives() -> None:
    flow = flow_of()
    flow.on(Consumed(step=5, at_s=0.1))
    assert begun(flow.on(wanted(fetch(0, 3), at_s=0.2))) == [0]
    flow.on(Arrived(number=0, attempt=0, at_s=0.3))
    assert flow.stage_bytes == flow.planned_bytes == 0


def test_what_was_found_on_the_node_teaches_nothing_about_the_source() -> None:
    flow = flow_of(requests=64)
    for number in range(500):
        flow.on(wanted(fetch(number, 0), at_s=float(number)))
        flow.on(Arrived(number=number, attempt=0, at_s=float(number), moved=False))
    assert flow.rates().sources["store"].latency_p50_s == 0.02


def test_time_does_not_run_backwards() -> None:
    flow = flow_of()
    flow.on(wanted(fetch(0, 0), at_s=1.0))
    flow.on(Arrived(number=0, attempt=0, at_s=0.5))
    assert flow.rates().sources["store"].latency_p50_s >= 0


def test_rates_name_every_source_and_the_consumer() -> None:
    flow = flow_of()
    for step in range(10):
        flow.on(wanted(fetch(step, step, size_bytes=1000), at_s=step * 0.5))
        flow.on(Arrived(number=step, attempt=0, at_s=step * 0.5 + 0.02))
        flow.on(Waiting(step=step, at_s=step * 0.5 + 0.1))
        flow.on(Consumed(step=step, at_s=step * 0.5 + 0.35))
    flow.on(Throttled(source="peer", at_s=5.0))
    rates = flow.rates()
    assert set(rates.sources) == {"store", "peer"}
    assert rates.steps_s == pytest.approx(4.0)  # 0.5 s a step, half of it spent waiting
    assert rates.bytes_s == pytest.approx(4000.0)
    assert rates.sources["store"].latency_p50_s == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize(
    "wrong",
    [{"stage_bytes_max": 0}, {"requests_min": 0}, {"requests_min": 9, "requests_max": 8}],
)
def test_a_budget_refuses_nonsense(wrong: dict[str, int]) -> None:
    with pytest.raises(OptionError, match="must"):
        FlowBudget(**{"stage_bytes_max": 1000, **wrong})


def test_a_prior_begins_with_the_requests_that_fill_the_link() -> None:
    curve = Curve(counts=(1, 8, 16, 64), bytes_s=(50e6, 400e6, 400e6, 400e6))
    store = StoreModel(latency_s=0.02, latency_p99_s=0.2, throughput=curve)
    prior = SourcePrior.of_store(store, 1_000_000)
    assert (prior.requests, prior.bytes_s) == (16, 400e6)
    assert SourcePrior.of_store(store, 100_000).requests == 64, "small ones mostly wait"
    assert SourcePrior.of_store(store, 100_000, num_ranks=4).requests == 16
    assert SourcePrior.of_store(store, 1e9).requests == 8, "as many as without a measurement"
    with pytest.raises(OptionError, match="latency_p99_s"):
        SourcePrior(latency_s=0.2, latency_p99_s=0.1, bytes_s=1.0)
    with pytest.raises(OptionError, match="requests at least 1"):
        SourcePrior(latency_s=0.1, latency_p99_s=0.1, bytes_s=1.0, requests=0)
