"""Columns in one file, mapped rather than loaded.

A column file is a small JSON head (names, types, places, and a `meta` value of the caller's)
followed by plain little-endian arrays at multiples of 64 bytes. Opening one costs a page or two,
whatever its size; only what is looked at is ever read. A column of texts is two arrays: all bytes,
and where each text ends.

The head of a file is checked, not believed: one that does not fit the file, or a type that is not a
plain number of fixed width, is a `FormatError`. An object type would turn bytes into pointers.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.errors import FormatError
from penstock.storage.folder_errors import store_error
from penstock.storage.keys import TEMPORARY_PREFIX

_MAGIC = b"PENSTOCK"
_LAYOUT = 1
_ALIGN = 64
READ_BYTES_MAX = 4 << 20
"""A file up to this size is read, a larger one is mapped."""
_HEAD_BYTES_MAX = 1 << 28
REINDEX = "build the index again: penstock.open(..., rebuild=True) or `penstock index --rebuild`"
"""The way out where an index is damaged."""

_PLAIN = re.compile(r"\|[uib]1|<[uif][248]")
"""Types that a column may have."""

Array = npt.NDArray[Any]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class _ColumnPlace(msgspec.Struct, frozen=True):
    dtype: str
    shape: Annotated[list[_Count], msgspec.Meta(min_length=1, max_length=2)]
    offset: _Count


class _Head(msgspec.Struct, frozen=True):
    columns: dict[str, _ColumnPlace]
    meta: dict[str, Any]
    data_bytes: _Count


_HEAD = msgspec.json.Decoder(_Head)
"""Made at import: to make it when the first file is opened would double the time that this
takes."""


class Columns(Mapping[str, Array]):
    """Named arrays and a meta value, in memory or mapped from a file."""

    def __init__(
        self, arrays: dict[str, Array], meta: dict[str, Any], path: Path | None = None
    ) -> None:
        self._arrays = arrays
        self.meta = meta
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        # Columns that are mapped travel as the name of their file: gigabytes need not be copied.
        if self._path is not None:
            return map_columns, (self._path,)
        return Columns, (self._arrays, self.meta)

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def texts(self, name: str) -> Texts:
        """Return a column of texts."""
        return Texts(self[f"{name}.bytes"], self[f"{name}.ends"])


class Texts(Sequence[bytes]):
    """A read-only column of byte strings."""

    def __init__(self, data: Array, ends: Array) -> None:
        self._data = data
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        start = int(self._ends[i - 1]) if i > 0 else 0
        return self._data[start : int(self._ends[i])].tobytes()

    def text(self, i: int) -> str:
        """Return one entry as text."""
        return str(self[i], "utf-8", "surrogateescape")  # Names need not be text.


def text_columns(name: str, values: Sequence[str | bytes]) -> dict[str, Array]:
    """Return the two arrays that hold a column of texts."""
    encoded = [v.encode("utf-8", "surrogateescape") if isinstance(v, str) else v for v in values]
    ends = np.cumsum([len(v) for v in encoded], dtype=np.uint64)
    return {
        f"{name}.bytes": np.frombuffer(b"".join(encoded), np.uint8),
        f"{name}.ends": ends if encoded else np.zeros(0, np.uint64),
    }


def _place(arrays: Mapping[str, Array], start: int) -> tuple[dict[str, Any], int]:
    places: dict[str, Any] = {}
    end = start
    for name, array in arrays.items():
        at = -(-end // _ALIGN) * _ALIGN
        little = array.dtype.newbyteorder("<").str
        places[name] = {"dtype": little, "shape": list(array.shape), "offset": at - start}
        end = at + array.nbytes
    return places, end


def write_columns(path: Path, arrays: Mapping[str, Array], meta: Mapping[str, Any]) -> None:
    """Write a column file; visible under its name only when it is whole and on disk."""
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}-{path.name}")
    try:
        with temporary.open("wb") as file:
            _write_columns(file, arrays, meta)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)  # Listings hide it, so nobody else would remove it.
        raise


def column_bytes(arrays: Mapping[str, Array], meta: Mapping[str, Any]) -> bytes:
    """Return what a column file would hold."""
    file = io.BytesIO()
    _write_columns(file, arrays, meta)
    return file.getvalue()


def _write_columns(file: BinaryIO, arrays: Mapping[str, Array], meta: Mapping[str, Any]) -> None:
    places, size_bytes = _place(arrays, 0)
    head = msgspec.json.encode({"columns": places, "meta": meta, "data_bytes": size_bytes})
    prelude = _MAGIC + _LAYOUT.to_bytes(4, "little") + len(head).to_bytes(4, "little") + head
    data_start = -(-len(prelude) // _ALIGN) * _ALIGN
    file.write(prelude)
    for name, array in arrays.items():
        file.write(bytes(data_start + places[name]["offset"] - file.tell()))
        file.write(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).data)
    file.write(bytes(data_start + size_bytes - file.tell()))


def map_columns(path: Path) -> Columns:
    """Return the columns of a file, mapped unless it is small."""
    return parse_columns(map_file(path), str(path), path)


def map_file(path: Path) -> memoryview:
    """Return the bytes of a file, mapped unless it is small."""
    with store_error(str(path)), path.open("rb") as file:
        if os.fstat(file.fileno()).st_size <= READ_BYTES_MAX:
            return memoryview(file.read())  # A map would keep a descriptor for next to nothing.
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def parse_columns(data: memoryview, name: str, path: Path | None = None) -> Columns:
    """Return the columns that lie in `data`, without copying."""
    if bytes(data[:8]) != _MAGIC:
        raise FormatError(f"{name} is not a Penstock column file ({len(data)} bytes); {REINDEX}")
    layout = int.from_bytes(data[8:12], "little")
    if layout != _LAYOUT:
        raise FormatError(f"{name} has layout {layout}, this Penstock reads {_LAYOUT}; {REINDEX}")
    head_bytes = int.from_bytes(data[12:16], "little")
    if head_bytes > min(_HEAD_BYTES_MAX, len(data) - 16):
        raise FormatError(
            f"{name} is cut off: a head of {head_bytes} bytes does not fit in it; {REINDEX}"
        )
    try:
        head = _HEAD.decode(data[16 : 16 + head_bytes])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FormatError(f"{name} has a damaged head ({error}); {REINDEX}") from None
    start = -(-(16 + head_bytes) // _ALIGN) * _ALIGN
    if start + head.data_bytes > len(data):
        raise FormatError(
            f"{name} is cut off: {len(data)} bytes, {start + head.data_bytes} expected; {REINDEX}"
        )
    arrays = {
        column: _array(data[start:], place, f"{name}, column {column!r}")
        for column, place in head.columns.items()
    }
    return Columns(arrays, head.meta, path)


def _array(data: memoryview, place: _ColumnPlace, where: str) -> Array:
    if not _PLAIN.fullmatch(place.dtype):
        raise FormatError(
            f"{where} is of type {place.dtype[:40]!r}, columns are plain numbers; {REINDEX}"
        )
    dtype, count = np.dtype(place.dtype), math.prod(place.shape)
    end = place.offset + count * dtype.itemsize
    if end > len(data):
        raise FormatError(f"{where} ends at byte {end} of {len(data)}; {REINDEX}")
    return (
        np.frombuffer(data, dtype, count, place.offset).reshape(place.shape)
        if count
        else (np.zeros(place.shape, dtype))
    )
