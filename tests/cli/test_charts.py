"""Histograms count right and fit."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.charts import bar, histogram, log_bins
from penstock.cli.previews import preview

SIZES = st.lists(st.integers(0, 2**40), min_size=1, max_size=200)


@given(sizes=SIZES)
def test_every_sample_is_in_one_bin(sizes: list[int]) -> None:
    bins = log_bins(np.array(sizes))
    assert sum(b.count for b in bins) == len(sizes)
    assert all(a.high_bytes == b.low_bytes for a, b in pairwise(bins))


@given(sizes=SIZES, width=st.integers(40, 80))
def test_a_histogram_fits_its_width(sizes: list[int], width: int) -> None:
    assert all(len(line) <= width for line in histogram(log_bins(np.array(sizes)), width))


@given(share=st.floats(0, 1), width=st.integers(1, 80))
def test_a_bar_is_as_long_as_its_share(share: float, width: int) -> None:
    assert abs(len(bar(share, width)) - share * width) < 1.1


@given(
    value=st.recursive(
        st.none() | st.integers() | st.floats() | st.text() | st.binary() | st.booleans(),
        lambda inside: st.lists(inside) | st.dictionaries(st.text(), inside),
    )
)
def test_a_preview_is_one_short_line(value: object) -> None:
    shown = preview(value, 60)
    assert len(shown) <= 60
    assert "\n" not in shown
