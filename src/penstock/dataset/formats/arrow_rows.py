"""How the rows of an Arrow table become samples; Parquet and Arrow IPC share it.

A column is converted once for a block, without a copy where memory allows it, and rows are then
looked up. Numbers are NumPy scalars, lists of numbers are arrays (a list that holds a null stays a
list), texts are `str`, structs are dictionaries, nanosecond times are `numpy.datetime64`, all else
is what Arrow makes of it in Python. A null is None, or absent where the field is still encoded
(bytes, images).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.dataset.fields import VALUE, Field
from penstock.dataset.formats.arrow_fields import (
    features_of,
    is_bytes,
    is_list,
    is_number,
    media_of,
)
from penstock.dataset.formats.base import Sample
from penstock.errors import FormatError, PenstockError

Get = Callable[[int], Any]
Span = Callable[[int, int], Any]


@contextmanager
def decoding(where: str) -> Iterator[None]:
    """Raise a `FormatError` for whatever pyarrow makes of damaged bytes.

    That is not only Arrow's own errors: names that are not UTF-8, sizes beyond 64 bits, memory that
    nobody has and columns that are not there come as errors of Python.
    """
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:
        raise FormatError(f"{where} cannot be decoded: {type(error).__name__}: {error}") from error


class RowBlock:
    """Rows of some columns, converted once and looked up by row."""

    def __init__(self, table: Any, fields: Sequence[Field], where: str, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._where = where
        features = features_of(table.schema)
        self._columns: list[tuple[str, Get]] = []
        self._may_lack: list[str] = []
        for field in fields:
            if field.name not in table.schema.names:
                continue
            column = table.column(field.name)
            get = _column_getter(column, features.get(field.name, {}), f"{field.name!r} of {where}")
            self._columns.append((field.name, get))
            if field.encoding != VALUE and field.optional:
                self._may_lack.append(field.name)

    def sample(self, row: int) -> Sample:
        """Return one row."""
        try:
            sample = {name: get(row) for name, get in self._columns}
        except FormatError:
            raise
        except Exception as error:  # Texts that are not UTF-8, dates that Python cannot have.
            raise FormatError(
                f"row {row} of {self._where} cannot be decoded: {type(error).__name__}: {error}"
            ) from error
        for name in self._may_lack:
            if sample[name] is None:
                del sample[name]
        return sample


def _column_getter(column: Any, feature: Mapping[str, Any], where: str) -> Get:
    gets = [_chunk_getter(chunk, feature, where) for chunk in column.chunks]
    if len(gets) == 1:
        return gets[0]
    # Texts beyond 2 GiB come in several chunks.
    firsts = np.cumsum([0] + [len(chunk) for chunk in column.chunks]).tolist()

    def get(row: int) -> Any:
        number = bisect_right(firsts, row) - 1
        return gets[number](row - firsts[number])

    return get


def _chunk_getter(array: Any, feature: Mapping[str, Any], where: str) -> Get:
    array = getattr(array, "storage", array)
    if media_of(array.type, feature):
        return _media_getter(array, where)
    if "shape" in feature and is_list(array.type):
        return _with_nulls(array, _tensor_getter(array, feature["shape"]))
    return _getter(array)


def _media_getter(array: Any, where: str) -> Get:
    data, path = _getter(array.field("bytes")), _getter(array.field("path"))

    def get(row: int) -> Any:
        value = data(row)
        if value is None and path(row) is not None:
            raise FormatError(
                f"row {row} of {where} names the file {path(row)!r} instead of holding its bytes; "
                "save the data set with its files embedded (`Dataset.save_to_disk` does)"
            )
        return value

    return _with_nulls(array, get)


def _tensor_getter(array: Any, shape: Sequence[int | None]) -> Get:
    """Return the getter of an array of known shape that is stored as lists of lists."""
    levels = []
    while is_list(array.type):
        levels.append(np.asarray(array.offsets))
        array = array.values
    flat = array.to_numpy(zero_copy_only=False)
    sizes = [-1 if size is None else size for size in shape]

    def get(row: int) -> Any:
        start, end = row, row + 1
        for offsets in levels:
            start, end = offsets[start], offsets[end]
        return flat[start:end].reshape(sizes)

    return get


def _with_nulls(array: Any, get: Get) -> Get:
    if not array.null_count:
        return get
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    return lambda row: get(row) if valid[row] else None


def _getter(array: Any) -> Get:
    """Return the function from a row to its value."""
    import pyarrow as pa

    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return _getter(array.storage)
    if pa.types.is_dictionary(kind):
        return _getter(array.dictionary_decode())
    is_nano = (pa.types.is_timestamp(kind) or pa.types.is_duration(kind)) and kind.unit == "ns"
    if is_number(kind) or is_nano:
        return _with_nulls(array, _numbers(array).__getitem__)
    if is_bytes(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _with_nulls(array, _bytes_getter(array))
    if is_list(kind):
        offsets, span = np.asarray(array.offsets), _spanner(array.values)
        return _with_nulls(array, lambda row: span(offsets[row], offsets[row + 1]))
    matrix = _matrix(array)
    if matrix is not None:
        return matrix.__getitem__
    if pa.types.is_fixed_size_list(kind):
        size, first, span = kind.list_size, array.offset, _spanner(array.values)
        return _with_nulls(array, lambda row: span((first + row) * size, (first + row + 1) * size))
    if pa.types.is_struct(kind):
        inner = [(f.name, _getter(array.field(i))) for i, f in enumerate(kind)]
        return _with_nulls(array, lambda row: {name: get(row) for name, get in inner})
    # One row at a time: a few bytes can claim billions of rows of nulls or of run-lengths.
    return lambda row: array[row].as_py()


def _numbers(array: Any) -> npt.NDArray[Any]:
    """Return the values of an array as they lie in memory; where nulls are, anything."""
    import pyarrow as pa

    if array.null_count:
        buffers = [None, array.buffers()[1]]
        array = pa.Array.from_buffers(array.type, len(array), buffers, offset=array.offset)
    numbers: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return numbers


def _bytes_getter(array: Any) -> Get:
    import pyarrow as pa

    kind, buffers = array.type, array.buffers()
    data = memoryview(buffers[-1] or b"").cast("B")
    if pa.types.is_fixed_size_binary(kind):
        width, first = kind.byte_width, array.offset
        return lambda row: data[(first + row) * width : (first + row + 1) * width]
    is_large = pa.types.is_large_binary(kind) or pa.types.is_large_string(kind)
    width = 8 if is_large else 4
    ends = np.frombuffer(buffers[1] or bytes(width), f"<i{width}")[array.offset :]
    if is_bytes(kind):
        return lambda row: data[ends[row] : ends[row + 1]]
    return lambda row: str(data[ends[row] : ends[row + 1]], "utf-8")


def _spanner(array: Any) -> Span:
    """Return the function from a run of rows to their values: an array where they are numbers."""
    get = _getter(array)
    if is_number(array.type):
        numbers = _numbers(array)
        if not array.null_count:
            return lambda start, end: numbers[start:end]
        valid = array.is_valid().to_numpy(zero_copy_only=False)
        return lambda start, end: (
            numbers[start:end]
            if valid[start:end].all()
            else [get(row) for row in range(start, end)]
        )
    matrix = _matrix(array)
    if matrix is not None:
        return lambda start, end: matrix[start:end]
    return lambda start, end: [get(row) for row in range(start, end)]


def _matrix(array: Any) -> npt.NDArray[Any] | None:
    """Return lists of one size, of numbers without nulls, as one array of more dimensions."""
    import pyarrow as pa

    shape = [len(array)]
    while pa.types.is_fixed_size_list(array.type) and not array.null_count:
        shape.append(array.type.list_size)
        array = array.flatten()
    if len(shape) == 1 or not is_number(array.type) or array.null_count:
        return None
    return _numbers(array).reshape(shape)
