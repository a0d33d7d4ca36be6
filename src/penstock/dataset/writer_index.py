"""The index of a shard, found by its own format in the bytes that are being written."""

from __future__ import annotations

from typing import cast

import numpy as np
import xxhash

from penstock.dataset.formats import format_named
from penstock.dataset.part import Part, with_checksums
from penstock.dataset.writer_layouts import ShardLayout
from penstock.storage.base import Buffer, ObjectInfo, Store


class HeldObject:
    """The bytes of one object in memory, with what a format asks of a store."""

    uri = ""
    source = "memory"
    can_list = False

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def read_range(self, info: ObjectInfo, offset: int, length: int) -> memoryview:
        """Return some bytes, without copying."""
        assert offset + length <= info.size_bytes == len(self._data), (info, offset, length)
        return self._data[offset : offset + length]


def index_shard(layout: ShardLayout, info: ObjectInfo, data: Buffer) -> Part:
    """Return the index of a shard that was written, with the checksum of each sample.

    The format itself finds the samples, in the bytes as they were written: what is indexed here is
    by construction what anybody else finds later.
    """
    view = memoryview(data)
    held = cast(Store, HeldObject(view))
    format = format_named(layout.format)
    (unit,) = format.units([info], held, layout.options)
    part = format.scan(unit, held, layout.options)
    extents = part.tables[0].extents(np.arange(part.num_samples))
    places = zip(extents.offset.tolist(), extents.length.tolist(), strict=True)
    sums = [xxhash.xxh3_64_intdigest(view[at : at + length]) for at, length in places]
    return with_checksums(part, np.array(sums, np.uint64))
