"""Decoders of a whole column: the same values as a decoder gives one by one, from one call.

Each takes a column of encoded bytes in which no value is absent, and returns all values, or None
where it cannot be sure to return what the decoder of single values would: then the caller decodes
the values one by one, and an error names the first sample that has one.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.dataset.npy_header import parse_header
from penstock.dataset.ragged import NewArray, Ragged

ColumnDecoder = Callable[[Ragged, NewArray], "npt.NDArray[Any] | list[Any] | None"]

_MARK = secrets.token_hex(16)
"""Stands between the JSON texts of a column. Nobody can write a text that contains it."""
_BETWEEN = f',"{_MARK}",'.encode()
_HEADER_BYTES = 1 << 16
"""Bytes of a column's first array in which its header must end."""


def number_column(values: list[Any]) -> Any:
    """Return numbers as an array, or as they are where no type of NumPy's holds them all.

    >>> number_column([1, 2**64]), number_column([-1, 2**63])
    ([1, 18446744073709551616], [-1, 9223372036854775808])
    """
    array = np.array(values)
    if array.dtype.kind == "f" and all(isinstance(v, int | np.integer) for v in values):
        return values  # Of -1 and 2**63 NumPy would make floats that are neither.
    return values if array.dtype == object else array


def decode_ints(texts: Ragged, new: NewArray) -> list[int] | None:
    """Return integers, as `int` reads them."""
    # A value that contains the separator makes one part too many.
    parts = texts.joined(b"\0").split(b"\0")
    if len(parts) != len(texts.starts):
        return None
    try:
        return list(map(int, parts))
    except ValueError:
        return None


def decode_texts(texts: Ragged, new: NewArray) -> list[str] | None:
    """Return texts in UTF-8."""
    try:
        # No character's encoding contains a zero byte, so all are valid exactly if each is.
        parts = str(texts.joined(b"\0"), "utf-8").split("\0")
    except UnicodeDecodeError:
        return None
    return parts if len(parts) == len(texts.starts) else None


def decode_jsons(texts: Ragged, new: NewArray) -> list[Any] | None:
    """Return JSON values, decoded as one array with a mark between two of them.

    Marks in every second place show that each value is one text: neither two, nor a piece of one.
    """
    try:
        found = msgspec.json.decode(b"[%b]" % texts.joined(_BETWEEN))
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    num_values = len(texts.starts)
    if len(found) != 2 * num_values - 1 or found[1::2].count(_MARK) != num_values - 1:
        return None
    values: list[Any] = found[::2]
    return values


def decode_arrays(arrays: Ragged, new: NewArray) -> npt.NDArray[Any] | None:
    """Return `.npy` arrays whose headers are the same, to the byte, as one array."""
    lengths = arrays.lengths
    if (lengths != lengths[0]).any():
        return None
    first, length = int(arrays.starts[0]), int(lengths[0])
    try:
        head = parse_header(arrays.data[first : first + length].data, length, "the array")
    except Exception:  # The decoder of single values will say what it is.
        return None
    if head.is_fortran or head.data_offset > _HEADER_BYTES:
        return None
    headers = rows_at_all(arrays, 0, head.data_offset)
    size = head.dtype.itemsize * int(np.prod(head.shape, dtype=np.int64))
    if (headers != headers[0]).any() or head.data_offset + size > length:
        return None
    starts = arrays.starts + head.data_offset
    values = Ragged(arrays.data, starts, np.full(len(starts), size)).rows(new)
    return values.view(head.dtype).reshape(len(starts), *head.shape) if size else None


def rows_at_all(values: Ragged, at: int, width: int) -> npt.NDArray[Any]:
    """Return `width` elements from `at` on of each value."""
    starts = values.starts + at
    return Ragged(values.data, starts, np.full(len(starts), width)).rows(np.empty)


def flat_decoder(dtype: str) -> ColumnDecoder:
    """Return the decoder of bytes that are the elements of an array of one axis."""
    kind = np.dtype(dtype)

    def decode_flat(arrays: Ragged, new: NewArray) -> npt.NDArray[Any] | None:
        length = int(arrays.lengths[0])
        if (arrays.lengths != length).any() or length % kind.itemsize or not length:
            return None
        return arrays.rows(new).view(kind)

    return decode_flat
