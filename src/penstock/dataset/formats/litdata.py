"""LitData: chunks of items, and an `index.json` that names them and says what an item is made of.

An item is a tree (a dict, a list, a tuple, or one leaf). Its leaves become fields: the path of a
leaf, joined by dots (`label`, `meta.width`, `0`), or `data` for an item that is one leaf. Numbers
become values of one type, arrays and tensors NumPy arrays, images arrays of height, width and
colour. `pickle` leaves stay bytes, because unpickling runs code: pass `decoders={"field":
pickle.loads}` if you trust the data.

How items are addressed depends on how the set was written: alone (not compressed, or each by
itself), a frame of items or a whole chunk at a time (zstd), or as rows of an Arrow table (sets of
plain texts and numbers). Token sets need the option `block_size`: each sample is that many tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
import zstandard

from penstock.dataset.fields import VALUE, Field
from penstock.dataset.formats.base import Block, Bytes, Options, Sample, Unit
from penstock.dataset.formats.litdata_chunks import SCANS, ArrowBlock
from penstock.dataset.formats.litdata_index import (
    LitDataIndex,
    arrow_fields,
    fields_of,
    indexes_of,
    layout_of,
)
from penstock.dataset.formats.shards import (
    INDEX,
    SizedBlock,
    SizedColumns,
    parse_offsets,
    read_offsets,
    table_bytes,
)
from penstock.dataset.formats.zstd_frames import check_claim, inflated
from penstock.dataset.part import Ints, Part, make_part
from penstock.dataset.ragged import FieldColumns
from penstock.errors import FormatError
from penstock.storage.base import ObjectInfo, Store

_SAMPLE_BYTES_MAX = 2**32 - 1


class LitDataFormat:
    """LitData chunks."""

    name = "litdata"
    options: frozenset[str] = frozenset({"block_size"})

    def claims(self, key: str) -> bool:
        """Return whether the name is that of a chunk or an index."""
        name = key.rpartition("/")[2]
        return name == INDEX or (name.startswith("chunk-") and name.endswith(".bin"))

    def units(self, objects: Sequence[ObjectInfo], store: Store, options: Options) -> list[Unit]:
        """Return a unit for each chunk that an index names."""
        by_key = {o.key: o for o in objects}
        units = [
            unit
            for folder, index in indexes_of(objects, store)
            for unit in _units_of(folder, index, by_key, store, options)
        ]
        if not units:
            raise FormatError(
                f"{store.uri}: {len(objects)} objects, but no {INDEX} that names a LitData chunk; "
                "LitData cannot be read without it"
            )
        for unit in units:
            same = ("layout", "fields")
            if [unit.note[n] for n in same] != [units[0].note[n] for n in same]:
                raise FormatError(
                    f"{store.uri}: {unit.objects[0].key} and {units[0].objects[0].key} differ in "
                    "their fields or packing; open them as two data sets"
                )
        return units

    def scan(self, unit: Unit, store: Store, options: Options) -> Part:
        """Return where the items of one chunk lie."""
        (info,) = unit.objects
        layout = unit.note["layout"]
        return make_part(
            format="litdata",
            fields=[msgspec.convert(f, Field) for f in unit.note["fields"]],
            tables=[SCANS[layout](store, info, unit.note)],
            options={"layout": layout, **options},
        )

    def split(self, part: Part, ids: Ints, raws: Sequence[Sequence[memoryview]]) -> list[Sample]:
        """Return the leaves of each item."""
        layout = part.options["layout"]
        if layout == "tokens":
            (field,) = part.fields
            return [{field.name: np.frombuffer(raw, field.dtype)} for (raw,) in raws]
        columns = _columns(part)
        if layout == "items":
            return [columns.sample(raw) for (raw,) in raws]
        codec = zstandard.ZstdDecompressor()
        return [columns.sample(inflated(raw, _SAMPLE_BYTES_MAX, codec)) for (raw,) in raws]

    def has_columns(self, part: Part) -> bool:
        """Return whether items lie side by side once their chunk or frame is unpacked."""
        return part.options["layout"] in ("items", "frames", "chunk")

    def columns(
        self, part: Part, ids: Ints, data: Bytes, starts: Ints, lengths: Ints
    ) -> FieldColumns | None:
        """Return the leaves of all items."""
        return _columns(part).columns(data, starts, lengths)

    def unpack(self, part: Part, number: int, offset: int, raw: memoryview) -> Block:
        """Return a chunk, a frame of items or an Arrow table."""
        table = part.tables[0]
        num_samples = int(table.first_sample[number + 1] - table.first_sample[number])
        if part.options["layout"] == "arrow":
            return ArrowBlock(part, raw, num_samples)
        data = inflated(raw, int.from_bytes(table.blob(number), "little"))
        columns = _columns(part)
        if part.options["layout"] == "frames":
            return SizedBlock(data, columns, columns.starts(data))
        offsets = parse_offsets(data, num_samples, len(data), table.key(number))
        return SizedBlock(data, columns, offsets.tolist())


def _columns(part: Part) -> SizedColumns:
    return SizedColumns(part, [None] * len(part.fields))


def _units_of(
    folder: str,
    index: LitDataIndex,
    by_key: Mapping[str, ObjectInfo],
    store: Store,
    options: Options,
) -> Iterator[Unit]:
    where = f"{store.uri}{folder}{INDEX}"
    layout = layout_of(index.config, options, where)
    fields = fields_of(index.config, where)
    for number, chunk in enumerate(index.chunks):
        info = by_key.get(folder + chunk.filename)
        if info is None:
            raise FormatError(
                f"{store.uri}{folder}{chunk.filename} is not there, but {where} names it with "
                f"{chunk.chunk_size} items; copy the missing chunks"
            )
        raw_bytes = chunk.chunk_bytes + table_bytes(chunk.chunk_size)
        if layout == "chunk":
            check_claim(raw_bytes, info.size_bytes, f"{store.uri}{info.key}")
        if number == 0 and layout == "items" and _is_arrow(store, info, chunk.chunk_size):
            layout, fields = "arrow", arrow_fields(index.config, where)
        if number == 0 and layout == "tokens":
            fields = [_token_field(fields[0], options["block_size"], where)]
        note = {
            "layout": layout,
            "fields": [msgspec.to_builtins(f) for f in fields],
            "num_items": chunk.chunk_size,
            "num_tokens": chunk.dim or 0,
            "raw_bytes": raw_bytes,
        }
        yield Unit(objects=(info,), note=note)


def _is_arrow(store: Store, info: ObjectInfo, num_items: int) -> bool:
    """Return whether a chunk's items are empty: then its rows lie in an Arrow table behind them."""
    offsets = read_offsets(store, info, num_items)
    return num_items > 0 and int(offsets[0]) == int(offsets[-1])


def _token_field(field: Field, block_size: int, where: str) -> Field:
    if not field.encoding.startswith("flat:"):
        raise FormatError(f"{where}: tokens of type {field.encoding} have no NumPy type")
    dtype = field.encoding.removeprefix("flat:")
    return Field(name=field.name, encoding=VALUE, dtype=dtype, shape=(block_size,))
