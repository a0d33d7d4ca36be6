"""The header of a `.npy` file, versions 1.0 to 3.0: type, shape and order of what follows."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from penstock.errors import FormatError
from penstock.storage.base import ObjectInfo, Store

_MAGIC = b"\x93NUMPY"
_FIRST_READ_BYTES = 4 << 10
_HEADER_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayHeader:
    """What a `.npy` file holds."""

    where: str
    """The file, for messages."""
    dtype: np.dtype[Any]
    """Type of an element."""
    length: int
    """Number of rows: the first axis."""
    row_shape: tuple[int, ...]
    """The other axes."""
    data_offset: int
    """Where the first row starts."""

    @property
    def row_bytes(self) -> int:
        """Length of a row."""
        return self.dtype.itemsize * prod(self.row_shape)


def dtype_text(dtype: np.dtype[Any]) -> str:
    """Return a type as text that distinguishes it from all others, records included.

    >>> dtype_text(np.dtype(">i4")), dtype_text(np.dtype([("x", "<f4", (2,))]))
    ('>i4', "[('x', '<f4', (2,))]")
    """
    return str(np.lib.format.dtype_to_descr(dtype))


def read_header(store: Store, info: ObjectInfo) -> ArrayHeader:
    """Return the header of an array, refusing what cannot be read in place."""
    where = f"{store.uri}{info.key}"
    first = store.read_range(info, 0, min(_FIRST_READ_BYTES, info.size_bytes))
    if bytes(first[:6]) != _MAGIC or len(first) < 12 or first[6] not in (1, 2, 3):
        raise FormatError(
            f"{where} is not a .npy file of version 1, 2 or 3: it starts with "
            f"{bytes(first[:8])!r}; write it with np.save"
        )
    width = 2 if first[6] == 1 else 4
    start = 8 + width
    end = start + int.from_bytes(first[8:start], "little")
    if end > min(info.size_bytes, _HEADER_BYTES_MAX):
        raise FormatError(
            f"{where} is cut off or damaged: its header is to end at byte {end}, the file ends at "
            f"{info.size_bytes}"
        )
    if end > len(first):
        first = store.read_range(info, 0, end)
    encoding = "utf-8" if bytes(first[6:7]) == b"\x03" else "latin-1"
    return _checked(_parse(str(first[start:end], encoding), where), info, end, where)


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        header = ast.literal_eval(text.strip())
        header["dtype"] = np.lib.format.descr_to_dtype(header["descr"])
        header["shape"] = tuple(int(n) for n in header["shape"])
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError) as error:
        raise FormatError(
            f"{where} is damaged: its header {text[:80]!r} cannot be understood ({error})"
        ) from None
    return dict(header)


def _checked(header: dict[str, Any], info: ObjectInfo, data_offset: int, where: str) -> ArrayHeader:
    dtype, shape = header["dtype"], header["shape"]
    if dtype.hasobject:
        raise FormatError(
            f"{where} holds Python objects ({dtype}), which only unpickling could read; save it "
            "with a fixed type (numbers, 'S16', 'U32' or a record), or one object a file"
        )
    if not shape:
        raise FormatError(f"{where} is a single {dtype}, not rows; save it with at least one axis")
    if header.get("fortran_order") and len(shape) > 1:
        raise FormatError(
            f"{where} is in Fortran order: its rows do not lie together; write it anew with "
            "np.save(path, np.ascontiguousarray(array))"
        )
    end = data_offset + dtype.itemsize * prod(shape)
    if end > info.size_bytes:
        raise FormatError(
            f"{where} is cut off: an array of {dtype} {shape} ends at byte {end}, the file at "
            f"{info.size_bytes}"
        )
    return ArrayHeader(
        where=where, dtype=dtype, length=shape[0], row_shape=shape[1:], data_offset=data_offset
    )
