"""Spans: every unit is in one, none gets lost, and their number is bounded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import OptionError
from penstock.flow.layout.placement import UnitLayout, offsets_of
from penstock.flow.layout.spans import SPAN_BYTES_MIN, SPANS_MAX, Spans, span_bytes_of, spans_of


def layout_of_sizes(lengths: list[int] | np.ndarray) -> UnitLayout:
    array = np.asarray(lengths, np.int64)
    return UnitLayout(offsets=offsets_of(array), lengths=array, size_bytes=int(array.sum()))


@given(st.lists(st.sampled_from([0, 1, 700, 65_535, 65_536, 300_000]), max_size=60))
def test_a_span_has_the_bytes_of_the_units_that_begin_in_it(sizes: list[int]) -> None:
    layout = layout_of_sizes(sizes)
    spans = spans_of(layout)
    numbers = spans.number_of(layout.offsets)
    expected = [int(layout.lengths[numbers == n].sum()) for n in range(spans.num_spans)]
    assert spans.lengths.tolist() == expected
    assert spans.size_bytes == layout.size_bytes
    assert (np.diff(numbers[np.argsort(layout.offsets, kind="stable")]) >= 0).all()


@given(st.integers(0, 2**60))
def test_spans_are_few_and_as_narrow_as_they_can_be(size_bytes: int) -> None:
    span_bytes = span_bytes_of(size_bytes)
    assert size_bytes // span_bytes + 1 <= SPANS_MAX
    assert span_bytes == SPAN_BYTES_MIN or size_bytes // (span_bytes // 2) + 1 > SPANS_MAX


def test_the_number_of_spans_does_not_follow_the_number_of_units() -> None:
    small, large = np.full(1_000_000, 2**20), np.full(1_000, 2**30)
    assert spans_of(layout_of_sizes(small)).num_spans < SPANS_MAX
    assert spans_of(layout_of_sizes(large)).num_spans < SPANS_MAX


def test_nonsense_is_refused() -> None:
    with pytest.raises(OptionError, match="power of two of bytes wide, got 100000"):
        Spans(span_bytes=100_000, lengths=np.zeros(1, np.int64))
