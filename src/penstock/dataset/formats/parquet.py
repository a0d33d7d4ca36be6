"""Parquet: a row group is a block, found from the footer alone.

The footer, kept for each object, says where the column chunks of a row group lie; one read brings
them all, and they are decoded from those bytes and the footer with nothing else read. Folders as
the Hugging Face hub has them (`data/train-00000-of-00002.parquet`) are opened as they are.

A footer is parsed in a process of its own before this one ever does: see `dataset/parse_process`.
How columns become fields and samples is in `arrow_fields` and `arrow_rows`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.dataset.fields import Field
from penstock.dataset.formats.arrow_fields import import_pyarrow
from penstock.dataset.formats.arrow_rows import RowBlock, decoding
from penstock.dataset.formats.base import (
    BlockFormat,
    Options,
    Unit,
    block_rows,
    one_unit_each,
)
from penstock.dataset.formats.parquet_footer import parse_footer
from penstock.dataset.parse_process import parsed_by_arrow
from penstock.dataset.part import Part, make_part
from penstock.errors import FormatError, OptionError
from penstock.storage.base import ObjectInfo, Store

_TAIL_BYTES = 64 << 10
_FOOTER_BYTES_MAX = 1 << 29
_OVERREAD_BYTES_MAX = 100
_PAGE_TEXT_BYTES_MAX = 100 << 20
"""Of a text in the head of a page: a smallest or largest value."""


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
        (info,) = unit.objects
        where = f"{store.uri}{info.key}"
        blob = _read_footer(store, info)
        facts = parsed_by_arrow("parquet_footer", blob, options, f"the footer of {where}")
        data_end = info.size_bytes - len(blob)
        for number, (offset, length, _) in enumerate(facts["groups"]):
            if offset < 4 or length < 0 or offset + length > data_end:
                raise FormatError(
                    f"{where} is damaged: row group {number} takes bytes {offset} to "
                    f"{offset + length}, the footer starts at {data_end}"
                )
        return make_part(
            format=self.name,
            fields=msgspec.convert(facts["fields"], list[Field]),
            tables=[block_rows(info, facts["groups"], blob)],
            options=facts["options"],
        )

    def has_columns(self, part: Part) -> bool:
        """Return True: blocks are tables."""
        return True

    def unpack(self, part: Part, number: int, offset: int, raw: memoryview) -> RowBlock:
        """Return a row group, decoded in this thread, since the loader has threads of its own."""
        pa = import_pyarrow("reading Parquet")
        table = part.tables[0]
        with decoding(f"the footer of {table.key(number)}"):
            footer = parse_footer(table.blob(number))
        group, length, num_rows = footer.groups.get(offset, (-1, 0, 0))
        where = f"row group {group} of {table.key(number)}"
        if length != len(raw):
            raise FormatError(
                f"{where} at byte {offset} has {length} bytes by its footer, {len(raw)} by the "
                "index; index it again with `penstock index --rebuild`"
            )
        with decoding(where):
            piece = pa.PythonFile(
                _RangeFile(pa.py_buffer(raw), offset, int(table.sizes[number])), "r"
            )
            file = pa.parquet.ParquetFile(
                piece,
                metadata=footer.metadata,
                pre_buffer=False,
                page_checksum_verification=True,
                thrift_string_size_limit=min(max(len(raw), 1), _PAGE_TEXT_BYTES_MAX),
            )
            names = [f.name for f in part.fields]
            decoded = file.read_row_group(group, columns=names, use_threads=False)
            if decoded.num_rows != num_rows:
                raise FormatError(
                    f"{where} has {decoded.num_rows} rows, its footer says {num_rows}"
                )
            return RowBlock(decoded, part.fields, where, decoded.get_total_buffer_size())


class _RangeFile:
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
    if footer_bytes > min(info.size_bytes - 4, _FOOTER_BYTES_MAX):
        raise FormatError(
            f"{where} is damaged: a footer of {footer_bytes} bytes in {info.size_bytes} bytes, at "
            f"most {_FOOTER_BYTES_MAX} can be read"
        )
    if footer_bytes <= tail_bytes:
        return bytes(tail[-footer_bytes:])
    return bytes(store.read_range(info, info.size_bytes - footer_bytes, footer_bytes))


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
