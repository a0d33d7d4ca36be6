"""Tiers as shelves: several of them, growing ones, closed ones."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import xxhash
from tests.engine.peers.transport_kit import SHELF, ranges_of
from tests.storage.conftest import fill, shape_of, unit_bytes

from penstock.engine.peers.base import UNCHECKED, HeldFile, Lookup, Shelf
from penstock.engine.peers.requests import segments_of
from penstock.engine.peers.shelf import TierShelf
from penstock.engine.peers.wire import INSIDE, LENGTH
from penstock.storage.tier import Tiers
from penstock.storage.tier_open import open_tiers
from penstock.storage.tier_sizes import Disk, Memory

SHAPE = shape_of([1000, 5000, 0, 4096, 1, 20_000] * 10)


def a_shelf(tiers: Tiers) -> TierShelf:
    return TierShelf(SHELF, tiers, lambda: 3, lambda: True)


def bytes_in(found: HeldFile, unit: int) -> bytes:
    return os.pread(found.descriptor, int(SHAPE.lengths[unit]), int(SHAPE.offsets[unit]))


def find(shelf: Shelf, unit: int) -> HeldFile | None:
    """The file that holds a unit, once the unit has been checked."""
    row = ranges_of([unit])
    if shelf.lookup(row).places[0] == UNCHECKED:
        shelf.settle(row[:, 0])
    found = shelf.lookup(row)
    return found.files[found.places[0]] if found.places[0] >= 0 else None


def test_units_are_found_in_whichever_tier_they_lie(tmp_path: Path) -> None:
    with open_tiers([Memory(200_000, folder=tmp_path), Disk(tmp_path, "1MB")], SHAPE) as tiers:
        shelf = a_shelf(tiers)
        fill(tiers, list(range(0, 60, 2)))
        for unit in range(60):
            found = find(shelf, unit)
            assert (found is None) == (unit % 2 == 1)
            if found is not None:
                assert bytes_in(found, unit) == unit_bytes(unit, int(SHAPE.lengths[unit]))
        found_all = shelf.lookup(ranges_of(range(60)))
        assert set(found_all.places.tolist()) == {-1, 0, 1}
        assert found_all.files[1].is_disk


def test_many_ranges_are_found_as_one_by_one(tmp_path: Path) -> None:
    with open_tiers([Memory(200_000, folder=tmp_path), Disk(tmp_path, "1MB")], SHAPE) as tiers:
        fill(tiers, list(range(0, 60, 3)))
        shelf = a_shelf(tiers)
        many = shelf.lookup(ranges_of(range(60)))
        single = [shelf.lookup(ranges_of([unit])) for unit in range(60)]
        assert many.places.tolist() == [int(one.places[0]) for one in single]
        assert many.sums.tolist() == [int(one.sums[0]) for one in single]


def test_what_an_earlier_run_left_is_unchecked_until_it_is_settled(tmp_path: Path) -> None:
    with open_tiers([Disk(tmp_path, "1MB")], SHAPE) as tiers:
        fill(tiers)
    with open_tiers([Disk(tmp_path, "1MB")], SHAPE) as tiers:
        shelf, rows = a_shelf(tiers), ranges_of([5, 6])
        assert shelf.lookup(rows).places.tolist() == [UNCHECKED, UNCHECKED]
        shelf.settle(rows[:, 0])
        assert shelf.lookup(rows).places.tolist() == [0, 0]
        assert find(shelf, 7) is not None


def test_bytes_on_their_way_outlive_the_tiers(tmp_path: Path) -> None:
    with open_tiers([Memory("1MB", folder=tmp_path)], SHAPE) as tiers:
        fill(tiers)
        shelf = a_shelf(tiers)
        found = find(shelf, 5)
    assert found is not None
    assert bytes_in(found, 5) == unit_bytes(5, 20_000)
    assert (shelf.lookup(ranges_of([5, 6])).places < 0).all()
    assert (a_shelf(tiers).lookup(ranges_of([5])).places < 0).all()


def test_a_spoilt_unit_is_absent(tmp_path: Path) -> None:
    with open_tiers([Memory("1MB", folder=tmp_path)], SHAPE) as tiers:
        fill(tiers)
        shelf = a_shelf(tiers)
        shelf.spoil(5)
        assert shelf.lookup(ranges_of([4, 5, 6])).places.tolist() == [0, -1, 0]


@pytest.mark.parametrize("num_others", [0, 20])
def test_a_part_comes_with_a_sum_of_its_own_and_is_absent_when_it_is_damaged(
    tmp_path: Path, num_others: int
) -> None:
    with open_tiers([Memory("1MB", folder=tmp_path)], SHAPE) as tiers:
        fill(tiers)
        shelf = a_shelf(tiers)
        rows = ranges_of([5, 11, *range(20, 20 + num_others)])
        rows[:2, INSIDE], rows[:2, LENGTH] = 9000, 100
        part = unit_bytes(5, 20_000)[9000:9100]
        assert shelf.lookup(rows).sums[0] == xxhash.xxh3_64_intdigest(part)
        os.pwrite(tiers.tiers[0].descriptor, b"other bytes", int(SHAPE.offsets[11]) + 9050)
        assert shelf.lookup(rows).places.tolist() == [0, -1, *[0] * num_others]


def test_neighbours_are_sent_in_one_and_gaps_are_not() -> None:
    rows = ranges_of([0, 1, 2, 3, 9, 10, 5])
    rows[3, INSIDE], rows[3, LENGTH] = 0, 4000
    found = Lookup(
        places=np.array([0, 0, 0, 0, 1, 1, -1]),
        files=("memory", "disk"),  # type: ignore[arg-type]
        sums=np.zeros(7, np.uint64),
    )
    segments = [(s.file, s.offset, s.length) for s in segments_of(rows, found)]
    nine = int(SHAPE.offsets[9])
    assert segments == [("memory", 0, 1000 + 5000 + 0 + 4000), ("disk", nine, 4096 + 1)]
