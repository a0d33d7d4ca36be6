"""Checking what came from a store against the checksums of the index, where it has some."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from penstock.dataset.part import Ints
from penstock.errors import CorruptError

if TYPE_CHECKING:
    from penstock.dataset.bound import BoundPart

_READS_MAX = 5
"""Of a range that is found to be damaged, each time in another way, before that is an error."""


def has_checksums(bound: BoundPart) -> bool:
    """Return whether samples can be checked: a checksum is of one extent."""
    return "checksum" in bound.part.columns and len(bound.part.tables) == 1


def read_checked(
    bound: BoundPart, ids: Ints, offset: int, read: Callable[[], memoryview]
) -> tuple[memoryview, int]:
    """Return bytes of an object from `offset` on, and how often they were read again.

    The samples `ids` of the part, which lie in them, are what was indexed, as far as that is known.
    """
    data = read()
    if not has_checksums(bound):
        return data, 0
    what = ""
    for num_again in range(_READS_MAX):
        before, what = what, first_damaged(bound, ids, offset, data)
        if not what:
            return data, num_again
        if what == before:
            break  # Damage on the way differs from time to time; this is the store's.
        data = read()
    raise CorruptError(
        f"{what}, and wrong again when it was read again; the object is damaged in its store: "
        "restore it, or look at all of it with `penstock verify`"
    )


def first_damaged(bound: BoundPart, ids: Ints, offset: int, data: memoryview) -> str:
    """Return words that name the first of some samples that is not what was indexed, or nothing.

    `data` are the bytes of their object from `offset` on.
    """
    extents = bound.part.tables[0].extents(ids)
    # Of blocks, each once.
    numbers, first = np.unique(extents.block, return_index=True)
    sums = bound.part.columns["checksum"][numbers].tolist()
    starts, lengths = (extents.offset[first] - offset).tolist(), extents.length[first].tolist()
    for local_id, expected, start, length in zip(
        ids[first].tolist(), sums, starts, lengths, strict=True
    ):
        found = xxhash.xxh3_64_intdigest(data[start : start + length])
        if found != expected:
            return (
                f"{bound.where(local_id)}: {length} bytes at offset {offset + start} have checksum "
                f"{found:016x}, {expected:016x} when they were indexed"
            )
    return ""
