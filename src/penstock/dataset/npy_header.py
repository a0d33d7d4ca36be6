"""The header of a `.npy` file, versions 1.0 to 3.0: type, shape and order of what follows.

Whatever a header claims is checked here: its type holds no Python objects, its shape is made of
lengths, and its bytes are there.
"""

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
"""Length of a header: a record of ten thousand members takes half of it."""
_AXES_MAX = 64
"""NumPy's own bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayHeader:
    """What a `.npy` file holds."""

    where: str
    """The file, for messages."""
    dtype: np.dtype[Any]
    """Type of an element."""
    shape: tuple[int, ...]
    """Length of each axis."""
    is_fortran: bool
    """Whether the first axis varies fastest."""
    data_offset: int
    """Where the first row starts."""

    @property
    def length(self) -> int:
        """Number of rows: the first axis."""
        return self.shape[0]

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The other axes."""
        return self.shape[1:]

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


def plain_dtype(descr: Any, where: str) -> np.dtype[Any]:
    """Return the NumPy type that a file names, which must not hold Python objects.

    Bytes of a file that are read as objects are followed as pointers, and the process dies.

    >>> plain_dtype("<f4", "x")
    dtype('float32')
    """
    try:
        dtype: np.dtype[Any] = np.lib.format.descr_to_dtype(descr)
    except Exception as error:  # NumPy has many ways to refuse a type.
        raise FormatError(
            f"{where} is damaged: {str(descr)[:80]!r} is not a NumPy type ({error})"
        ) from error
    if dtype.hasobject:
        raise FormatError(
            f"{where} holds Python objects ({dtype}), which only unpickling could read; save it "
            "with a fixed type (numbers, 'S16', 'U32' or a record), or one object a file"
        )
    if dtype.subdtype is not None:
        raise FormatError(f"{where} is damaged: the type {dtype} has axes of its own")
    return dtype


def read_header(store: Store, info: ObjectInfo) -> ArrayHeader:
    """Return the header of an array, refusing what has no rows that can be read in place."""
    where = f"{store.uri}{info.key}"
    first = store.read_range(info, 0, min(_FIRST_READ_BYTES, info.size_bytes))
    end = _header_end(first, info.size_bytes, where)
    if end > len(first):
        first = store.read_range(info, 0, end)
    head = parse_header(first, info.size_bytes, where)
    if not head.shape:
        raise FormatError(
            f"{where} is a single {head.dtype}, not rows; save it with at least one axis"
        )
    if head.is_fortran and len(head.shape) > 1:
        raise FormatError(
            f"{where} is in Fortran order: its rows do not lie together; write it anew with "
            "np.save(path, np.ascontiguousarray(array))"
        )
    if head.length and not head.row_bytes:
        raise FormatError(
            f"{where} claims {head.length} rows of {head.dtype} {head.row_shape}, which take no "
            "bytes; save it with rows that hold something"
        )
    return head


def parse_header(data: memoryview, size_bytes: int, where: str) -> ArrayHeader:
    """Return the header of an array of `size_bytes` bytes from its first bytes."""
    end = _header_end(data, size_bytes, where)
    start = 10 if data[6] == 1 else 12
    encoding = "utf-8" if data[6] == 3 else "latin-1"
    head = _literal(bytes(data[start:end]), encoding, where)
    dtype = plain_dtype(head["descr"], where)
    shape = _checked_shape(head["shape"], where)
    last = end + dtype.itemsize * prod(shape)
    if last > size_bytes:
        raise FormatError(
            f"{where} is cut off: an array of {dtype} {shape} ends at byte {last}, the file at "
            f"{size_bytes}"
        )
    is_fortran = bool(head["fortran_order"])
    return ArrayHeader(
        where=where, dtype=dtype, shape=shape, is_fortran=is_fortran, data_offset=end
    )


def _header_end(first: memoryview, size_bytes: int, where: str) -> int:
    if bytes(first[:6]) != _MAGIC or len(first) < 12 or first[6] not in (1, 2, 3):
        raise FormatError(
            f"{where} is not a .npy file of version 1, 2 or 3: it starts with "
            f"{bytes(first[:8])!r}; write it with np.save"
        )
    start = 10 if first[6] == 1 else 12
    end = start + int.from_bytes(first[8:start], "little")
    if end > min(size_bytes, _HEADER_BYTES_MAX):
        raise FormatError(
            f"{where} is cut off or damaged: its header is to end at byte {end}, the file ends at "
            f"{size_bytes}"
        )
    return end


def _literal(data: bytes, encoding: str, where: str) -> dict[str, Any]:
    try:
        head = ast.literal_eval(data.decode(encoding).strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise FormatError(
            f"{where} is damaged: its header {data[:80]!r} cannot be understood ({error})"
        ) from error
    if not isinstance(head, dict) or not {"descr", "shape", "fortran_order"} <= head.keys():
        raise FormatError(
            f"{where} is damaged: its header {data[:80]!r} does not give descr, shape and "
            "fortran_order"
        )
    return head


def _checked_shape(shape: Any, where: str) -> tuple[int, ...]:
    is_right = (
        isinstance(shape, tuple)
        and len(shape) <= _AXES_MAX
        and all(type(n) is int and 0 <= n < 2**63 for n in shape)
    )
    if not is_right:
        raise FormatError(f"{where} is damaged: {str(shape)[:80]} is not the shape of an array")
    return tuple(shape)
