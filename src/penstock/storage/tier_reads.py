"""Reading from a tier: bytes are copied out, and the copy is checked.

A tier is a cache on a device that may fail, in files that others can write to. So the order is
fixed: read the cells that hold what is wanted (`tier_cells`), compare the sum of what was read with
the one that was written, and only then hand it over. What was checked is what is delivered, however
the files change meanwhile. Bytes that are not there, cannot be read or have another sum are the
same to the caller: not here.
"""

from __future__ import annotations

import os

import numpy as np
import xxhash

from penstock.storage.tier_cells import cell_sums, cells_in, cells_of
from penstock.storage.tier_files import Bytes, TierFiles, read_into
from penstock.storage.tier_shape import Ints, TierShape


class TierReads:
    """Checked reads of one tier."""

    def __init__(self, files: TierFiles, shape: TierShape) -> None:
        self._files, self._shape = files, shape

    def copy(
        self, units: Ints, inside: Ints, sizes: Ints, target: memoryview, starts: Ints
    ) -> list[int]:
        """Copy parts of units into `target`, each to its start; return which ones are not here.

        `target` may have been written to for those as well.
        """
        offsets = self._shape.offsets[units]
        cells = cells_of(offsets, self._shape.lengths[units], inside, sizes)
        # As they lie in the file, so that small samples that share a cell come one after another.
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
                is_good = self._has_read(target[start : start + size], begin, unit, first)
                at_hand = (-1, -1)
            else:
                if at_hand != (begin, length):
                    if scratch.nbytes < length:
                        scratch = np.empty(length, np.uint8).data
                    is_good = self._has_read(scratch[:length], begin, unit, first)
                    at_hand = begin, length
                target[start : start + size] = scratch[at : at + size]
            if not is_good:
                missing.append(number)
        return missing

    def part(self, unit: int, inside: int, size: int) -> Bytes | None:
        """Return a part of a unit; None where it is not here."""
        target = np.empty(size, np.uint8)
        asked = np.array([[unit], [inside], [size], [0]], np.int64)
        missing = self.copy(asked[0], asked[1], asked[2], target.data, asked[3])
        return None if missing else target

    def whole(self, unit: int) -> memoryview | None:
        """Return a unit; None where it is not here."""
        offset, length = self._shape.extent(unit)
        return self.at(unit, offset, length)

    def at(self, unit: int, offset: int, length: int) -> memoryview | None:
        """Return a unit, for those who know where it lies and have no layout."""
        target = np.empty(length, np.uint8).data
        return target if self._has_read(target, offset, unit, 0) else None

    def _has_read(self, view: memoryview, begin: int, unit: int, first: int) -> bool:
        """Read bytes from `begin` on and check them: as a unit, or as cells from page `first`."""
        files = self._files
        try:
            if not read_into(files.data_descriptor, view, begin):
                return False
            if unit >= 0:
                return xxhash.xxh3_64_intdigest(view) == files.sum_of(unit)
            sums = cell_sums(view, begin, first)
            return sums == os.pread(files.cells_descriptor, len(sums), 8 * first)
        except OSError:
            return False

    def write_sums(self, unit: int, data: memoryview) -> None:
        """Write the sums of a unit and of its cells."""
        offset, length = self._shape.extent(unit)
        first, count = cells_in(offset, length)
        cells = cell_sums(data, offset, first) if count else b""
        self._files.write_sums(unit, xxhash.xxh3_64_intdigest(data), first, cells)
