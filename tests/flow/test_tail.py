"""Latency by size, and its tail."""

from __future__ import annotations

import random
from statistics import quantiles

import pytest

from penstock.flow.budget import SourcePrior
from penstock.flow.tail import RATIO_CLIP, LatencyTail


def test_quantiles_are_those_of_what_was_seen() -> None:
    source = random.Random(7)
    times = [0.02 * source.lognormvariate(0.0, 0.6) for _ in range(4000)]
    tail = LatencyTail()
    for time_s in times:
        tail.add(100_000, time_s)
    cuts = quantiles(times[-1000:], n=1000)
    assert tail.p50_s(100_000) == pytest.approx(cuts[499], rel=0.2)
    assert tail.p95_s(100_000) == pytest.approx(cuts[949], rel=0.25)
    assert tail.p99_s(100_000) == pytest.approx(cuts[989], rel=0.35)
    assert tail.p50_s(1) <= tail.p95_s(1) <= tail.p99_s(1) <= tail.p999_s(1)


def test_size_and_first_byte_are_told_apart() -> None:
    source = random.Random(7)
    tail = LatencyTail()
    for _ in range(3000):
        size_bytes = source.choice([10_000, 100_000, 1_000_000, 5_000_000])
        noise = source.uniform(0.9, 1.1)
        tail.add(size_bytes, (0.02 + size_bytes / 50e6) * noise)
    assert tail.expected_s(0) == pytest.approx(0.02, rel=0.4)
    assert tail.expected_s(5_000_000) == pytest.approx(0.12, rel=0.15)


def test_one_size_says_nothing_about_bandwidth_but_is_itself_known() -> None:
    tail = LatencyTail()
    for _ in range(500):
        tail.add(100_000, 0.05)
    assert tail.expected_s(100_000) == pytest.approx(0.05)
    assert 0.05 < tail.expected_s(1_000_000) < 0.5


def test_stragglers_show_in_the_tail_and_not_in_the_middle() -> None:
    tail = LatencyTail()
    counted = [tail.add(100_000, 2.0 if i % 50 == 49 else 0.02) for i in range(2000)]
    assert tail.expected_s(100_000) == pytest.approx(0.02, rel=0.2)
    assert tail.p95_s(100_000) < 0.03
    assert tail.p99_s(100_000) > 1.0
    assert max(counted[100:]) < RATIO_CLIP * 0.03


def test_what_is_old_fades() -> None:
    tail = LatencyTail()
    for _ in range(3000):
        tail.add(100_000, 0.2)
    for _ in range(300):
        tail.add(100_000, 0.02)
    assert tail.expected_s(100_000) < 0.03
    for _ in range(5000):
        tail.add(100_000, 0.02)
    assert tail.p999_s(100_000) < 0.03


def test_a_source_that_is_slow_all_over_is_believed_soon() -> None:
    tail = LatencyTail()
    for _ in range(1000):
        tail.add(100_000, 0.02)
    for _ in range(200):
        tail.add(100_000, 0.2)
    assert tail.expected_s(100_000) > 0.15


def test_it_can_go_on_for_millions_of_answers() -> None:
    tail = LatencyTail()
    tail._unit = 1e99  # As after a quarter of a million.
    for _ in range(5000):
        tail.add(100_000, 0.02)
    assert tail._unit < 1e4
    assert tail.p99_s(100_000) == pytest.approx(0.02, rel=0.1)


def test_a_prior_stands_until_something_is_seen() -> None:
    prior = SourcePrior(latency_s=0.1, latency_p99_s=0.5, bytes_s=1e8)
    assert LatencyTail(prior).p50_s(1000) == pytest.approx(0.1)
    assert LatencyTail(prior).p99_s(1000) == pytest.approx(0.5)


def test_nothing_and_no_time_are_no_trouble() -> None:
    tail = LatencyTail()
    for _ in range(100):
        tail.add(0, 0.0)
    assert tail.expected_s(0) > 0
    assert tail.p99_s(0) >= 0


def test_large_answers_that_come_faster_do_not_turn_time_around() -> None:
    """As when large objects are cached by the store, and small ones are not."""
    tail = LatencyTail()
    for i in range(1000):
        tail.add(*((1_000_000, 0.01) if i % 2 else (1000, 0.1)))
    assert 0 < tail.expected_s(100_000_000) < 1.0
