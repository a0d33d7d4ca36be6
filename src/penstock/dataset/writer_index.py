"""The index of a shard, found by its own format in the bytes that are being written."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import xxhash

from penstock.dataset.columns import Columns, column_bytes
from penstock.dataset.formats import format_named
from penstock.dataset.part import Part, part_of
from penstock.dataset.writer_layouts import ShardLayout
from penstock.errors import NotFoundError
from penstock.storage.base import Buffer, ObjectInfo
from penstock.storage.ranges import check_range, range_error


class HeldObject:
    """A store of one object, which is read and never written."""

    def __init__(self, info: ObjectInfo, data: memoryview) -> None:
        self._info = info
        self._data = data

    @property
    def uri(self) -> str:
        """Return nothing: the object's key is its whole name."""
        return ""

    @property
    def source(self) -> str:
        """Return "memory"."""
        return "memory"

    @property
    def can_list(self) -> bool:
        """Return True."""
        return True

    def info(self, key: str) -> ObjectInfo:
        """Return the object."""
        if key != self._info.key:
            raise NotFoundError(f"{key} is not held, only {self._info.key} is", uri=key)
        return self._info

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the object."""
        if self._info.key.startswith(prefix):
            yield self._info

    def read(self, key: str) -> memoryview:
        """Return all bytes."""
        self.info(key)
        return self._data

    def read_range(self, info: ObjectInfo, offset: int, length: int) -> memoryview:
        """Return some bytes, without copying."""
        check_range(offset, length)
        if offset + length > self.info(info.key).size_bytes:
            raise range_error(info.key, offset, length, self._info.size_bytes)
        return self._data[offset : offset + length]

    def read_into(self, info: ObjectInfo, offset: int, target: memoryview) -> None:
        """Copy some bytes."""
        target[:] = self.read_range(info, offset, target.nbytes)

    def write(self, key: str, data: Buffer, *, only_if_absent: bool = False) -> ObjectInfo:
        """Not for an object that is at hand already."""
        raise AssertionError(f"{key} is only held: {len(data)=} {only_if_absent=}")

    def delete(self, key: str) -> None:
        """Not for an object that is at hand already."""
        raise AssertionError(f"{key} is only held")

    def close(self) -> None:
        """Do nothing."""


def index_shard(layout: ShardLayout, info: ObjectInfo, data: Buffer) -> Part:
    """Return the index of a shard that was written, with the checksum of each sample.

    The format itself finds the samples, in the bytes as they were written: what is indexed here is
    by construction what anybody else finds later.
    """
    held = HeldObject(info, memoryview(data))
    format = format_named(layout.format)
    (unit,) = format.units([info], held, layout.options)
    part = format.scan(unit, held, layout.options)
    extents = part.tables[0].extents(np.arange(part.num_samples))
    view = memoryview(data)
    places = zip(extents.offset.tolist(), extents.length.tolist(), strict=True)
    sums = [xxhash.xxh3_64_intdigest(view[at : at + length]) for at, length in places]
    arrays = {**part.columns, "checksum": np.array(sums, np.uint64)}
    return part_of(Columns(arrays, part.columns.meta))


def part_bytes(part: Part) -> bytes:
    """Return a part as its file holds it."""
    return column_bytes(part.columns, part.columns.meta)
