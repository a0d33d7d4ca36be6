"""The layout: every unit has a place of its own, small classes first, on every machine the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.dataset.mixture import Mixture
from penstock.flow.layout import units as units_module
from penstock.flow.layout.placement import kept_by, layout_of, offsets_of
from penstock.flow.layout.units import Units


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


@pytest.mark.parametrize("name", ["mixed_tar", "two_tables", "parquet", "files", "several_parts"])
def test_in_a_shadow_every_unit_lies_where_it_lies_in_its_object(
    datasets: dict[str, penstock.Dataset], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units_module, "UNITS_MAX", -1)
    units = Units.of(datasets[name])
    layout = layout_of(units)
    assert layout.known is not None
    tables = [bound.part.tables for bound in datasets[name].bound]
    sizes = {(b, t): tables[b][t].sizes for b, t in units.tables}
    before = np.cumsum([0] + [int(each.sum()) for each in sizes.values()])
    begins = dict(zip(sizes, before.tolist(), strict=False))
    filled = np.zeros(layout.size_bytes, np.int8)
    for unit in units.between(0, units.num_units - 1).tolist():
        offset, length, e = layout.offsets[unit], layout.lengths[unit], units.extent(unit)
        table = e.bound_number, e.table
        assert offset == begins[table] + sizes[table][: e.object].sum() + e.offset
        assert length == e.length
        filled[offset : offset + length] += 1
    assert filled.max() == 1, "no two share a byte"
    assert layout.size_bytes == before[-1]
    assert layout.span_bytes(65536, layout.size_bytes // 65536 + 1).sum() == layout.size_bytes


def test_in_a_shadow_what_is_used_more_often_goes_first(
    datasets: dict[str, penstock.Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units_module, "UNITS_MAX", -1)
    mixed = Mixture([datasets["small_tar"], datasets["mixed_tar"]])
    units = Units.of(mixed)
    plain, often = layout_of(units), layout_of(units, np.array([1.0, 4.0]))
    (first, second) = units.table_bytes
    one = np.array([0, units.num_units - 1])
    assert (often.offsets[one] - plain.offsets[one]).tolist() == [second, -first]
    assert plain.known != often.known


def test_what_tiers_keep_and_leave_adds_up(tmp_path: Path) -> None:
    """Units hold the headers between rows; rows that have no place are counted without them."""
    with penstock.Writer(tmp_path / "set", shard_size="200KB") as writer:
        for number in range(400):
            writer.write({"bin": bytes(1000 + number), "cls": number})
    dataset = penstock.open(tmp_path / "set")[50:390]
    units = Units.of(dataset)
    layout = layout_of(units)
    rows = dataset.parts[0].tables[0].sample_bytes()[50:390]
    for capacity in (0, 1, layout.size_bytes // 3, layout.size_bytes):
        kept = kept_by(units, layout, capacity)
        assert kept.unit_bytes <= capacity
        assert kept.unit_bytes + kept.loose_run_bytes == units.size_bytes
        ends = layout.offsets[:] + layout.lengths[:]
        here = np.flatnonzero(ends <= capacity).tolist()
        inside = [rows[s - 50 : s - 50 + n].sum() for s, n in map(units.samples_of, here)]
        assert kept.loose_bytes == rows.sum() - sum(inside)
