"""Which units a cache holds when two windows are known: rules that hold for every string."""

import numpy as np
import pytest
from benchmarks.policies.belady import min_hits
from hypothesis import given
from hypothesis import strategies as st

from penstock.flow.residency import Residency, WindowResidency

NUM_UNITS = 12
strings = st.lists(st.integers(0, NUM_UNITS - 1), min_size=1, max_size=60)
lengths_of = st.lists(st.integers(1, 5), min_size=NUM_UNITS, max_size=NUM_UNITS)
gaps_of = st.lists(st.floats(1, 100), min_size=NUM_UNITS, max_size=NUM_UNITS)


def ints(values: list[int]) -> np.ndarray:
    return np.array(values, np.int64)


def replayed(held: set[int], used: list[int], found: WindowResidency) -> set[int]:
    """Follow the decisions, and check that hits are what lies there."""
    held, left = (
        set(held),
        list(zip(found.evicted_at.tolist(), found.evicted.tolist(), strict=True)),
    )
    for i, unit in enumerate(used):
        assert found.is_hit[i] == (unit in held)
        while left and left[0][0] == i:
            held.remove(left.pop(0)[1])
        if found.is_admitted[i]:
            assert unit not in held
            held.add(unit)
    assert not left
    return held


@given(
    windows=st.lists(strings, min_size=2, max_size=4),
    lengths=lengths_of,
    gaps=gaps_of,
    capacity=st.integers(0, 30),
)
def test_decisions_are_consistent_and_never_exceed_the_capacity(
    windows: list[list[int]], lengths: list[int], gaps: list[float], capacity: int
) -> None:
    residency, held = Residency(ints(lengths), capacity), set()
    for used, after in zip(windows, [*windows[1:], []], strict=True):
        found = residency.window(ints(used), ints(after), np.array(gaps))
        held = replayed(held, used, found)
        assert held == set(residency.held.tolist())
        assert sum(lengths[unit] for unit in held) == residency.held_bytes <= capacity


@given(used=strings, capacity=st.integers(1, NUM_UNITS))
def test_with_the_whole_future_known_it_is_the_best_there_is(
    used: list[int], capacity: int
) -> None:
    ones = np.ones(NUM_UNITS, np.int64)
    found = Residency(ones, capacity).window(ints(used), ints([]), np.full(NUM_UNITS, np.inf))
    assert int(found.is_hit.sum()) == int(
        np.sum(min_hits(ints(used), np.ones(len(used)), capacity))
    )


@given(used=strings, after=strings, gaps=gaps_of, capacity=st.integers(1, 6))
def test_nothing_is_evicted_for_what_is_used_later(
    used: list[int], after: list[int], gaps: list[float], capacity: int
) -> None:
    ones = np.ones(NUM_UNITS, np.int64)
    found = Residency(ones, capacity).window(ints(used), ints(after), np.array(gaps))
    string = used + after

    def next_use(unit: int, since: int) -> float:
        later = [i for i in range(since, len(string)) if string[i] == unit]
        return later[0] if later else len(string) + gaps[unit]

    for victim, at in zip(found.evicted.tolist(), found.evicted_at.tolist(), strict=True):
        assert next_use(victim, at) > next_use(used[at], at + 1)


def test_what_is_less_likely_goes_first_behind_the_known_windows() -> None:
    residency = Residency(np.ones(4, np.int64), 2)
    gaps = np.array([10.0, 1000.0, 20.0, 100.0])
    residency.window(ints([0, 1, 2]), ints([]), gaps)
    assert sorted(residency.held.tolist()) == [0, 2]
    residency.window(ints([3]), ints([]), gaps)
    assert sorted(residency.held.tolist()) == [0, 2]


@pytest.mark.parametrize("capacity", [0, 3, 7, 100])
def test_what_is_there_already_is_held_once_as_far_as_it_fits(capacity: int) -> None:
    residency = Residency(np.array([3, 2, 2, 4]), capacity)
    fits = residency.hold(ints([0, 1, 2]))
    assert residency.held_bytes == int(np.array([3, 2, 2])[fits].sum()) <= capacity
    assert not residency.hold(ints([0, 1, 2])[fits]).any()
