"""MosaicML MDS: shards of samples, and an `index.json` that names them.

The index is read once, then of each raw shard only the table of offsets at its front. A shard of
which only the zstd file is there is one block: it is read and decompressed whole. Where one shard
of a set is compressed all are addressed as blocks, the raw ones too. Several folders with an
`index.json` each (streams) are one data set, in the order of their names. Columns of one type and
size become values; `pkl` columns stay bytes, because unpickling runs code: pass
`decoders={"column": pickle.loads}` if you trust the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from penstock.dataset.formats.base import Block, Bytes, Options, Sample, Unit
from penstock.dataset.formats.mds_columns import column_field
from penstock.dataset.formats.shards import (
    INDEX,
    SizedBlock,
    SizedColumns,
    packed_rows,
    parse_offsets,
    parsed,
    read_index,
    sample_rows,
    table_bytes,
)
from penstock.dataset.formats.zstd_frames import MAGIC, check_claim, inflated
from penstock.dataset.part import Ints, Part, make_part
from penstock.dataset.ragged import FieldColumns
from penstock.errors import FormatError
from penstock.storage.base import ObjectInfo, Store

_COMPRESSED = (".mds.zstd", ".mds.gz", ".mds.br", ".mds.bz2", ".mds.snappy")
_Count = Annotated[int, msgspec.Meta(ge=0)]


class _File(msgspec.Struct):
    basename: str
    bytes: _Count


class _ShardKind(msgspec.Struct):
    """What all kinds of streaming's shards say of themselves."""

    format: str = "mds"
    version: int = 2


class _Shard(msgspec.Struct):
    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[_Count | None]
    samples: _Count
    raw_data: _File
    zip_data: _File | None = None
    compression: str | None = None

    @property
    def columns(self) -> list[list[Any]]:
        """Name, encoding and size of each column."""
        # streaming takes a size of 0 for a column whose size varies.
        sizes = [size or None for size in self.column_sizes]
        columns = zip(self.column_names, self.column_encodings, sizes, strict=True)
        return [list(column) for column in columns]


class _MdsIndex(msgspec.Struct):
    shards: list[msgspec.Raw]


# The type is prepared here, by one thread: threads that do so at once can end the process.
msgspec.json.Decoder(_MdsIndex)


class MdsFormat:
    """MosaicML MDS shards, raw or compressed with zstd."""

    name = "mds"
    options: frozenset[str] = frozenset()

    def claims(self, key: str) -> bool:
        """Return whether the name is that of a shard or an index; compressed ones too."""
        return key.rpartition("/")[2] == INDEX or key.endswith((".mds", *_COMPRESSED))

    def units(self, objects: Sequence[ObjectInfo], store: Store, options: Options) -> list[Unit]:
        """Return a unit for each shard that an index names."""
        by_key = {o.key: o for o in objects}
        chosen = [
            (shard, _file_of(shard, folder, by_key, store))
            for folder, shard in _shards(objects, store)
        ]
        if not chosen:
            raise FormatError(
                f"{store.uri}: {len(objects)} objects, but no {INDEX} that names an MDS shard; "
                f"MDS cannot be read without it (streaming's merge_index can make it again)"
            )
        first, first_info = chosen[0]
        for shard, info in chosen:
            if shard.columns != first.columns:
                raise FormatError(
                    f"{store.uri}: {info.key} has the columns {_words(shard)}, {first_info.key} "
                    f"has {_words(first)}; open them as two data sets"
                )
        by_block = not all(info.key.endswith(".mds") for _, info in chosen)
        return [
            Unit(
                objects=(info,),
                note={
                    "columns": shard.columns,
                    "num_samples": shard.samples,
                    "raw_bytes": shard.raw_data.bytes,
                    "by_block": by_block,
                },
            )
            for shard, info in chosen
        ]

    def scan(self, unit: Unit, store: Store, options: Options) -> Part:
        """Return where the samples of one shard lie."""
        (info,) = unit.objects
        columns, num_samples = unit.note["columns"], unit.note["num_samples"]
        if unit.note["by_block"]:
            rows = packed_rows(info, num_samples, unit.note["raw_bytes"])
        else:
            rows = sample_rows(store, info, num_samples)
        return make_part(
            format="mds",
            fields=[column_field(name, kind, size, info.key) for name, kind, size in columns],
            tables=[rows],
            options={"sizes": [size for _, _, size in columns]},
        )

    def split(self, part: Part, ids: Ints, raws: Sequence[Sequence[memoryview]]) -> list[Sample]:
        """Return the columns of each sample."""
        columns = SizedColumns(part, part.options["sizes"])
        return [columns.sample(raw) for (raw,) in raws]

    def has_columns(self, part: Part) -> bool:
        """Return True: samples say where their columns lie."""
        return True

    def columns(
        self, part: Part, ids: Ints, data: Bytes, starts: Ints, lengths: Ints
    ) -> FieldColumns | None:
        """Return the columns of all samples."""
        return SizedColumns(part, part.options["sizes"]).columns(data, starts, lengths)

    def unpack(self, part: Part, number: int, offset: int, raw: memoryview) -> Block:
        """Return a whole shard, decompressed."""
        table = part.tables[0]
        if bytes(raw[:4]) == MAGIC:
            claimed = int.from_bytes(table.blob(number), "little")
            raw = inflated(raw, claimed)
            if len(raw) != claimed:
                raise FormatError(
                    f"the shard unpacks to {len(raw)} bytes, {INDEX} says {claimed}; copy it anew"
                )
        num_samples = int(table.first_sample[number + 1] - table.first_sample[number])
        offsets = parse_offsets(raw, num_samples, len(raw), table.key(number))
        return SizedBlock(raw, SizedColumns(part, part.options["sizes"]), offsets.tolist())


def _shards(objects: Sequence[ObjectInfo], store: Store) -> Iterator[tuple[str, _Shard]]:
    """Yield the shards of all indexes with their folders, those nearest to the root first."""
    indexes = [o for o in objects if o.key.rpartition("/")[2] == INDEX]
    seen: set[str] = set()
    for info in sorted(indexes, key=lambda info: (info.key.count("/"), info.key)):
        folder = info.key.removesuffix(INDEX)
        where = f"{store.uri}{info.key}"
        for number, text in enumerate(read_index(store, info, _MdsIndex, "an MDS").shards):
            shard = _checked_shard(text, number, where)
            # A merged index names the shards of the folders below it, which have their own index.
            if folder + shard.raw_data.basename not in seen:
                seen.add(folder + shard.raw_data.basename)
                yield folder, shard


def _checked_shard(text: msgspec.Raw, number: int, where: str) -> _Shard:
    """Return what an index says of one shard, free of contradictions."""
    otherwise = f"{where} is not the index of an MDS set: shard {number}"
    kind = parsed(text, _ShardKind, otherwise)
    if (kind.format, kind.version) != ("mds", 2):
        raise FormatError(
            f"{where}: shard {number} is of format {kind.format!r}, version {kind.version}; 'mds' "
            "of version 2 can be read. Write it with MDSWriter; the shards of JSONWriter are JSON "
            "lines, which are read as they are once they are named .jsonl"
        )
    shard = parsed(text, _Shard, otherwise)
    numbers = [len(shard.column_names), len(shard.column_encodings), len(shard.column_sizes)]
    if len(set(numbers)) != 1 or not numbers[0] or len(set(shard.column_names)) != numbers[0]:
        raise FormatError(
            f"{where} is damaged: shard {number} has {numbers[0]} column_names "
            f"({', '.join(shard.column_names[:8])}), {numbers[1]} column_encodings and "
            f"{numbers[2]} column_sizes; copy it anew"
        )
    if table_bytes(shard.samples) > shard.raw_data.bytes:
        raise FormatError(
            f"{where} is damaged: shard {number} is to hold {shard.samples} samples in "
            f"{shard.raw_data.bytes} bytes, their table alone takes {table_bytes(shard.samples)}"
        )
    for name, encoding, size in shard.columns:
        column_field(name, encoding, size, where)
    return shard


def _file_of(
    shard: _Shard, folder: str, by_key: Mapping[str, ObjectInfo], store: Store
) -> ObjectInfo:
    """Return the file to read a shard from: the raw one if it is there, else the compressed one."""
    for file in (shard.raw_data, shard.zip_data):
        info = by_key.get(folder + file.basename) if file is not None else None
        if file is None or info is None:
            continue
        if file is shard.zip_data and (shard.compression or "").split(":")[0] != "zstd":
            raise FormatError(
                f"{store.uri}{info.key} is compressed with {shard.compression}, only zstd can be "
                "read; decompress the shards beside it (the raw .mds files are then preferred), "
                "or write the set anew with compression='zstd'"
            )
        if info.size_bytes != file.bytes:
            raise FormatError(
                f"{store.uri}{info.key} has {info.size_bytes} bytes, {INDEX} says {file.bytes}; "
                "it is cut off or of another data set: copy it anew"
            )
        if file is shard.zip_data:
            check_claim(shard.raw_data.bytes, info.size_bytes, f"{store.uri}{info.key}")
        return info
    raise FormatError(
        f"{store.uri}{folder}{shard.raw_data.basename} is not there, raw or compressed, but "
        f"{folder}{INDEX} names it with {shard.samples} samples; copy the missing shards"
    )


def _words(shard: _Shard) -> str:
    return ", ".join(f"{name} ({encoding})" for name, encoding, _ in shard.columns)
