from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.storage import Merged, merge_ranges

_ranges = st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 300)), max_size=60)
_gaps = st.integers(0, 100)
_bounds = st.integers(1, 500)


def _merged(ranges: list[tuple[int, int]], gap: int, bound: int) -> Merged:
    offsets = [offset for offset, _ in ranges]
    lengths = [length for _, length in ranges]
    return merge_ranges(offsets, lengths, gap_bytes_max=gap, length_bytes_max=bound)


@given(_ranges, _gaps, _bounds)
def test_each_wanted_range_lies_inside_its_merged_one(
    ranges: list[tuple[int, int]], gap: int, bound: int
) -> None:
    merged = _merged(ranges, gap, bound)
    for (offset, length), index, inside in zip(ranges, merged.index, merged.inside, strict=True):
        assert merged.offsets[index] + inside == offset
        assert inside >= 0
        assert inside + length <= merged.lengths[index]


@given(_ranges, _gaps, _bounds)
def test_no_merged_range_is_too_long_unless_a_wanted_one_is(
    ranges: list[tuple[int, int]], gap: int, bound: int
) -> None:
    merged = _merged(ranges, gap, bound)
    for number, length in enumerate(merged.lengths):
        longest = max(
            size for (_, size), index in zip(ranges, merged.index, strict=True) if index == number
        )
        assert length <= max(bound, longest)


@given(_ranges, _gaps, _bounds)
def test_no_gap_inside_a_merged_range_is_too_wide(
    ranges: list[tuple[int, int]], gap: int, bound: int
) -> None:
    merged = _merged(ranges, gap, bound)
    for number, start in enumerate(merged.offsets):
        reached = int(start)
        parts = [part for part, index in zip(ranges, merged.index, strict=True) if index == number]
        assert parts
        for offset, length in sorted(parts):
            assert offset - reached <= gap
            reached = max(reached, offset + length)
        assert reached == start + merged.lengths[number]


@given(_ranges, _gaps)
def test_without_a_bound_what_is_near_is_merged(ranges: list[tuple[int, int]], gap: int) -> None:
    merged = _merged(ranges, gap, 10**9)
    ends = merged.offsets + merged.lengths
    assert np.all(merged.offsets[1:] - ends[:-1] > gap)


@given(_ranges, _gaps, _bounds)
def test_merged_ranges_come_in_order(ranges: list[tuple[int, int]], gap: int, bound: int) -> None:
    merged = _merged(ranges, gap, bound)
    assert np.all(np.diff(merged.offsets) >= 0)


def test_a_long_run_of_neighbours_is_cut_at_the_bound() -> None:
    offsets = np.arange(1000) * 100
    merged = merge_ranges(offsets, np.full(1000, 100), gap_bytes_max=0, length_bytes_max=1000)
    assert merged.lengths.tolist() == [1000] * 100
