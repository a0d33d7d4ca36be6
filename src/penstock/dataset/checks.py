"""Checking what came from a store against the checksums of the index, where it has some."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.dataset.part import Ints
from penstock.errors import CorruptError

if TYPE_CHECKING:
    from penstock.dataset.bound import BoundPart

_READS_MAX = 5
"""How often a range is read that is damaged in another way each time, before that is an error."""


class FirstReads:
    """Which samples of a part this process has compared with their checksums.

    Comparing costs about half as much as copying. A file whose size and time are still those of the
    index has not changed since, so once is enough. A part that is sent to another process is
    compared there again.
    """

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples
        self._flags: npt.NDArray[np.bool_] | None = None

    def __reduce__(self) -> tuple[type[FirstReads], tuple[int]]:
        return FirstReads, (self._num_samples,)

    def missing(self, ids: Ints) -> Ints:
        """Return the places in `ids` of samples that were not compared yet."""
        if self._flags is None:
            self._flags = np.zeros(self._num_samples, bool)  # Takes memory as it is written to.
        return np.flatnonzero(~self._flags[ids])

    def note(self, ids: Ints) -> None:
        """Take note that samples were compared.

        Without a lock: flags are only ever set, and a lost one costs another comparison.
        """
        assert self._flags is not None
        self._flags[ids] = True


def has_checksums(bound: BoundPart) -> bool:
    """Return whether samples can be checked: a checksum is of one extent."""
    return "checksum" in bound.part.columns and len(bound.part.tables) == 1


def read_checked(
    bound: BoundPart, ids: Ints, offset: int, read: Callable[[], memoryview]
) -> tuple[memoryview, int]:
    """Return bytes of an object from `offset` on, and how often they were read again.

    The samples `ids` of the part, which lie in them, have the checksums of the index, if it has
    any.
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
            break  # Damage in transit differs each time; the same damage twice is the store's.
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


def check_copies(bound: BoundPart, ids: Ints, copy_of: Callable[[int], memoryview]) -> None:
    """Compare copies of samples of local files with the index, each the first time it is read.

    `copy_of` returns the copy of the j-th of them. One that is wrong is read again in its place.
    """
    if not has_checksums(bound):
        return
    missing = bound.first_reads.missing(ids)
    if not len(missing):
        return
    chosen = ids[missing]
    sums = bound.part.columns["checksum"][chosen].tolist()
    for j, local_id, expected in zip(missing.tolist(), chosen.tolist(), sums, strict=True):
        copy = copy_of(j)
        if xxhash.xxh3_64_intdigest(copy) != expected:
            copy[:] = bound.read_sample(0, local_id)
    bound.first_reads.note(chosen)
