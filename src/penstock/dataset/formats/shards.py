"""What MDS and LitData share: an `index.json`, a table of offsets, samples of sized columns.

A shard starts with the number of its samples and where each begins. A sample starts with the sizes
of its columns of varying size, then has the columns' bytes one after the other. Compressed, a whole
shard (or a run of samples) is one zstd frame.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import prod
from typing import Any, TypeVar

import msgspec
import numpy as np

from penstock.dataset.fields import VALUE, Field
from penstock.dataset.formats.base import Bytes, Sample, block_rows
from penstock.dataset.part import Ints, Part, Rows
from penstock.dataset.ragged import FieldColumns, Ragged, rows_at
from penstock.errors import FormatError
from penstock.storage.base import ObjectInfo, Store

INDEX = "index.json"
_INDEX_BYTES_MAX = 512 << 20
"""Size of an index: one of 100,000 shards takes 100 MB."""
_T = TypeVar("_T")


def read_index(store: Store, info: ObjectInfo, kind: type[_T], whose: str) -> _T:
    """Return a parsed `index.json`, or say why it is not one of these."""
    where = f"{store.uri}{info.key}"
    if info.size_bytes > _INDEX_BYTES_MAX:
        raise FormatError(
            f"{where} has {info.size_bytes} bytes, at most {_INDEX_BYTES_MAX} are read as an index"
        )
    return parsed(store.read(info.key), kind, f"{where} is not the index of {whose} set")


def parsed(text: memoryview | bytes | str, kind: type[_T], otherwise: str) -> _T:
    """Return JSON as a value of a given kind, or raise with the words of `otherwise`."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise FormatError(f"{otherwise}: {error}") from error
    except RecursionError as error:
        raise FormatError(f"{otherwise}: it is nested too deep") from error


def table_bytes(num_samples: int) -> int:
    """Return the length of a table of offsets.

    >>> table_bytes(2)
    16
    """
    return 4 * (num_samples + 2)


def read_offsets(store: Store, info: ObjectInfo, num_samples: int) -> Ints:
    """Return where the samples of a shard begin, and where the last one ends."""
    where = f"{store.uri}{info.key}"
    length = table_bytes(num_samples)
    if length > info.size_bytes:
        raise FormatError(
            f"{where} is cut off: it has {info.size_bytes} bytes, the table of its {num_samples} "
            f"samples alone takes {length}; copy it anew"
        )
    return parse_offsets(store.read_range(info, 0, length), num_samples, info.size_bytes, where)


def sample_rows(store: Store, info: ObjectInfo, num_samples: int) -> Rows:
    """Return the table of a shard whose samples can be addressed alone."""
    offsets = read_offsets(store, info, num_samples)
    columns = {"offset": offsets[:-1], "length": np.diff(offsets)}
    return Rows(objects=[info], counts=[num_samples], addressing="extents", columns=columns)


def packed_rows(info: ObjectInfo, num_samples: int, raw_bytes: int) -> Rows:
    """Return the table of a compressed shard: one block, which unpacks to `raw_bytes`."""
    return block_rows(info, [(0, info.size_bytes, num_samples)], raw_bytes.to_bytes(8, "little"))


def parse_offsets(data: memoryview, num_samples: int, size_bytes: int, where: str) -> Ints:
    """Return the offsets of a shard of `size_bytes` bytes from its first bytes."""
    found = int.from_bytes(data[:4], "little")
    if found != num_samples:
        raise FormatError(
            f"{where} says that it holds {found} samples, index.json says {num_samples}; "
            "they are not of one data set, or the shard is damaged"
        )
    length = table_bytes(num_samples)
    if length > len(data):
        raise FormatError(
            f"{where} is cut off: the table of its {num_samples} samples takes {length} bytes, "
            f"there are {len(data)}; copy it anew"
        )
    offsets = np.frombuffer(data, "<u4", num_samples + 1, 4).astype(np.int64)
    if (np.diff(offsets) < 0).any() or int(offsets[0]) < length or int(offsets[-1]) > size_bytes:
        raise FormatError(
            f"{where} is cut off or damaged: its samples lie from byte {int(offsets[0])} to "
            f"{int(offsets[-1])}, the shard from {length} to {size_bytes}; copy it anew"
        )
    return offsets


class SizedColumns:
    """How the samples of a part are cut into fields.

    `sizes` are the lengths of the columns, None where a sample says it itself.
    """

    def __init__(self, part: Part, sizes: Sequence[int | None]) -> None:
        self._columns = [
            (f.name, size, *_value_layout(f)) for f, size in zip(part.fields, sizes, strict=True)
        ]
        self._head = struct.Struct(f"<{sum(size is None for size in sizes)}I")
        self._fixed_bytes = self._head.size + sum(size or 0 for size in sizes)
        if not self._fixed_bytes:
            raise FormatError("samples of this part have no columns; build the index again")

    def _length(self, data: memoryview, at: int) -> tuple[int, tuple[int, ...]]:
        if at + self._head.size > len(data):
            raise FormatError(
                f"a sample is damaged: its sizes take {self._head.size} bytes, "
                f"it has {len(data) - at}"
            )
        sizes = self._head.unpack_from(data, at)
        return self._fixed_bytes + sum(sizes), sizes

    def starts(self, data: memoryview) -> list[int]:
        """Return where samples begin that lie one after the other, and where the last one ends."""
        starts = [0]
        while starts[-1] < len(data):
            starts.append(starts[-1] + self._length(data, starts[-1])[0])
        return starts

    def sample(self, data: memoryview) -> Sample:
        """Return the fields of one sample: bytes, or values where all samples have one type."""
        length, sizes = self._length(data, 0)
        if length != len(data):
            raise FormatError(
                f"a sample is damaged: its columns take {length} bytes, it has {len(data)}"
            )
        at, varying = self._head.size, iter(sizes)
        out: Sample = {}
        for name, size, dtype, shape, expected in self._columns:
            end = at + (next(varying) if size is None else size)
            if dtype is None:
                out[name] = data[at:end]
            elif end - at != expected:
                raise FormatError(
                    f"a sample is damaged: column {name!r} has {end - at} bytes, {dtype} {shape} "
                    f"takes {expected}"
                )
            else:
                out[name] = np.ndarray(shape, dtype, data, at)[()]
            at = end
        return out

    def columns(self, data: Bytes, starts: Ints, lengths: Ints) -> FieldColumns | None:
        """Return the fields of many samples of `data`; None where one of them is damaged."""
        num_samples = len(starts)
        if (lengths < self._head.size).any():
            return None
        heads = rows_at(data, starts, self._head.size).view("<u4").astype(np.int64)
        if (heads.sum(axis=1) + self._fixed_bytes != lengths).any():
            return None
        at = starts + self._head.size
        varying = iter(heads.T)
        out: FieldColumns = {}
        for name, size, dtype, shape, expected in self._columns:
            sizes = next(varying) if size is None else np.full(num_samples, size, np.int64)
            if dtype is None:
                out[name] = Ragged(data, at, sizes)
            elif (sizes != expected).any():
                return None
            else:
                out[name] = rows_at(data, at, expected).view(dtype).reshape(num_samples, *shape)
            at = at + sizes
        return out


def _value_layout(field: Field) -> tuple[np.dtype[Any] | None, tuple[int, ...], int]:
    """Return type, shape and length of a column's values; no type where they are bytes."""
    if field.encoding != VALUE:
        return None, (), 0
    dtype, shape = np.dtype(field.dtype), field.shape or ()
    return dtype, shape, dtype.itemsize * prod(shape)


class SizedBlock:
    """A decompressed run of samples."""

    def __init__(self, data: memoryview, columns: SizedColumns, starts: Sequence[int]) -> None:
        self._data = data
        self._columns = columns
        self._edges: Ints = np.asarray(starts, np.int64)

    @property
    def size_bytes(self) -> int:
        """Memory it takes while it is kept."""
        return len(self._data)

    def sample(self, row: int) -> Sample:
        """Return one sample of the block."""
        if row + 1 >= len(self._edges):
            raise FormatError(
                f"the block holds {len(self._edges) - 1} samples, more were indexed; copy it anew"
            )
        return self._columns.sample(self._data[self._edges[row] : self._edges[row + 1]])

    def columns(self, rows: Ints) -> FieldColumns | None:
        """Return the fields of some samples."""
        if int(rows.max()) + 1 >= len(self._edges):
            return None
        starts = self._edges[rows]
        data = np.frombuffer(self._data, np.uint8)
        return self._columns.columns(data, starts, self._edges[rows + 1] - starts)
