"""Reads from a tier: copies bytes out and checks the copy.

A tier is a cache on a device that may fail, in files that others can write to. So the order is
fixed: read the cells that hold the wanted bytes (`tier_cells`), compare the sum of the copy with
the sum that was written, and only then return the copy. So the caller gets the bytes that were
checked, even if the file changes meanwhile. Bytes that are absent, unreadable or have another sum
are all reported as "not here".
"""

from __future__ import annotations

import os
from typing import Protocol

import numpy as np
import xxhash

from penstock.storage.tier_cells import cell_sums, cells_of
from penstock.storage.tier_shape import Ints

UNIT, UNIT_OFFSET, UNIT_LENGTH, INSIDE, LENGTH = range(5)
"""Columns of ranges: a unit, its place in the layout, and the wanted part of it."""


class ReadableTier(Protocol):
    """The files of a tier."""

    cells_descriptor: int

    def read_data(self, target: memoryview, offset: int) -> bool:
        """Fill a buffer from the data file; False if the file ends before."""

    def sum_of(self, unit: int) -> int:
        """Return the sum that was written for a unit."""


def copy_ranges(files: ReadableTier, ranges: Ints, target: memoryview, starts: Ints) -> list[int]:
    """Copy ranges into `target`, each to its start; return the numbers of those not here.

    Their parts of `target` may hold any bytes afterwards.
    """
    units, offsets, lengths, inside, sizes = ranges.T
    cells = cells_of(offsets, lengths, inside, sizes)
    order = np.arange(len(ranges))
    if not cells.is_whole.all():
        # In file order, so that small samples in the same cell are adjacent and share one read.
        order = np.argsort(cells.begins, kind="stable")
    columns = (
        order,
        np.where(cells.is_whole, units, -1)[order],
        cells.first[order],
        cells.begins[order],
        (cells.ends - cells.begins)[order],
        (offsets + inside - cells.begins)[order],
        sizes[order],
        starts[order],
    )
    missing = []
    scratch, at_hand, is_good = memoryview(b""), (-1, -1), False
    places = zip(*(column.tolist() for column in columns), strict=True)
    for number, unit, first, begin, length, at, size, start in places:
        if length == size:
            is_good = _has_read(files, target[start : start + size], begin, unit, first)
            at_hand = (-1, -1)
        else:
            if at_hand != (begin, length):
                if scratch.nbytes < length:
                    scratch = np.empty(length, np.uint8).data
                is_good = _has_read(files, scratch[:length], begin, unit, first)
                at_hand = begin, length
            target[start : start + size] = scratch[at : at + size]
        if not is_good:
            missing.append(number)
    return missing


def read_unit(files: ReadableTier, unit: int, offset: int, length: int) -> memoryview | None:
    """Return a unit; None if it is not here."""
    target = np.empty(length, np.uint8).data
    return target if _has_read(files, target, offset, unit, 0) else None


def range_sums(files: ReadableTier, ranges: Ints) -> list[int | None]:
    """Return the sum of each range's own bytes as they are now; None if it is not here."""
    ends = np.cumsum(ranges[:, LENGTH])
    starts = ends - ranges[:, LENGTH]
    target = np.empty(int(ends[-1]) if len(ends) else 0, np.uint8).data
    missing = set(copy_ranges(files, ranges, target, starts))
    return [
        None if number in missing else xxhash.xxh3_64_intdigest(target[start:end])
        for number, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True))
    ]


def _has_read(files: ReadableTier, view: memoryview, begin: int, unit: int, first: int) -> bool:
    """Read bytes at `begin` and check them: as a unit, or (-1) as cells from page `first` on."""
    try:
        if not files.read_data(view, begin):
            return False
        if unit >= 0:
            return xxhash.xxh3_64_intdigest(view) == files.sum_of(unit)
        sums = cell_sums(view, begin, first)
        return sums == os.pread(files.cells_descriptor, len(sums), 8 * first)
    except OSError:
        return False
