"""Costs: the formulas against what a clock would show."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import OptionError
from penstock.flow import cost
from penstock.machine import Curve, StoreModel

LATENCIES = st.floats(0.0001, 1.0)
RATES = st.floats(1e5, 1e10)


@given(latency_s=LATENCIES, bytes_s=RATES, size=st.integers(1, 10**7))
def test_a_gap_is_worth_reading_just_up_to_the_break_even(
    latency_s: float, bytes_s: float, size: int
) -> None:
    gap = cost.merge_gap_bytes(latency_s, bytes_s)
    apart_s = 2 * cost.read_s(size, latency_s, bytes_s)
    smaller, larger = gap * 0.99 - 1, gap * 1.01 + 1
    assert cost.read_s(2 * size + smaller, latency_s, bytes_s) < apart_s
    assert cost.read_s(2 * size + larger, latency_s, bytes_s) > apart_s


@given(m=st.integers(2, 1_000), size=st.integers(10, 10**6), latency_s=LATENCIES, bytes_s=RATES)
def test_the_share_is_where_a_block_and_its_samples_take_the_same_time(
    m: int, size: int, latency_s: float, bytes_s: float
) -> None:
    share = cost.whole_block_share(m, size, latency_s, bytes_s)
    whole_s = cost.read_s(m * size, latency_s, bytes_s)
    samples_s = share * m * cost.read_s(size, latency_s, bytes_s)
    assert whole_s == pytest.approx(samples_s)
    assert 1 / m <= share <= 1 + 1e-12


def test_published_examples() -> None:
    assert cost.whole_block_share(76, 110_000, 0.1, 90e6) == pytest.approx(0.025, abs=0.001)
    sigma1 = 0.015 * math.exp(cost._Z99)
    assert cost.look_ahead_s(0.015, sigma1, 64 * 64) == pytest.approx(1.45, abs=0.03)


def test_a_full_link_wants_only_what_is_used() -> None:
    def whole(share: float, **more: bool) -> bool:
        return cost.reads_whole(
            share,
            num_samples=64,
            sample_bytes=110_000,
            latency_s=0.02,
            connection_bytes_s=50e6,
            **more,
        )

    assert whole(0.5)
    assert not whole(0.01)
    assert not whole(0.5, is_link_bound=True)
    assert whole(1.0, is_link_bound=True)
    assert cost.reads_whole(
        0.0, num_samples=1, sample_bytes=5, latency_s=0.1, connection_bytes_s=1e6
    ), "a block of one sample is that sample"
    assert cost.whole_block_share(64, 1000, 0.0, 1e9) == 1.0, "without latency nothing is gained"


def test_requests_in_flight_share_latency() -> None:
    alone = cost.merge_gap_bytes(0.02, 100e6)
    assert cost.merge_gap_bytes(0.02, 100e6, num_requests=20) == alone // 20
    with pytest.raises(OptionError, match="make no sense"):
        cost.merge_gap_bytes(0.02, 100e6, num_requests=0)


def store(**more: object) -> StoreModel:
    facts: dict[str, object] = {
        "latency_s": 0.02,
        "latency_p99_s": 0.1,
        "throughput": Curve(counts=(1, 10), bytes_s=(50e6, 500e6)),
    }
    return StoreModel(**(facts | more))  # type: ignore[arg-type]


def test_small_requests_are_ruled_by_latency_and_large_ones_by_the_link() -> None:
    assert cost.store_bytes_s(store(), 16 << 20) == pytest.approx(500e6)
    # 64 in flight, each 20 ms and a little: 64 · 1 kB / 20.02 ms.
    assert cost.store_bytes_s(store(), 1_000) == pytest.approx(64_000 / 0.02002)
    assert cost.store_bytes_s(store(latency_s=0.0), 0) == pytest.approx(500e6)


def test_a_curve_that_was_measured_with_latency_is_not_charged_with_it_again() -> None:
    # 1 MB alone: 20 ms latency and 20 ms transfer, so 25 MB/s were seen of a 50 MB/s connection.
    seen = Curve(counts=(1, 20), bytes_s=(25e6, 500e6))
    measured = store(throughput=seen, request_bytes=1_000_000)
    assert cost.connection_bytes_s(measured) == pytest.approx(50e6)
    assert cost.connection_bytes_s(store()) == pytest.approx(50e6)
    for size in (1_000, 100_000):
        assert cost.store_bytes_s(measured, size) == pytest.approx(
            cost.store_bytes_s(store(), size), rel=0.01
        )


def test_nodes_share_what_the_store_gives() -> None:
    shared = Curve(counts=(1, 4), bytes_s=(500e6, 1000e6))
    assert cost.store_bytes_s(store(shared=shared), 16 << 20, 1) == pytest.approx(500e6)
    assert cost.store_bytes_s(store(shared=shared), 16 << 20, 8) == 125e6
    limited = store(requests_s_max=100.0)
    assert cost.store_bytes_s(limited, 1_000_000, 2) == pytest.approx(50e6)


@given(size=st.integers(1_000, 10**7))
def test_the_requests_in_flight_bring_what_can_be_had(size: int) -> None:
    model = store()
    k = cost.requests_in_flight(model, size)
    assert cost._in_flight_bytes_s(model, k, size) >= 0.99 * cost.store_bytes_s(model, size)
    assert k == 1 or cost._in_flight_bytes_s(model, k // 2, size) < cost.store_bytes_s(model, size)


@pytest.mark.parametrize("sigma", [0.3, 1.0])
def test_the_depth_of_look_ahead_covers_the_tail(sigma: float) -> None:
    random = np.random.default_rng(8)
    p99_s = 0.01 * math.exp(sigma * cost._Z99)
    reads = 50
    slowest = np.exp(random.normal(math.log(0.01), sigma, (40_000, reads))).max(axis=1)
    depth_s = cost.look_ahead_s(0.01, p99_s, reads, late_share=0.05)
    assert (slowest > depth_s).mean() == pytest.approx(0.05, abs=0.006)
    assert cost.look_ahead_s(0.01, 0.01, reads) == 0.01
    assert cost.look_ahead_s(0.0, 0.0, reads) == 0.0
    assert math.isfinite(cost.look_ahead_s(0.01, p99_s, 10**12))
