"""Live rates: what is observed corrects what was measured, and is forgotten again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import OptionError
from penstock.flow.live import STORE, LiveRates, tier_source
from penstock.machine import Curve, LinkModel, Machine, StoreModel, TierModel

MACHINE = Machine(
    store=StoreModel(
        latency_s=0.02,
        latency_p99_s=0.05,
        throughput=Curve(counts=(1, 16), bytes_s=(100e6, 100e6)),
    ),
    link=LinkModel(bytes_s=1e9),
    tiers=(
        TierModel(kind="memory", capacity_bytes=10**9, read=Curve.flat(8e9), write=Curve.flat(4e9)),
        TierModel(
            kind="disk",
            capacity_bytes=10**12,
            latency_s=1e-4,
            read=Curve(counts=(1, 4), bytes_s=(1e9, 2e9)),
            write=Curve.flat(1e9),
        ),
    ),
)
SMALL, LARGE = 1_000, 50_000_000
MEMORY = tier_source(0)


def fed(
    rates: LiveRates, source: str, truth: Machine, *, count: int, sizes: tuple[int, ...]
) -> LiveRates:
    """Give observations that a machine like `truth` would show."""
    model = truth.store if source == STORE else truth.tiers[int(source[-1])]
    for i in range(count):
        for size_bytes in sizes:
            rates.observe(
                source,
                size_bytes=size_bytes,
                seconds=model.read_s(size_bytes, 1),
                in_flight=1,
                at_s=float(i),
            )
    return rates


def slower(machine: Machine, *, latency: float, transfer: float) -> Machine:
    store = machine.store
    rates = tuple(rate / transfer for rate in store.throughput.bytes_s)
    return replace(
        machine,
        store=replace(
            store,
            latency_s=store.latency_s * latency,
            throughput=replace(store.throughput, bytes_s=rates),
        ),
    )


def test_without_observations_nothing_changes() -> None:
    assert LiveRates(MACHINE).machine() == MACHINE


def test_observations_as_promised_change_nothing() -> None:
    rates = fed(LiveRates(MACHINE), STORE, MACHINE, count=50, sizes=(SMALL, LARGE))
    store = rates.machine().store
    assert store.latency_s == pytest.approx(MACHINE.store.latency_s)
    assert store.throughput.bytes_s == pytest.approx(MACHINE.store.throughput.bytes_s)


@settings(max_examples=30)
@given(latency=st.floats(0.25, 4), transfer=st.floats(0.25, 4))
def test_small_requests_correct_the_latency_and_large_ones_the_throughput(
    latency: float, transfer: float
) -> None:
    truth = slower(MACHINE, latency=latency, transfer=transfer)
    rates = fed(LiveRates(MACHINE), STORE, truth, count=400, sizes=(SMALL, LARGE))
    found = rates.machine().store
    assert found.latency_s == pytest.approx(truth.store.latency_s, rel=0.06)
    assert found.latency_p99_s == pytest.approx(0.05 * found.latency_s / 0.02)
    assert found.throughput.at(1) == pytest.approx(truth.store.throughput.at(1), rel=0.06)


@settings(max_examples=30)
@given(factor=st.floats(0.05, 20), size_bytes=st.integers(1, 10**8))
def test_requests_of_one_size_move_both_alike(factor: float, size_bytes: int) -> None:
    truth = slower(MACHINE, latency=factor, transfer=factor)
    rates = fed(LiveRates(MACHINE), STORE, truth, count=400, sizes=(size_bytes,))
    now, promised = rates.machine().store, truth.store
    assert now.read_s(size_bytes, 1) == pytest.approx(promised.read_s(size_bytes, 1), rel=0.05)


def test_many_that_share_a_full_pipe_say_nothing_about_the_latency() -> None:
    rates = LiveRates(MACHINE)
    whole_s = MACHINE.store.read_s(LARGE, 16)
    for i in range(500):
        rates.observe(STORE, size_bytes=LARGE, seconds=10 * whole_s, in_flight=16, at_s=i)
    assert rates.slowdown(STORE)[0] == 1.0
    assert rates.machine().store.throughput.at(16) == pytest.approx(10e6, rel=0.01)


def test_a_tier_is_corrected_apart_from_the_others() -> None:
    rates = LiveRates(MACHINE)
    for i in range(400):
        rates.observe(tier_source(1), size_bytes=10**8, seconds=0.5, in_flight=4, at_s=i)
    memory, disk = rates.machine().tiers
    assert memory == MACHINE.tiers[0]
    assert disk.read.at(4) == pytest.approx(0.8e9, rel=0.05)
    assert disk.read.at(1) == pytest.approx(0.4e9, rel=0.05)
    assert rates.machine().store == MACHINE.store


def test_a_half_life_in_observations_is_one() -> None:
    rates = LiveRates(MACHINE, half_life_observations=8, half_life_s=1e9, prior_observations=1e-6)
    whole_s = MACHINE.tiers[0].read_s(LARGE, 1)
    for _ in range(500):
        rates.observe(MEMORY, size_bytes=LARGE, seconds=16 * whole_s, in_flight=1, at_s=0.0)
    assert rates.slowdown(MEMORY)[1] == pytest.approx(16.0)
    for _ in range(8):
        rates.observe(MEMORY, size_bytes=LARGE, seconds=whole_s, in_flight=1, at_s=0.0)
    assert rates.slowdown(MEMORY)[1] == pytest.approx(4.0, rel=0.01)


def test_a_half_life_in_seconds_is_one() -> None:
    rates = LiveRates(MACHINE, half_life_observations=1e9, half_life_s=5.0, prior_observations=1e-6)
    whole_s = MACHINE.tiers[0].read_s(LARGE, 1)
    rates.observe(MEMORY, size_bytes=LARGE, seconds=16 * whole_s, in_flight=1, at_s=100.0)
    rates.observe(MEMORY, size_bytes=LARGE, seconds=whole_s, in_flight=1, at_s=105.0)
    # The older one weighs a half, the newer one whole: 16 ** (1/3).
    assert rates.slowdown(MEMORY)[1] == pytest.approx(16 ** (1 / 3), rel=0.01)


def test_one_answer_after_a_long_pause_does_not_decide() -> None:
    rates = LiveRates(MACHINE, prior_observations=9)
    whole_s = MACHINE.tiers[0].read_s(LARGE, 1)
    rates.observe(MEMORY, size_bytes=LARGE, seconds=whole_s, in_flight=1, at_s=0.0)
    rates.observe(MEMORY, size_bytes=LARGE, seconds=1000 * whole_s, in_flight=1, at_s=1e6)
    assert rates.slowdown(MEMORY)[1] == pytest.approx(1000**0.1, rel=0.05)


def test_a_slow_down_and_a_recovery_take_equally_long() -> None:
    whole_s = MACHINE.tiers[0].read_s(LARGE, 1)
    rates = LiveRates(MACHINE)

    def steps_until(seconds: float, low: float, high: float) -> int:
        for step in range(10_000):
            if low <= rates.slowdown(MEMORY)[1] <= high:
                return step
            rates.observe(MEMORY, size_bytes=LARGE, seconds=seconds, in_flight=1, at_s=0.0)
        raise AssertionError("never")

    for seconds in [whole_s] * 1000:
        rates.observe(MEMORY, size_bytes=LARGE, seconds=seconds, in_flight=1, at_s=0.0)
    down = steps_until(10 * whole_s, 9.0, 11.0)
    for seconds in [10 * whole_s] * 1000:
        rates.observe(MEMORY, size_bytes=LARGE, seconds=seconds, in_flight=1, at_s=0.0)
    up = steps_until(whole_s, 0.0, 10 / 9.0)
    assert abs(down - up) <= 2


def test_a_machine_that_was_measured_with_its_latency_is_split_first() -> None:
    store = replace(
        MACHINE.store,
        throughput=Curve(counts=(1, 16), bytes_s=(5e6, 80e6)),
        request_bytes=110_000,
    )
    machine = replace(MACHINE, store=store)
    rates = LiveRates(machine)
    assert rates.machine() == machine.without_latency()
    for i in range(1000):
        seconds = 3 * store.read_s(110_000, 1)
        rates.observe(STORE, size_bytes=110_000, seconds=seconds, in_flight=1, at_s=i)
    now = rates.machine().store
    assert now.read_s(110_000, 1) == pytest.approx(3 * store.read_s(110_000, 1), rel=0.05)


@given(
    observed=st.lists(
        st.tuples(st.integers(1, 10**9), st.floats(1e-6, 1e3), st.integers(1, 64)), max_size=20
    )
)
def test_the_same_observations_give_the_same_machine(
    observed: list[tuple[int, float, int]],
) -> None:
    machines = []
    for _ in range(2):
        rates = LiveRates(MACHINE)
        for i, (size_bytes, seconds, in_flight) in enumerate(observed):
            rates.observe(
                STORE, size_bytes=size_bytes, seconds=seconds, in_flight=in_flight, at_s=i
            )
        machines.append(rates.machine())
    assert machines[0] == machines[1]
    assert machines[0].store.latency_s > 0


def test_time_that_runs_backwards_and_empty_answers_are_harmless() -> None:
    rates = LiveRates(MACHINE)
    whole_s = MACHINE.store.read_s(LARGE, 1)
    for at_s in (10.0, 3.0):
        rates.observe(STORE, size_bytes=LARGE, seconds=2 * whole_s, in_flight=1, at_s=at_s)
    before = rates.machine()
    rates.observe(STORE, size_bytes=0, seconds=1.0, in_flight=1, at_s=11.0)
    rates.observe(STORE, size_bytes=5, seconds=0.0, in_flight=1, at_s=11.0)
    assert rates.machine() == before


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ({"source": "peer"}, "it has: store, tier0, tier1"),
        ({"seconds": -1.0}, "at least 0"),
        ({"in_flight": 0}, "at least 1"),
        ({"seconds": float("nan")}, "at least 0"),
    ],
)
def test_bad_observations_are_refused(wrong: dict[str, object], hint: str) -> None:
    given_ = {"source": STORE, "size_bytes": 1, "seconds": 1.0, "in_flight": 1, "at_s": 0.0}
    with pytest.raises(OptionError, match=hint):
        LiveRates(MACHINE).observe(**{**given_, **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["half_life_observations", "half_life_s", "prior_observations"])
def test_bad_half_lives_are_refused(name: str) -> None:
    with pytest.raises(OptionError, match=f"{name}=0"):
        LiveRates(MACHINE, **{name: 0.0})
