"""What a format must know: which objects are its own, where samples lie, how bytes split into
fields.

A format is one file in this folder with one class. It never opens a store, starts a thread or
caches: it is given objects and bytes. `docs/guides/add_a_format.md` walks through a new one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from penstock.dataset.fields import Field
from penstock.dataset.part import Ints, Part, Rows
from penstock.dataset.ragged import FieldColumns
from penstock.storage.base import ObjectInfo, Store

Sample = dict[str, Any]
"""Fields by name: still encoded (memoryview), or values where the field's encoding is `value`."""

Options = Mapping[str, Any]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Objects that are scanned together: one shard, or arrays that lie beside each other."""

    objects: tuple[ObjectInfo, ...]
    note: dict[str, Any] = field(default_factory=dict)
    """What `units` learnt and `scan` needs; plain values."""


class Block(Protocol):
    """A block of samples, unpacked."""

    @property
    def size_bytes(self) -> int:
        """Memory it takes while it is kept."""
        ...

    def sample(self, row: int) -> Sample:
        """Return one sample of the block."""
        ...


@runtime_checkable
class ColumnBlock(Block, Protocol):
    """A block that can return the same field of many samples at once."""

    def columns(self, rows: Ints) -> FieldColumns | None:
        """Return the fields of some samples, equal to what `sample` returns for each.

        None where they must be asked for one by one, such as for the error that one of them has.
        """
        ...


@runtime_checkable
class ColumnFormat(Protocol):
    """What a format may have beside the methods of `Format`, so that batches are made faster."""

    def has_columns(self, part: Part) -> bool:
        """Return whether `columns`, or the blocks of the part, can return columns."""
        ...

    def columns(
        self, part: Part, ids: Ints, data: Bytes, starts: Ints, lengths: Ints
    ) -> FieldColumns | None:
        """Return the fields of samples that are addressed alone, equal to what `split` returns.

        The bytes of sample `ids[j]` are the `lengths[j]` bytes of `data` from `starts[j]` on. None
        where samples must be split one by one, such as for the error that one of them has.
        """
        ...


class Format(Protocol):
    """One way to lay samples into objects."""

    name: str
    """How the user names it."""
    options: frozenset[str]
    """Names of the options that `open` and `index` accept for it."""

    def claims(self, key: str) -> bool:
        """Return whether an object of that name belongs to this format, judged by name alone."""
        ...

    def units(self, objects: Sequence[ObjectInfo], store: Store, options: Options) -> list[Unit]:
        """Return the units of a data set in the order of their samples; reads little or nothing."""
        ...

    def scan(self, unit: Unit, store: Store, options: Options) -> Part:
        """Return where the samples of a unit lie; reads no more than it must."""
        ...

    def split(self, part: Part, ids: Ints, raws: Sequence[Sequence[memoryview]]) -> list[Sample]:
        """Return the fields of samples that are addressed alone.

        `raws[j][t]` are the bytes of sample `ids[j]` (numbered inside the part) in table t.
        """
        ...

    def unpack(self, part: Part, number: int, offset: int, raw: memoryview) -> Block:
        """Return a block, of samples that are addressed by block, from its bytes.

        `number` is the object's, for what the format keeps per object; `offset` is where the block
        starts in it.
        """
        ...


class SampleFormat:
    """Base of formats whose samples are addressed alone."""

    def has_columns(self, part: Part) -> bool:
        """Return True; asked only of formats that have the method `columns`."""
        return True

    def unpack(self, part: Part, number: int, offset: int, raw: memoryview) -> Block:
        """Not for these formats."""
        raise AssertionError(f"{part.format} has no blocks: {number=} {offset=} {len(raw)=}")


class BlockFormat:
    """Base of formats whose samples are addressed by block."""

    def split(self, part: Part, ids: Ints, raws: Sequence[Sequence[memoryview]]) -> list[Sample]:
        """Not for these formats."""
        raise AssertionError(f"{part.format} addresses blocks, not samples: {len(ids)=} {raws=}")

    def columns(
        self, part: Part, ids: Ints, data: Bytes, starts: Ints, lengths: Ints
    ) -> FieldColumns | None:
        """Not for these formats either: their blocks have columns."""
        raise AssertionError(f"{part.format} addresses blocks, not samples: {len(ids)=}")


def encoding_of(name: str) -> str:
    """Return the encoding that a field's name promises: its last extension.

    >>> encoding_of("seg.png"), encoding_of("JPG"), encoding_of("caption")
    ('png', 'jpg', 'caption')
    """
    return name.rsplit(".", 1)[-1].lower()


def extension_of(key: str) -> str:
    """Return what follows the last dot of an object's name, in small letters.

    >>> extension_of("a.b/c.d.JPG"), extension_of("a.b/README")
    ('jpg', '')
    """
    stem, _, extension = key.rpartition("/")[2].rpartition(".")
    return extension.lower() if stem else ""


def one_unit_each(objects: Sequence[ObjectInfo]) -> list[Unit]:
    """Return each object as a unit of its own."""
    return [Unit(objects=(o,)) for o in objects]


def whole_objects(objects: Sequence[ObjectInfo], blobs: Sequence[bytes] | None = None) -> Rows:
    """Return the table of objects each of which is one sample."""
    sizes = np.array([o.size_bytes for o in objects], np.int64)
    return Rows(
        objects=objects,
        counts=[1] * len(objects),
        addressing="extents",
        columns={"offset": np.zeros_like(sizes), "length": sizes},
        blobs=blobs,
    )


def block_rows(
    info: ObjectInfo, blocks: Sequence[tuple[int, int, int]], blob: bytes | None = None
) -> Rows:
    """Return the table of one object from offset, length and samples of each of its blocks."""
    columns = np.array(blocks, np.int64).reshape(-1, 3)
    return Rows(
        objects=[info],
        counts=[int(columns[:, 2].sum())],
        addressing="blocks",
        columns={
            "block.object": np.zeros(len(blocks), np.int64),
            "block.offset": columns[:, 0],
            "block.length": columns[:, 1],
            "block.count": columns[:, 2],
        },
        blobs=None if blob is None else [blob],
    )


__all__ = [
    "Block",
    "BlockFormat",
    "Field",
    "Format",
    "Options",
    "Sample",
    "SampleFormat",
    "Unit",
    "block_rows",
    "encoding_of",
    "one_unit_each",
]
