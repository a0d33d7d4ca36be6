"""The layout: every unit has a place of its own, small classes first, on every machine the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.plan.placement import layout_of, offsets_of
from penstock.plan.units import Units


@given(st.lists(st.integers(0, 2**40), max_size=50))
def test_units_tile_the_sequence_in_classes_of_rising_size(sizes: list[int]) -> None:
    lengths = np.array(sizes, np.int64)
    offsets = offsets_of(lengths)
    classes = [s.bit_length() for s in sizes]
    at = 0
    for number in sorted(range(len(sizes)), key=lambda i: (classes[i], i)):
        assert offsets[number] == at
        at += sizes[number]


@pytest.mark.parametrize("name", ["mixed_tar", "two_tables", "parquet", "files"])
def test_the_layout_of_a_data_set_holds_every_unit_once(
    datasets: dict[str, penstock.Dataset], name: str
) -> None:
    units = Units.of(datasets[name])
    layout = layout_of(units)
    filled = np.zeros(layout.size_bytes, np.int8)
    for offset, length in zip(layout.offsets, layout.lengths, strict=True):
        filled[offset : offset + length] += 1
    assert (filled == 1).all()
    assert layout.size_bytes == units.size_bytes


def test_neighbours_of_one_size_stay_neighbours() -> None:
    lengths = np.full(100, 131_000, np.int64)
    assert offsets_of(lengths).tolist() == (np.arange(100) * 131_000).tolist()
