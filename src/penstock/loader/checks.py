"""Checking what came from a store against the checksums of the index, where it has some."""

from __future__ import annotations

import numpy as np
import xxhash

from penstock.dataset.bound import BoundPart
from penstock.dataset.part import Ints
from penstock.errors import CorruptError


def has_checksums(bound: BoundPart) -> bool:
    """Return whether samples can be checked: a checksum is of one extent."""
    return "checksum" in bound.part.columns and len(bound.part.tables) == 1


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


def damaged(what: str) -> CorruptError:
    """Return the error for bytes that stay wrong."""
    return CorruptError(
        f"{what}, and the same when it was read again; the object is damaged in its store: restore "
        "it, or look at all of it with `penstock verify`"
    )
