"""Cells: the parts of a unit that have a checksum of their own.

A unit may hold hundreds of small samples, and reading all of it to check one sample would read it
hundreds of times. So such a unit is cut at page boundaries of the data file, and each *cell* has a
checksum. A read takes whole cells: for a row of some hundred bytes, that is the page which the
device reads anyway.

The first and the last cell also contain the bytes beside the unit's whole pages. So every cell has
a page that belongs to its unit alone, and the number of this page is the position of its sum; no
table is needed. A unit with fewer than two whole pages is one cell. So is a large unit, which holds
one sample or one block. Their sum is the sum of the unit.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import xxhash

from penstock.storage.tier_shape import Bools, Ints

CELL_BYTES = 4096
CUT_BYTES_MAX = 1 << 20
"""Units longer than this are not cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """The cells that some ranges of units touch, by range."""

    is_whole: Bools
    """Whether they cover the whole unit, so that its own sum is checked."""
    first: Ints
    """The page of the first cell."""
    begins: Ints
    """Where the first cell begins in the layout."""
    ends: Ints
    """Where the last cell ends."""


def cells_of(offsets: Ints, lengths: Ints, inside: Ints, sizes: Ints) -> Cells:
    """Return the cells with the `sizes` bytes from `inside` on, of units at `offsets`.

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
    """Return the first whole page of each unit, and the page behind its last whole one."""
    return -(-offsets // CELL_BYTES), (offsets + lengths) // CELL_BYTES


def cell_sums(data: memoryview, begin: int, first: int) -> bytes:
    """Return the sums of adjacent cells, of which the first has page `first`.

    `data` begins at `begin` in the layout and ends where the last cell does.
    """
    cut, last = (first + 1) * CELL_BYTES - begin, data.nbytes - CELL_BYTES
    if cut > last:
        return xxhash.xxh3_64_digest(data)
    # The bytes behind the last whole page belong to the last cell.
    cuts = [0, *range(cut, last + 1, CELL_BYTES), data.nbytes]
    return b"".join([xxhash.xxh3_64_digest(data[a:b]) for a, b in itertools.pairwise(cuts)])


def cells_in(offset: int, length: int) -> tuple[int, int]:
    """Return the page of a unit's first cell and its number of cells; 0 if it is not cut."""
    low, high = -(-offset // CELL_BYTES), (offset + length) // CELL_BYTES
    return (low, high - low) if high - low >= 2 and length <= CUT_BYTES_MAX else (low, 0)
