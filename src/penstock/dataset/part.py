"""A part of an index: a run of objects and the samples that lie in them.

A part answers one question: where are the bytes of sample i? It has one *table*, or several where
the fields of a sample lie in different objects (`x.npy` beside `y.npy`). A table addresses samples
in one of three ways, so that no index is larger than it must be:

* `extents`: an offset and a length for each sample (tar, raw MDS, JSON lines, files);
* `even`: samples of one width at even distances (rows of an array): nothing is stored per sample;
* `blocks`: only runs of samples can be addressed (a compressed shard, a Parquet row group).

Parts are values: made once, written once, mapped by everybody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from penstock.dataset.columns import (
    REINDEX,
    Columns,
    Texts,
    column_bytes,
    map_columns,
    text_columns,
    write_columns,
)
from penstock.dataset.fields import Field
from penstock.errors import FormatError
from penstock.storage.base import ObjectInfo

Ints = npt.NDArray[np.int64]
Addressing = Literal["extents", "even", "blocks"]

ABSENT = np.uint32(0xFFFF_FFFF)
"""Length of a member that a sample does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extents:
    """Where some samples lie: parallel arrays."""

    object: Ints
    """Number of the object in its table."""
    offset: Ints
    """First byte."""
    length: Ints
    """Number of bytes; of the whole block where samples are addressed by block."""
    row: Ints
    """Place inside the block; 0 where samples are addressed alone."""
    block: Ints
    """Number of the block; the sample itself where samples are addressed alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What a format found in some objects: one table of a part in the making."""

    objects: Sequence[ObjectInfo]
    """The objects, in the order of their samples."""
    counts: Sequence[int] | npt.NDArray[np.int64]
    """Samples in each object."""
    addressing: Addressing
    """How samples are found; decides which of the columns below must be there."""
    columns: Mapping[str, npt.NDArray[Any]]
    """extents: offset, length (a row a sample). even: base, stride, width (a row an object).
    blocks: block.object, block.offset, block.length, block.count (a row a block)."""
    blobs: Sequence[bytes] | None = None
    """What the format keeps for each object, such as a footer."""


class Table:
    """One way to the bytes of every sample of a part."""

    def __init__(self, columns: Columns, number: int, addressing: Addressing) -> None:
        self._prefix = f"t{number}."
        self._columns = columns
        self.addressing = addressing
        self.first_sample: Ints = self._get("object.first")
        self.sizes: Ints = self._get("object.size")

    def _get(self, name: str) -> npt.NDArray[Any]:
        return self._columns[self._prefix + name]

    def _texts(self, name: str) -> Texts:
        return self._columns.texts(self._prefix + name)

    @property
    def num_objects(self) -> int:
        """Number of objects."""
        return len(self.sizes)

    @property
    def num_blocks(self) -> int:
        """Number of extents that must be read whole: blocks, or samples."""
        return len(self._get("block.offset")) if self.addressing == "blocks" else self.num_samples

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return int(self.first_sample[-1])

    def key(self, number: int) -> str:
        """Return the key of an object."""
        return self._texts("object.key").text(number)

    @property
    def has_blobs(self) -> bool:
        """Whether the format kept something for each object."""
        return f"{self._prefix}object.blob.ends" in self._columns

    def blob(self, number: int) -> bytes:
        """Return what the format kept for an object."""
        return bytes(self._texts("object.blob")[number])

    def blob_array(self, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return what the format kept for all objects, where that is one number each."""
        return self._get("object.blob.bytes").view(dtype)

    def info(self, number: int) -> ObjectInfo:
        """Return an object as it was when it was indexed."""
        return ObjectInfo(
            key=self.key(number),
            size_bytes=int(self.sizes[number]),
            etag=self._texts("object.etag").text(number),
            mtime_ns=int(self._get("object.mtime_ns")[number]),
        )

    def extents(self, ids: Ints) -> Extents:
        """Return where samples lie."""
        if self.addressing == "blocks":
            return self._block_extents(ids)
        number = np.searchsorted(self.first_sample, ids, side="right") - 1
        row = np.zeros(len(ids), np.int64)
        if self.addressing == "extents":
            offset = self._get("offset")[ids].astype(np.int64)
            length = self._get("length")[ids].astype(np.int64)
        else:
            inside = ids - self.first_sample[number]
            offset = self._get("base")[number] + inside * self._get("stride")[number]
            length = self._get("width")[number]
        return Extents(object=number, offset=offset, length=length, row=row, block=ids)

    def _block_extents(self, ids: Ints) -> Extents:
        first = self._get("block.first")
        block = np.searchsorted(first, ids, side="right") - 1
        return Extents(
            object=self._get("block.object")[block].astype(np.int64),
            offset=self._get("block.offset")[block].astype(np.int64),
            length=self._get("block.length")[block].astype(np.int64),
            row=ids - first[block],
            block=block,
        )

    def block_starts(self) -> Ints:
        """Return the first sample of each block, and the number of samples at the end."""
        assert self.addressing == "blocks"
        first: Ints = self._get("block.first")
        return first

    def sample_bytes(self) -> npt.NDArray[Any]:
        """Return the stored length of each sample (of a block's samples, their even share)."""
        if self.addressing == "extents":
            return self._get("length")
        if self.addressing == "even":
            counts = np.diff(self.first_sample)
            return np.repeat(self._get("width"), counts)
        counts = np.diff(self.block_starts())
        share = self._get("block.length") // np.maximum(counts, 1)
        return np.repeat(share, counts)

    def even_layout(self) -> tuple[Ints, Ints, Ints]:
        """Return base, stride and width of each object of an even table."""
        return self._get("base"), self._get("stride"), self._get("width")

    def total_bytes(self) -> int:
        """Return how many bytes all samples take in their objects."""
        if self.addressing == "extents":
            return int(self._get("length").sum(dtype=np.int64))
        if self.addressing == "even":
            return int((np.diff(self.first_sample) * self._get("width")).sum())
        return int(self._get("block.length").sum(dtype=np.int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """An immutable run of samples: where they lie and what their fields are."""

    columns: Columns
    format: str
    fields: tuple[Field, ...]
    options: dict[str, Any]
    tables: tuple[Table, ...] = field(default=())

    def __reduce__(self) -> tuple[Any, ...]:
        return part_of, (self.columns,)

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return self.tables[0].num_samples

    @property
    def fingerprint(self) -> str:
        """A hash of what the samples are and where they lie; not of when or by whom."""
        return str(self.columns.meta["fingerprint"])

    def key(self, i: int) -> str | None:
        """Return a sample's own name, where the format has one."""
        if "key.ends" not in self.columns:
            return None
        return self.columns.texts("key").text(i)

    def save(self, path: Path) -> None:
        """Write this part to a file, atomically."""
        write_columns(path, self.columns, self.columns.meta)

    def as_bytes(self) -> bytes:
        """Return what a file of this part holds."""
        return column_bytes(self.columns, self.columns.meta)


def open_part(path: Path) -> Part:
    """Return a part mapped from its file, as it lies there; `part_files` also verifies it."""
    return part_of(map_columns(path), str(path))


class _Meta(msgspec.Struct, frozen=True, kw_only=True):
    """What the head of a part's file must say."""

    format: str
    fields: list[Field]
    options: dict[str, Any]
    tables: Annotated[list[Addressing], msgspec.Meta(min_length=1)]
    fingerprint: str


# The type is prepared here, by one thread: threads that do so at once can end the process.
msgspec.json.Decoder(_Meta)


def part_of(columns: Columns, name: str = "a part") -> Part:
    """Return a part from its columns; those that do not fit together are a `FormatError`."""
    try:
        meta = msgspec.convert(columns.meta, _Meta)
        part = Part(
            columns=columns,
            format=meta.format,
            fields=tuple(meta.fields),
            options=meta.options,
            tables=tuple(Table(columns, t, how) for t, how in enumerate(meta.tables)),
        )
        _check_lengths(part)
    except (msgspec.ValidationError, KeyError, IndexError, ValueError, TypeError) as error:
        raise FormatError(f"{name} is not the index of samples: {error!r}; {REINDEX}") from None
    return part


def _check_lengths(part: Part) -> None:
    """Raise unless all columns have as many rows as there are objects, blocks or samples.

    What is looked at here does not grow with the samples.
    """
    num_samples = part.num_samples
    for number, table in enumerate(part.tables):
        have = {
            name.removeprefix(f"t{number}."): column.shape
            for name, column in part.columns.items()
            if name.startswith(f"t{number}.") and not name.endswith(".bytes")
        }
        if table.num_samples != num_samples:
            raise ValueError(f"tables of {num_samples} and {table.num_samples} samples")
        needed = ("object.key.ends", "object.etag.ends", "object.size", "object.mtime_ns")
        rows = dict.fromkeys((*needed, *have), table.num_objects)
        rows["object.first"] = table.num_objects + 1
        if table.addressing == "extents":
            rows |= {"offset": num_samples, "length": num_samples}
        elif table.addressing == "even":
            rows |= dict.fromkeys(("base", "stride", "width"), table.num_objects)
        else:
            names = ("block.object", "block.offset", "block.length")
            rows |= dict.fromkeys(names, table.num_blocks) | {"block.first": table.num_blocks + 1}
        _check_rows(have, {name: (count,) for name, count in rows.items()}, f"t{number}.")
    for name in [name for name in part.columns if name.endswith(".ends")]:
        part.columns.texts(name.removesuffix(".ends"))  # has its bytes too
    top = {"key.ends": (num_samples,)} | dict.fromkeys(
        ("member.offset", "member.length"), (num_samples, len(part.fields))
    )
    sums = part.tables[0].num_blocks if len(part.tables) == 1 else num_samples
    shapes = {name: c.shape for name, c in part.columns.items()}
    _check_rows(shapes, {n: s for n, s in (top | {"checksum": (sums,)}).items() if n in shapes})


def _check_rows(
    have: Mapping[str, tuple[int, ...]], want: Mapping[str, tuple[int, ...]], prefix: str = ""
) -> None:
    for name, shape in want.items():
        if have[name] != shape:
            raise ValueError(f"column {prefix}{name} has {have[name]} rows, {shape} are needed")


def make_part(
    *,
    format: str,
    fields: Sequence[Field],
    tables: Sequence[Rows],
    keys: Sequence[str] | None = None,
    members: tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Part:
    """Return a part from what a format found.

    `members` are offset and length of each field inside its sample's extent, a row a sample and a
    column a field, with length `ABSENT` where a sample lacks the field.
    """
    arrays: dict[str, npt.NDArray[Any]] = {}
    for number, rows in enumerate(tables):
        arrays |= {f"t{number}.{name}": a for name, a in _table_columns(rows).items()}
    if keys is not None:
        arrays |= text_columns("key", keys)
    if members is not None:
        arrays |= {"member.offset": members[0], "member.length": members[1]}
    counts = {int(sum(rows.counts)) for rows in tables}
    assert len(counts) == 1, f"tables of one part differ in their number of samples: {counts}"
    return seal_part(arrays, format, fields, [rows.addressing for rows in tables], options or {})


def with_checksums(part: Part, checksums: npt.NDArray[np.uint64]) -> Part:
    """Return a part with the xxh3_64 of the extent of each sample, or of each block."""
    return part_of(Columns({**part.columns, "checksum": checksums}, part.columns.meta))


def seal_part(
    arrays: dict[str, npt.NDArray[Any]],
    format: str,
    fields: Sequence[Field],
    tables: Sequence[Addressing],
    options: Mapping[str, Any],
) -> Part:
    """Return a part from all of its columns, with the fingerprint that they give."""
    meta = {
        "format": format,
        "fields": [msgspec.to_builtins(f) for f in fields],
        "options": dict(options),
        "tables": list(tables),
    }
    meta["fingerprint"] = fingerprint_of(arrays, meta)
    return part_of(Columns(arrays, meta))


def _table_columns(rows: Rows) -> dict[str, npt.NDArray[Any]]:
    objects = rows.objects
    assert len(objects) == len(rows.counts), (len(objects), len(rows.counts))
    out: dict[str, npt.NDArray[Any]] = {
        **text_columns("object.key", [o.key for o in objects]),
        **text_columns("object.etag", [o.etag for o in objects]),
        "object.size": np.array([o.size_bytes for o in objects], np.int64),
        "object.mtime_ns": np.array([o.mtime_ns for o in objects], np.int64),
        "object.first": _starts(rows.counts),
    }
    if rows.blobs is not None:
        out |= text_columns("object.blob", rows.blobs)
    if rows.addressing == "blocks":
        out["block.first"] = _starts(rows.columns["block.count"])
    for name, array in rows.columns.items():
        if name != "block.count":
            out[name] = _narrow(array) if name in _NARROW else array.astype(np.int64)
    return out


_NARROW = ("offset", "length", "block.offset", "block.length", "block.object")


def _starts(counts: Sequence[int] | npt.NDArray[Any]) -> Ints:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _narrow(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the same numbers in four bytes each where they fit."""
    fits = len(array) == 0 or int(array.max()) < 2**32
    return array.astype(np.uint32 if fits else np.uint64)


_NOT_CONTENT = ("object.etag.bytes", "object.etag.ends", "object.mtime_ns", "checksum")


def fingerprint_of(arrays: Mapping[str, npt.NDArray[Any]], meta: Mapping[str, Any]) -> str:
    """Return the hash of a part's content; marks of the store (etag, time) are left out.

    So a copy elsewhere is the same data set.
    """
    digest = xxhash.xxh3_128(msgspec.json.encode(meta, order="sorted"))
    for name in sorted(arrays):
        if not name.endswith(_NOT_CONTENT):
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def recomputed(part: Part) -> str:
    """Return the fingerprint that the columns of a part give; it should be the one it says."""
    meta = {name: value for name, value in part.columns.meta.items() if name != "fingerprint"}
    return fingerprint_of(part.columns, meta)


def merge_fields(several: Sequence[tuple[Field, ...]]) -> tuple[Field, ...]:
    """Return all fields in the order of first sight.

    What some part lacks becomes optional; a type or shape that differs between parts is no longer
    the same for all samples. One name for two encodings is an error.
    """
    merged: dict[str, Field] = {}
    for fields in several:
        for f in fields:
            merged[f.name] = _joined(merged.get(f.name, f), f)
    for fields in several:
        for name in merged.keys() - {f.name for f in fields}:
            merged[name] = replace(merged[name], optional=True)
    return tuple(merged.values())


def _joined(known: Field, other: Field) -> Field:
    if known.encoding != other.encoding:
        raise FormatError(
            f"field {known.name!r} is {known.encoding} in some objects and {other.encoding} in "
            "others; open them as data sets of their own"
        )
    return replace(
        known,
        optional=known.optional or other.optional,
        dtype=known.dtype if known.dtype == other.dtype else None,
        shape=known.shape if known.shape == other.shape else None,
    )
