"""Rates and curves: counted exactly, interleaved, ended where more does not help."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import OptionError
from penstock.simulate.probe import QUICK, USUAL, Effort, useful_count
from penstock.simulate.probe.timing import curve_of, doubling, grown_curve, latencies, rate_of


def test_repeats_go_through_all_counts_in_turn_and_the_median_counts() -> None:
    asked: list[int] = []
    answers = iter([10.0, 20.0, 12.0, 22.0, 500.0, 1.0])

    def measure(count: int) -> float:
        asked.append(count)
        return next(answers)

    curve = curve_of([1, 2], measure, repeats=3)
    assert asked == [1, 2, 1, 2, 1, 2]
    assert curve.bytes_s == (12.0, 20.0)


def test_a_curve_stops_growing_when_it_no_longer_helps() -> None:
    asked: list[int] = []

    def measure(count: int) -> float:
        asked.append(count)
        return min(count, 4) * 100.0

    curve = grown_curve(doubling(64), measure, repeats=2)
    assert asked == [1, 2, 4, 8, 16, 1, 2, 4, 8, 16]
    assert curve.counts == (1, 2, 4, 8, 16)
    assert useful_count(curve) == 4


def test_one_bad_point_does_not_end_a_curve() -> None:
    rates = {1: 100.0, 2: 90.0, 4: 400.0, 8: 800.0}
    assert grown_curve([1, 2, 4, 8], lambda count: rates[count], repeats=1).counts == (1, 2, 4, 8)


@given(highest=st.integers(1, 1000))
def test_counts_double_up_to_the_highest(highest: int) -> None:
    counts = doubling(highest)
    assert (counts[0], counts[-1]) == (1, highest)
    assert all(a < b <= 2 * a for a, b in itertools.pairwise(counts))


def test_every_thread_works_at_least_once_and_no_longer_than_there_is_work() -> None:
    done: list[int] = []

    def worker(number: int) -> Iterator[int]:
        for _ in range(3):
            done.append(number)
            yield 7

    assert rate_of(4, worker, seconds=60.0) > 0
    assert sorted(done) == sorted([0, 1, 2, 3] * 3)
    done.clear()
    rate_of(4, worker, seconds=0.0)
    assert sorted(done) == [0, 1, 2, 3]


def test_an_error_in_a_thread_reaches_the_caller() -> None:
    def worker(number: int) -> Iterator[int]:
        yield 1
        if number == 2:
            raise OSError("as planned")

    with pytest.raises(OSError, match="as planned"):
        rate_of(3, worker, seconds=0.2)


def test_latencies_are_bounded_in_number_and_at_least_one() -> None:
    assert len(latencies(iter([1] * 100), seconds=60.0, count_max=5)) == 5
    assert len(latencies(iter([1] * 100), seconds=0.0, count_max=5)) == 1


def test_an_effort_refuses_nonsense() -> None:
    assert QUICK.store_s < USUAL.store_s
    for wrong in ({"copy_s": 0.0}, {"repeats": 0}, {"store_bytes_max": 10}):
        times = {f"{name}_s": 1.0 for name in ("copy", "memory", "disk", "store", "decode")}
        with pytest.raises(OptionError, match="a probe"):
            Effort(**{**times, **wrong})  # type: ignore[arg-type]
