"""Checking what came from the store against the checksums of the index, where it has some."""

from __future__ import annotations

import numpy as np
import xxhash

from penstock.errors import CorruptError
from penstock.loader.holding import Holding


def check_unit(holding: Holding, unit: int, data: memoryview, *, is_last: bool = False) -> bool:
    """Return whether the bytes of a unit are those that were indexed, as far as that is known.

    At the last try a sample that is not is a `CorruptError` that names it.
    """
    e = holding.extent(unit)
    bound = holding.bounds[e.bound_number]
    if "checksum" not in bound.part.columns or len(bound.part.tables) > 1:
        return True
    sums = bound.part.columns["checksum"]
    first, count = holding.units.samples_of(unit)
    if bound.by_block:
        block = int(bound.part.tables[0].extents(np.array([first])).block[0])
        rows = [(first, int(sums[block]), 0, e.length)]
    else:
        extents = bound.part.tables[0].extents(np.arange(first, first + count))
        rows = list(
            zip(
                range(first, first + count),
                sums[first : first + count].tolist(),
                (extents.offset - e.offset).tolist(),
                extents.length.tolist(),
                strict=True,
            )
        )
    for local_id, expected, start, length in rows:
        found = xxhash.xxh3_64_intdigest(data[start : start + length])
        if found != expected and not is_last:
            return False
        if found != expected:
            raise CorruptError(
                f"{bound.where(local_id)}: {length} bytes at offset {e.offset + start} have "
                f"checksum {found:016x}, {expected:016x} when they were indexed, read twice; the "
                "object is damaged in its store: restore it, or look at all of it with "
                "`penstock verify`"
            )
    return True
