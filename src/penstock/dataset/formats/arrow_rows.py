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

from penstock.dataset.fields import VALUE, Field
from penstock.dataset.formats.arrow_columns import (
    Take,
    byte_edges,
    matrix_of,
    numbers_of,
    taker,
)
from penstock.dataset.formats.arrow_fields import (
    features_of,
    is_bytes,
    is_list,
    is_number,
    media_of,
)
from penstock.dataset.formats.base import Sample
from penstock.dataset.part import Ints
from penstock.dataset.ragged import FieldColumns
from penstock.errors import FormatError, PenstockError

Get = Callable[[int], Any]
Span = Callable[[int, int], Any]


@contextmanager
def decoding(where: str) -> Iterator[None]:
    """Raise a `FormatError` for whatever pyarrow makes of damaged bytes.

    Not only Arrow's own errors: names that are not UTF-8, sizes beyond 64 bits, huge allocations
    and missing columns are raised as errors of Python.
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
        self._table = table
        self._takers: list[tuple[str, Get, Take | None]] | None = None
        """What takes many rows of each column; made when many are first asked for."""
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

    def columns(self, rows: Ints) -> FieldColumns | None:
        """Return some rows, a column at a time."""
        if int(rows.max()) >= self._table.num_rows:
            return None
        if self._takers is None:  # Two threads that come here at once make the same.
            self._takers = [(n, get, _column_taker(self._table, n)) for n, get in self._columns]
        out: FieldColumns = {}
        for name, get, take in self._takers:
            taken = None if take is None else take(rows)
            out[name] = [get(row) for row in rows.tolist()] if taken is None else taken
        return out


def _column_taker(table: Any, name: str) -> Take | None:
    column, feature = table.column(name), features_of(table.schema).get(name, {})
    if column.num_chunks != 1:
        return None
    media = media_of(getattr(column.type, "storage_type", column.type), feature)
    if not media and "shape" in feature:
        return None
    return taker(column.chunk(0), media)


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
        return _with_nulls(array, numbers_of(array).__getitem__)
    if is_bytes(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _with_nulls(array, _bytes_getter(array))
    if is_list(kind):
        offsets, span = np.asarray(array.offsets), _spanner(array.values)
        return _with_nulls(array, lambda row: span(offsets[row], offsets[row + 1]))
    matrix = matrix_of(array)
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


def _bytes_getter(array: Any) -> Get:
    data, edges = byte_edges(array)
    if is_bytes(array.type):
        return lambda row: data[slice(*edges(row))]
    return lambda row: str(data[slice(*edges(row))], "utf-8")


def _spanner(array: Any) -> Span:
    """Return the function from a run of rows to their values: an array where they are numbers."""
    get = _getter(array)
    if is_number(array.type):
        numbers = numbers_of(array)
        if not array.null_count:
            return lambda start, end: numbers[start:end]
        valid = array.is_valid().to_numpy(zero_copy_only=False)
        return lambda start, end: (
            numbers[start:end]
            if valid[start:end].all()
            else [get(row) for row in range(start, end)]
        )
    matrix = matrix_of(array)
    if matrix is not None:
        return lambda start, end: matrix[start:end]
    return lambda start, end: [get(row) for row in range(start, end)]
