"""Cells: the parts of a unit that have a checksum of their own.

A unit may hold hundreds of small samples. Checking all of it to use one of them would read it
hundreds of times, so such a unit is cut where the pages of the data file end, and each *cell* has a
sum. A read takes whole cells: for a row of some hundred bytes that is the page that the device
reads anyway.

The first and the last cell also take what lies beside the unit's whole pages. So every cell has a
page that belongs to its unit alone, and the number of that page is the place of its sum: nothing
has to be kept or looked up to find it. A unit with less than two whole pages is one cell, and so is
a large one, which holds one sample or one block; their sum is that of the unit.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import xxhash

from penstock.storage.tier_shape import Bools, Ints

CELL_BYTES = 4096
CUT_BYTES_MAX = 1 << 20
"""Longer units are not cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """The cells that some ranges of units touch, by range."""

    is_whole: Bools
    """Whether they are all of the unit: then the unit's own sum counts."""
    first: Ints
    """The page of the first cell."""
    begins: Ints
    """Where the first cell begins in the layout."""
    ends: Ints
    """Where the last cell ends."""


def cells_of(offsets: Ints, lengths: Ints, inside: Ints, sizes: Ints) -> Cells:
    """Return the cells that hold `sizes` bytes from `inside` on, of units somewhere in the layout.

    >>> cells = cells_of(*np.array([[5000], [20_000], [9000], [500]]))
    >>> int(cells.first[0]), int(cells.begins[0]), int(cells.ends[0])
    (3, 12288, 16384)
    """
    low, high = _pages(offsets, lengths)
    start = offsets + inside
    first = np.clip(start // CELL_BYTES, low, high - 1)
    last = np.clip((start + np.maximum(sizes, 1) - 1) // CELL_BYTES, low, high - 1)
    is_cut = (high - low >= 2) & (lengths <= CUT_BYTES_MAX)
    begins = np.where(is_cut & (first > low), first * CELL_BYTES, offsets)
    ends = np.where(is_cut & (last < high - 1), (last + 1) * CELL_BYTES, offsets + lengths)
    is_whole = (begins == offsets) & (ends == offsets + lengths)
    return Cells(is_whole=is_whole, first=first, begins=begins, ends=ends)


def _pages(offsets: Ints, lengths: Ints) -> tuple[Ints, Ints]:
    """Return the first whole page of each unit, and the one behind its last."""
    return -(-offsets // CELL_BYTES), (offsets + lengths) // CELL_BYTES


def cell_sums(data: memoryview, begin: int, first: int) -> bytes:
    """Return the sums of cells in a row, the first of which is that of page `first`.

    `data` begins at `begin` in the layout and ends where the last cell does.
    """
    cut, last = (first + 1) * CELL_BYTES - begin, data.nbytes - CELL_BYTES
    if cut > last:
        return xxhash.xxh3_64_digest(data)
    # What is behind the last whole page belongs to the cell before.
    cuts = [0, *range(cut, last + 1, CELL_BYTES), data.nbytes]
    return b"".join([xxhash.xxh3_64_digest(data[a:b]) for a, b in itertools.pairwise(cuts)])


def cells_in(offset: int, length: int) -> tuple[int, int]:
    """Return the page of a unit's first cell, and how many cells it has; none where it is one."""
    low, high = -(-offset // CELL_BYTES), (offset + length) // CELL_BYTES
    return (low, high - low) if high - low >= 2 and length <= CUT_BYTES_MAX else (low, 0)
