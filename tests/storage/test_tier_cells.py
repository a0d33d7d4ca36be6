"""Cells: every byte of a unit has one sum, and no two cells share a place."""

import os
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.storage.conftest import fill, shape_of, unit_bytes

from penstock.storage.tier_cells import CELL_BYTES, cells_in, cells_of
from penstock.storage.tier_open import open_tiers
from penstock.storage.tier_sizes import Disk

LENGTHS = st.lists(st.integers(0, 5 * CELL_BYTES), min_size=1, max_size=30)


@given(lengths=LENGTHS)
def test_no_two_cells_have_the_same_place(lengths: list[int]) -> None:
    shape = shape_of(lengths)
    seen: set[int] = set()
    for unit in range(shape.num_units):
        first, count = cells_in(*shape.extent(unit))
        places = set(range(first, first + count))
        assert not seen & places
        seen |= places


@given(lengths=LENGTHS, data=st.data())
def test_cells_hold_what_is_asked_for_and_end_in_their_unit(
    lengths: list[int], data: st.DataObject
) -> None:
    shape = shape_of(lengths)
    unit = data.draw(st.integers(0, len(lengths) - 1))
    offset, length = shape.extent(unit)
    inside = data.draw(st.integers(0, length))
    size = data.draw(st.integers(0, length - inside))
    cells = cells_of(*np.array([[offset], [length], [inside], [size]]))
    begin, end = int(cells.begins[0]), int(cells.ends[0])
    assert offset <= begin <= offset + inside
    assert offset + inside + size <= end <= offset + length
    assert end - begin <= size + 4 * CELL_BYTES
    if not cells.is_whole[0]:
        first, count = cells_in(offset, length)
        assert first <= cells.first[0] < first + count


@given(data=st.data())
def test_parts_of_units_are_what_was_written_or_not_there(
    tmp_path_factory: object, data: st.DataObject
) -> None:
    lengths = [1, 700, 3 * CELL_BYTES, 9 * CELL_BYTES + 5, 2 * CELL_BYTES, 40_000]
    shape = shape_of(lengths)
    folder = Path(tmp_path_factory.mktemp("cells"))  # type: ignore[attr-defined]
    with open_tiers([Disk(folder, "1MB")], shape) as tiers:
        fill(tiers)
        (tier,) = tiers.tiers
        flips = data.draw(st.lists(st.integers(0, shape.size_bytes - 1), max_size=3))
        for at in flips:
            old = os.pread(tier.descriptor, 1, at)[0]
            os.pwrite(tier.descriptor, bytes([old ^ 0x10]), at)
        for _ in range(5):
            unit = data.draw(st.integers(0, len(lengths) - 1))
            inside = data.draw(st.integers(0, lengths[unit] - 1))
            size = data.draw(st.integers(1, lengths[unit] - inside))
            expected = unit_bytes(unit, lengths[unit])[inside : inside + size]
            found = tier.read_part(unit, inside, size) if tier.is_held(unit) else None
            assert found is None or found.tobytes() == expected
            if found is None:
                assert any(0 <= at - int(shape.offsets[unit]) < lengths[unit] for at in flips)
