"""The footer of a Parquet file: where its row groups lie and what its columns are.

`parse_footer_apart` runs in a parser process, because one wrong bit in a footer can end the process
that parses it. `parse_footer` is for footers that have passed there: their bytes are kept in the
index.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.dataset.formats.arrow_fields import fields_of, import_pyarrow
from penstock.errors import FormatError

if TYPE_CHECKING:
    from penstock.dataset.parse_child import ParserCall

_FOOTERS_KEPT = 32


@dataclass(frozen=True, slots=True)
class Footer:
    """A footer as pyarrow has it, and where the row groups lie."""

    metadata: Any
    groups: dict[int, tuple[int, int, int]]
    """Number, length and rows of each row group that has rows, by its offset."""


@lru_cache(maxsize=_FOOTERS_KEPT)
def parse_footer(blob: bytes) -> Footer:
    """Return a footer from its bytes and the eight bytes that end a file."""
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
    return Footer(metadata, groups)


def parse_footer_apart(call: ParserCall) -> dict[str, Any]:
    """Return the row groups (offset, length, rows), fields and options of a file: plain values."""
    pa = import_pyarrow("reading Parquet")
    blob = bytes(call.data[0])
    footer = parse_footer(blob)
    _check_rows(footer.metadata)
    null_paths = _null_paths(footer.metadata)
    # Reading opens a file by its metadata: whatever that does to a footer happens here first.
    file = pa.parquet.ParquetFile(pa.BufferReader(blob), metadata=footer.metadata)
    fields, more = fields_of(file.schema_arrow, null_paths, call.options, "it")
    return {
        "groups": [[offset, length, rows] for offset, (_, length, rows) in footer.groups.items()],
        "fields": [msgspec.to_builtins(f) for f in fields],
        "options": more,
    }


def _check_rows(metadata: Any) -> None:
    """Refuse row groups that claim other numbers of rows than their columns have values."""
    flat = [
        i for i in range(metadata.num_columns) if not metadata.schema.column(i).max_repetition_level
    ]
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        counts = {group.num_rows, *(group.column(i).num_values for i in flat)}
        if len(counts) > 1 or group.num_rows < 0:
            raise FormatError(
                f"row group {number} says that it has {group.num_rows} rows, its columns have "
                f"{sorted(counts)} values"
            )


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
