"""The memory of Arrow's arrays, and how many rows are taken out of it at once.

`arrow_rows` takes single rows. Kinds of columns that are not listed here, and those that hold
nulls, are taken row by row as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.dataset.decode_columns import decode_texts
from penstock.dataset.formats.arrow_fields import is_bytes, is_list, is_number
from penstock.dataset.part import Ints
from penstock.dataset.ragged import Column, Ragged, TakenRows

Take = Callable[[Ints], Column | None]
"""Returns a column for some rows; None where they must be taken one by one."""


def taker(array: Any, media: str) -> Take | None:
    """Return what takes many rows of a chunk, or None where that has no faster way.

    `media` is the encoding of a Hugging Face image, audio or video, of which the bytes are taken.
    """
    import pyarrow as pa

    array = getattr(array, "storage", array)
    if media:
        # A row without bytes may name a file instead, which is an error that names the row.
        data = array.field("bytes")
        return None if array.null_count or data.null_count else _bytes_taker(data)
    if is_bytes(array.type):
        return _bytes_taker(array)
    if array.null_count:
        return None
    if is_number(array.type):
        numbers = numbers_of(array)
        return lambda rows: TakenRows(numbers, rows)
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        take = _bytes_taker(array)
        return lambda rows: decode_texts(take(rows), np.empty)
    if is_list(array.type) and is_number(array.values.type) and not array.values.null_count:
        offsets, flat = np.asarray(array.offsets).astype(np.int64), numbers_of(array.values)
        return lambda rows: _lists(flat, offsets, rows)
    matrix = matrix_of(array)
    return None if matrix is None else lambda rows: TakenRows(matrix, rows)


def _lists(flat: Any, offsets: Ints, rows: Ints) -> Ragged:
    starts = offsets[rows]
    return Ragged(flat, starts, offsets[rows + 1] - starts, is_bytes=False)


def _bytes_taker(array: Any) -> Callable[[Ints], Ragged]:
    data, edges = byte_edges(array)
    values = np.frombuffer(data, np.uint8)
    valid = array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else None

    def take(rows: Ints) -> Ragged:
        starts, ends = edges(rows)
        lengths = (ends - starts).astype(np.int64)
        if valid is not None:
            lengths[~valid[rows]] = -1
        return Ragged(values, starts.astype(np.int64), lengths)

    return take


def numbers_of(array: Any) -> npt.NDArray[Any]:
    """Return the values of an array as they lie in memory; where nulls are, anything."""
    import pyarrow as pa

    if array.null_count:
        buffers = [None, array.buffers()[1]]
        array = pa.Array.from_buffers(array.type, len(array), buffers, offset=array.offset)
    numbers: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return numbers


Edges = Callable[[Any], tuple[Any, Any]]
"""Returns where a row's value starts and ends, or those of many rows."""


def byte_edges(array: Any) -> tuple[memoryview, Edges]:
    """Return the bytes of an array of bytes or texts, and what finds a value in them."""
    import pyarrow as pa

    kind, buffers = array.type, array.buffers()
    data = memoryview(buffers[-1] or b"").cast("B")
    if pa.types.is_fixed_size_binary(kind):
        width, first = kind.byte_width, array.offset
        return data, lambda row: ((first + row) * width, (first + row + 1) * width)
    is_large = pa.types.is_large_binary(kind) or pa.types.is_large_string(kind)
    width = 8 if is_large else 4
    ends = np.frombuffer(buffers[1] or bytes(width), f"<i{width}")[array.offset :]
    return data, lambda row: (ends[row], ends[row + 1])


def matrix_of(array: Any) -> npt.NDArray[Any] | None:
    """Return lists of one size, of numbers without nulls, as one array of more dimensions."""
    import pyarrow as pa

    shape = [len(array)]
    while pa.types.is_fixed_size_list(array.type) and not array.null_count:
        shape.append(array.type.list_size)
        array = array.flatten()
    if len(shape) == 1 or not is_number(array.type) or array.null_count:
        return None
    return numbers_of(array).reshape(shape)
