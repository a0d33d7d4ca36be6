"""Parquet: a row group is a block, found from the footer alone.

The footer, kept for each object, says where the column chunks of a row group lie; one read brings
them all, and they are decoded from those bytes and the footer with nothing else read. Folders as
the Hugging Face hub has them (`data/train-00000-of-00002.parquet`) are opened as they are.

Below the format stands what Arrow IPC shares with it: how columns become fields (`fields_of`) and
samples (`RowBlock`). A column is converted once for a block, without a copy where memory allows
it, and rows are then looked up. Numbers are NumPy scalars, lists of numbers are arrays (a list
that holds a null stays a list), texts are `str`, structs are dictionaries, nanosecond times are
`numpy.datetime64`, all else is what Arrow makes of it in Python. A null is None, or absent where
the field is still encoded (bytes, images). Features that Hugging Face keeps in the schema are
followed: images, audio and video are their encoded bytes, `Array2D` and its like are arrays, names
of class labels are in the part's options.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.dataset.fields import VALUE, Field
from penstock.dataset.formats.base import (
    BlockFormat,
    Options,
    Sample,
    Unit,
    block_rows,
    one_unit_each,
)
from penstock.dataset.part import Part, make_part
from penstock.errors import FormatError, MissingPackageError, OptionError
from penstock.storage.base import ObjectInfo, Store

_TAIL_BYTES = 64 << 10
_FOOTERS_KEPT = 32
_OVERREAD_BYTES_MAX = 100

Get = Callable[[int], Any]
Span = Callable[[int, int], Any]


def import_pyarrow(feature: str) -> Any:
    """Return pyarrow with its parts for Parquet and IPC, imported on first use."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise MissingPackageError(feature, "pyarrow", "parquet") from None
    return pyarrow


class ParquetFormat(BlockFormat):
    """Parquet files.

    Options: `columns=[...]` decodes these columns only (a row group is still read whole);
    `split="train"` takes one of several splits that lie side by side, `split="all"` all of them.
    """

    name = "parquet"
    options: frozenset[str] = frozenset({"columns", "split"})

    def claims(self, key: str) -> bool:
        """Return whether the name ends with `.parquet`."""
        return key.lower().endswith(".parquet")

    def units(self, objects: Sequence[ObjectInfo], store: Store, options: Options) -> list[Unit]:
        """Return a unit for each file of the chosen split."""
        return one_unit_each(only_split(objects, store, options))

    def scan(self, unit: Unit, store: Store, options: Options) -> Part:
        """Return the row groups of one file, from its footer."""
        pa = import_pyarrow("reading Parquet")
        (info,) = unit.objects
        where = f"{store.uri}{info.key}"
        blob = _read_footer(store, info)
        try:
            footer = _parse_footer(blob)
            schema = footer.metadata.schema.to_arrow_schema()
        except (pa.ArrowException, OSError) as error:
            raise FormatError(f"{where} has a footer that cannot be read: {error}") from error
        data_end = info.size_bytes - len(blob)
        for offset, (number, length, _) in footer.groups.items():
            if offset < 4 or length < 0 or offset + length > data_end:
                raise FormatError(
                    f"{where} is damaged: row group {number} takes bytes {offset} to "
                    f"{offset + length}, the footer starts at {data_end}"
                )
        blocks = [(offset, length, rows) for offset, (_, length, rows) in footer.groups.items()]
        fields, more = fields_of(schema, _null_paths(footer.metadata), options, where)
        rows = block_rows(info, blocks, blob)
        return make_part(format=self.name, fields=fields, tables=[rows], options=more)

    def unpack(self, part: Part, number: int, offset: int, raw: memoryview) -> RowBlock:
        """Return a row group, decoded in this thread: the loader has threads of its own."""
        pa = import_pyarrow("reading Parquet")
        table = part.tables[0]
        footer = _parse_footer(table.blob(number))
        group = footer.groups[offset][0]
        where = f"row group {group} of {table.key(number)}"
        piece = pa.PythonFile(_Piece(pa.py_buffer(raw), offset, int(table.sizes[number])), "r")
        try:
            file = pa.parquet.ParquetFile(piece, metadata=footer.metadata, pre_buffer=False)
            names = [f.name for f in part.fields]
            decoded = file.read_row_group(group, columns=names, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise FormatError(f"{where} cannot be decoded: {error}") from error
        return RowBlock(decoded, part.fields, where, decoded.get_total_buffer_size())


class _Piece:
    """A file of which only one range is there; what pyarrow asks of a Python file."""

    closed = False

    def __init__(self, data: Any, offset: int, size_bytes: int) -> None:
        self._data = data
        self._offset = offset
        self._size_bytes = size_bytes
        self._at = 0

    def seek(self, position: int, whence: int = 0) -> int:
        self._at = position + (0, self._at, self._size_bytes)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read_buffer(self, length: int) -> Any:
        start = self._at - self._offset
        missing = start + length - self._data.size
        if start < 0 or missing > _OVERREAD_BYTES_MAX:
            raise OSError(f"{length} bytes at {self._at} lie outside of the row group")
        self._at += length
        if missing <= 0:
            return self._data.slice(start, length)
        # Chunks of old writers may be longer than they say (PARQUET-816), so pyarrow asks for more.
        pa = import_pyarrow("reading Parquet")
        return pa.py_buffer(self._data.slice(start).to_pybytes() + bytes(missing))

    def read(self, length: int) -> bytes:
        return bytes(self.read_buffer(length).to_pybytes())

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Footer:
    metadata: Any
    groups: dict[int, tuple[int, int, int]]
    """Number, length and rows of each row group that has rows, by its offset."""


def _read_footer(store: Store, info: ObjectInfo) -> bytes:
    """Return the footer with the eight bytes that end a file."""
    where = f"{store.uri}{info.key}"
    tail_bytes = min(info.size_bytes, _TAIL_BYTES)
    tail = store.read_range(info, info.size_bytes - tail_bytes, tail_bytes)
    magic = bytes(tail[-4:])
    if magic == b"PARE":
        raise FormatError(f"{where} is encrypted, which is not supported; write it in the clear")
    if magic != b"PAR1" or info.size_bytes < 12:
        raise FormatError(
            f"{where} is not a Parquet file, or is cut off: its {info.size_bytes} bytes end with "
            f"{magic!r}, not b'PAR1'"
        )
    footer_bytes = int.from_bytes(tail[-8:-4], "little") + 8
    if footer_bytes > info.size_bytes - 4:
        raise FormatError(
            f"{where} is damaged: a footer of {footer_bytes} bytes in {info.size_bytes} bytes"
        )
    if footer_bytes <= tail_bytes:
        return bytes(tail[-footer_bytes:])
    return bytes(store.read_range(info, info.size_bytes - footer_bytes, footer_bytes))


@lru_cache(maxsize=_FOOTERS_KEPT)
def _parse_footer(blob: bytes) -> _Footer:
    pa = import_pyarrow("reading Parquet")
    metadata = pa.parquet.read_metadata(pa.BufferReader(blob))
    groups = {}
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        chunks = [group.column(i) for i in range(group.num_columns)]
        if group.num_rows and chunks:
            starts = [_start(c) for c in chunks]
            end = max(s + c.total_compressed_size for s, c in zip(starts, chunks, strict=True))
            groups[min(starts)] = (number, end - min(starts), group.num_rows)
    return _Footer(metadata, groups)


def _start(chunk: Any) -> int:
    # Some writers say 0 where there is no dictionary.
    return int(min(chunk.dictionary_page_offset or chunk.data_page_offset, chunk.data_page_offset))


def _null_paths(metadata: Any) -> set[str]:
    """Return the paths of all leaves that may hold nulls, as far as statistics tell."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    paths = set()
    for number in range(metadata.num_columns):
        leaf = metadata.schema.column(number)
        if leaf.max_definition_level and not all(_is_full(g.column(number)) for g in groups):
            paths.add(leaf.path)
    return paths


def _is_full(chunk: Any) -> bool:
    known = chunk.statistics
    return known is not None and known.has_null_count and known.null_count == 0


def only_split(
    objects: Sequence[ObjectInfo], store: Store, options: Options
) -> Sequence[ObjectInfo]:
    """Return the objects of the split that the user chose, or refuse to mix several."""
    chosen = options.get("split")
    splits = sorted({s for o in objects if (s := split_of(o.key))})
    if chosen == "all" or (chosen is None and len(splits) <= 1):
        return objects
    if chosen is None:
        raise FormatError(
            f"{store.uri} holds {len(splits)} splits ({', '.join(splits)}); choose one with "
            f"split={splits[-1]!r} or a pattern, or take all with split='all'"
        )
    if chosen not in splits:
        raise OptionError(f"split={chosen!r} is not in {store.uri}; found: {splits or 'no splits'}")
    return [o for o in objects if split_of(o.key) == chosen]


_SHARD = re.compile(r"(?:.*[^\w.-])?([\w.-]+?)-\d+-of-\d+")
_SPLIT = re.compile(r"(?:.*[^a-z])?(train|test|validation|valid|val|dev|eval)(?![a-z])")


def split_of(key: str) -> str:
    """Return the split that a name shows, or nothing.

    >>> split_of("data/train-00000-of-00002.parquet"), split_of("en/test/0.parquet"), split_of("a")
    ('train', 'test', '')
    """
    found = _SHARD.match(key) or _SPLIT.match(key.lower())
    return found[1] if found else ""


_MEDIA = {"Image": "image", "Audio": "audio", "Video": "video"}


def fields_of(
    schema: Any, null_paths: set[str], options: Options, where: str
) -> tuple[list[Field], dict[str, Any]]:
    """Return the fields of a schema, and what else a part should keep: names of classes.

    `null_paths` are the nodes of the schema's tree that may hold nulls.
    """
    names = list(options.get("columns") or schema.names)
    unknown = [n for n in names if n not in schema.names]
    if unknown:
        raise OptionError(f"{where} has no column {unknown[0]!r}; it has: {schema.names}")
    if not names or len(set(names)) < len(names):
        raise FormatError(f"{where} has columns without a name of their own: {names}; rename them")
    features = _features(schema)
    fields = [_field(schema.field(n), features.get(n, {}), null_paths) for n in names]
    classes = {n: features[n]["names"] for n in names if "names" in features.get(n, {})}
    return fields, {"classes": classes} if classes else {}


def _features(schema: Any) -> Mapping[str, Mapping[str, Any]]:
    try:
        known = msgspec.json.decode((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name: feature for name, feature in known.items() if isinstance(feature, dict)}
    except (KeyError, TypeError, AttributeError, msgspec.DecodeError):
        return {}


def _field(column: Any, feature: Mapping[str, Any], null_paths: set[str]) -> Field:
    import pyarrow as pa

    name, kind = column.name, _plain(column.type)
    holding = {p for p in null_paths if p == name or p.startswith(f"{name}.")}
    media = _media(kind, feature)
    if media:
        return Field(name=name, encoding=media, optional=bool(holding & {name, f"{name}.bytes"}))
    optional = column.nullable and bool(holding)
    if _is_bytes(kind):
        return Field(name=name, encoding="bytes", optional=optional)
    shape: tuple[int, ...] | None = ()
    if "shape" in feature and _is_list(kind):
        shape = tuple(feature["shape"]) if None not in feature["shape"] else None
        while _is_list(kind):
            kind = _plain(kind.value_type)
    while pa.types.is_fixed_size_list(kind) and shape is not None:
        shape = (*shape, kind.list_size)
        kind = _plain(kind.value_type)
    dtype = np.dtype(kind.to_pandas_dtype()).str if _is_number(kind) else None
    return Field(
        name=name, encoding=VALUE, dtype=dtype, shape=shape if dtype else None, optional=optional
    )


def _plain(kind: Any) -> Any:
    """Return the type that an extension or a dictionary stores its values in."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        return _plain(kind.storage_type)
    return _plain(kind.value_type) if pa.types.is_dictionary(kind) else kind


def _media(kind: Any, feature: Mapping[str, Any]) -> str:
    """Return the encoding of a Hugging Face image, audio or video; nothing for other features."""
    import pyarrow as pa

    is_pair = pa.types.is_struct(kind) and {f.name for f in kind} == {"bytes", "path"}
    return _MEDIA.get(feature.get("_type", ""), "") if is_pair else ""


def _is_number(kind: Any) -> bool:
    import pyarrow as pa

    return any(f(kind) for f in (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean))


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _is_bytes(kind: Any) -> bool:
    import pyarrow as pa

    of = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
    return any(f(kind) for f in of)


class RowBlock:
    """Rows of some columns, converted once and looked up by row."""

    def __init__(self, table: Any, fields: Sequence[Field], where: str, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        features = _features(table.schema)
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
        sample = {name: get(row) for name, get in self._columns}
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
    if _media(array.type, feature):
        return _media_getter(array, where)
    if "shape" in feature and _is_list(array.type):
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
    while _is_list(array.type):
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
    if _is_number(kind) or is_nano:
        return _with_nulls(array, _numbers(array).__getitem__)
    if _is_bytes(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _with_nulls(array, _bytes_getter(array))
    if _is_list(kind):
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
    values: list[Any] = array.to_pylist()
    return values.__getitem__


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
    if _is_bytes(kind):
        return lambda row: data[ends[row] : ends[row + 1]]
    return lambda row: str(data[ends[row] : ends[row + 1]], "utf-8")


def _spanner(array: Any) -> Span:
    """Return the function from a run of rows to their values: an array where they are numbers."""
    get = _getter(array)
    if _is_number(array.type):
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
    if len(shape) == 1 or not _is_number(array.type) or array.null_count:
        return None
    return _numbers(array).reshape(shape)
