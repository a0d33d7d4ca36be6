"""What a curve means: latency and transfer apart, and samples a second."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import OptionError
from penstock.machine import Curve, LinkModel, Machine, StoreModel, TierModel
from penstock.simulate.probe import sample_limits, useful_count

MEASURED = StoreModel(
    latency_s=0.02,
    latency_p99_s=0.04,
    throughput=Curve(counts=(1, 2, 8, 64), bytes_s=(5e6, 10e6, 40e6, 100e6)),
    request_bytes=110_000,
)
DISK = TierModel(
    kind="disk",
    capacity_bytes=10**12,
    latency_s=1e-4,
    read=Curve(counts=(1, 4), bytes_s=(0.5e9, 2e9)),
    write=Curve.flat(1e9),
    request_bytes=131_072,
)


@given(
    latency_s=st.floats(0, 0.1),
    shares=st.lists(st.floats(0.1, 1.0), min_size=1, max_size=6),
    size_bytes=st.integers(1_000, 10**7),
    one_bytes_s=st.floats(1e5, 1e9),
)
def test_a_store_that_was_measured_predicts_what_was_measured(
    latency_s: float, shares: list[float], size_bytes: int, one_bytes_s: float
) -> None:
    counts = tuple(2**i for i in range(len(shares) + 1))
    rates = (one_bytes_s, *(c * one_bytes_s * s for c, s in zip(counts[1:], shares, strict=True)))
    store = StoreModel(
        latency_s=latency_s,
        latency_p99_s=latency_s,
        throughput=Curve(counts=counts, bytes_s=rates),
        request_bytes=size_bytes,
    )
    for count, rate in zip(counts, rates, strict=True):
        predicted = count * size_bytes / store.read_s(size_bytes, count)
        assert rate * 0.999 <= predicted <= rate / 0.9 * 1.001


def test_latency_is_not_counted_twice() -> None:
    plain = MEASURED.without_latency()
    assert plain.request_bytes is None
    assert plain.latency_s == 0.02
    assert plain.throughput.at(1) == pytest.approx(110_000 / 0.002)
    assert plain.throughput.at(64) == 100e6
    assert plain.without_latency() == plain
    for size_bytes in (1_000, 110_000, 10**6):
        assert MEASURED.read_s(size_bytes, 3) == plain.read_s(size_bytes, 3)


def test_twice_as_large_a_request_is_not_twice_as_slow_until_the_pipe_is_full() -> None:
    assert MEASURED.read_s(220_000, 1) == pytest.approx(0.024)
    assert MEASURED.read_s(220_000, 64) == pytest.approx(64 * 220_000 / 100e6)


def test_a_tier_is_split_in_the_same_way() -> None:
    assert DISK.read_s(131_072, 1) == pytest.approx(131_072 / 0.5e9)
    assert DISK.read_s(0, 1) == pytest.approx(1e-4)
    assert DISK.without_latency().request_bytes is None


def test_limits_come_lowest_first() -> None:
    machine = Machine(
        store=MEASURED,
        link=LinkModel(bytes_s=1e9),
        tiers=(DISK, DISK),
        copy=Curve.flat(10e9),
        decode=Curve(counts=(1, 2), bytes_s=(30e6, 60e6)),
    )
    limits = {limit.resource: limit.samples_s for limit in sample_limits(machine, 100_000)}
    assert list(limits) == ["decoding", "store", "disk tier", "disk tier 2", "copies"]
    assert limits["decoding"] == 600
    assert limits["store"] == pytest.approx(1000)
    assert limits["copies"] == 100_000


def test_small_samples_show_what_reading_them_together_wins() -> None:
    machine = Machine(store=MEASURED, link=LinkModel(bytes_s=1e9))
    limits = {limit.resource: limit.samples_s for limit in sample_limits(machine, 1_000)}
    alone, together = limits["store, one by one"], limits["store, neighbours together"]
    assert alone == pytest.approx(64 / (0.02 + 1_000 / 55e6))
    assert together == pytest.approx(100_000)
    with pytest.raises(OptionError, match="more than 0 bytes"):
        sample_limits(machine, 0)


def test_the_useful_number_is_the_least_that_nearly_reaches_the_best() -> None:
    assert useful_count(MEASURED.throughput) == 64
    assert useful_count(Curve(counts=(1, 2, 4), bytes_s=(10.0, 9.0, 10.7))) == 4
    assert useful_count(Curve(counts=(1, 2, 4), bytes_s=(10.0, 9.0, 10.4))) == 1


@pytest.mark.parametrize("wrong", [{"request_bytes": 0}, {"latency_s": -1.0}])
def test_nonsense_is_refused(wrong: dict[str, float]) -> None:
    fields = {"latency_s": 0.0, "latency_p99_s": 0.0, "throughput": Curve.flat(1e6)}
    with pytest.raises(OptionError, match="at least"):
        StoreModel(**{**fields, **wrong})  # type: ignore[arg-type]
