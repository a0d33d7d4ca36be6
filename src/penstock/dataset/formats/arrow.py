"""Arrow IPC: what `datasets.Dataset.save_to_disk` writes, and Feather; a record batch is a block.

A stream is a chain of messages: a marker, the length of a small head, the head (a flatbuffer) and
a body. The heads alone say how many rows each batch has and where the next message starts, so a
scan hops from head to head and reads no body. The file kind is the same chain behind eight bytes
of magic; its footer is not needed. The schema's message is kept for each object: with it, a
batch's own bytes are enough.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.dataset.fields import Field
from penstock.dataset.formats.arrow_fields import fields_of, import_pyarrow
from penstock.dataset.formats.arrow_rows import RowBlock, decoding
from penstock.dataset.formats.base import BlockFormat, Options, Unit, block_rows, one_unit_each
from penstock.dataset.formats.headers import HeaderReader
from penstock.dataset.formats.parquet import only_split
from penstock.dataset.parse_process import parsed_by_arrow
from penstock.dataset.part import Part, make_part
from penstock.errors import FormatError, NotFoundError
from penstock.storage.base import ObjectInfo, Store

if TYPE_CHECKING:
    from penstock.dataset.parse_child import ParserCall

_MARKER = b"\xff\xff\xff\xff"
_MAGIC = b"ARROW1"
_HEAD_BYTES_MAX = 1 << 28
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3


class ArrowFormat(BlockFormat):
    """Arrow IPC streams and files.

    Options: `columns=[...]` makes samples of these columns only (a batch is still read whole);
    `split="train"` takes one of several splits that lie side by side, `split="all"` all of them.
    """

    name = "arrow"
    options: frozenset[str] = frozenset({"columns", "split"})

    def claims(self, key: str) -> bool:
        """Return whether the name ends with `.arrow`, or with Feather's `.feather`."""
        return key.lower().endswith((".arrow", ".feather"))

    def units(self, objects: Sequence[ObjectInfo], store: Store, options: Options) -> list[Unit]:
        """Return a unit for each object that is part of the data set."""
        folders = sorted({o.key.rpartition("/")[0] for o in objects})
        if len(folders) > 1 and "split" not in options:
            _refuse_dict(folders, store)
        kept = [o for folder in folders for o in _saved(folder, objects, store)]
        return one_unit_each(only_split(kept, store, options))

    def scan(self, unit: Unit, store: Store, options: Options) -> Part:
        """Return the record batches of one object."""
        (info,) = unit.objects
        where = f"{store.uri}{info.key}"
        chain = messages_of(store, info)
        first = next(chain, None)
        if first is None or first.kind != _SCHEMA:
            raise FormatError(f"{where} does not start with a schema; write it again")
        blob = bytes(store.read_range(info, first.offset, first.length))
        batches = [m for m in chain if _has_rows(m, where)]
        facts = parsed_by_arrow(
            "arrow_schema",
            blob,
            {**options, "nulls": _nodes_with_nulls(batches)},
            f"the schema of {where}",
        )
        return make_part(
            format=self.name,
            fields=msgspec.convert(facts["fields"], list[Field]),
            tables=[block_rows(info, [(m.offset, m.length, m.num_rows) for m in batches], blob)],
            options=facts["options"],
        )

    def has_columns(self, part: Part) -> bool:
        """Return True: blocks are tables."""
        return True

    def unpack(self, part: Part, number: int, offset: int, raw: memoryview) -> RowBlock:
        """Return a record batch; its values point into `raw`."""
        pa = import_pyarrow("reading Arrow")
        table = part.tables[0]
        where = f"the record batch at byte {offset} of {table.key(number)}"
        with decoding(where):
            schema = pa.ipc.read_schema(pa.BufferReader(table.blob(number)))
            message = pa.ipc.read_message(pa.BufferReader(pa.py_buffer(raw)))
            batch = pa.ipc.read_record_batch(message, schema)
            # In full, because a wrong offset inside makes Arrow read memory that is not there.
            batch.validate(full=True)
            size_bytes = max(len(raw), batch.get_total_buffer_size())
            return RowBlock(pa.Table.from_batches([batch]), part.fields, where, size_bytes)


def parse_schema_apart(call: ParserCall) -> dict[str, Any]:
    """Return the fields and options of a schema as plain values; runs in a parser process.

    The option `nulls` holds the numbers of the nodes that hold nulls, in the order of the tree.
    """
    pa = import_pyarrow("reading Arrow")
    options = call.options
    schema = pa.ipc.read_schema(pa.BufferReader(call.data[0]))
    paths = [path for column in schema for path in _paths(column.name, column.type)]
    null_paths = {paths[node] for node in options["nulls"] if node < len(paths)}
    fields, more = fields_of(schema, null_paths, options, "it")
    return {"fields": [msgspec.to_builtins(f) for f in fields], "options": more}


def _refuse_dict(folders: Sequence[str], store: Store) -> None:
    """Refuse a folder of folders, as `DatasetDict.save_to_disk` writes it."""
    shared = folders[0].split("/")
    while not all(f.split("/")[: len(shared)] == shared for f in folders):
        shared.pop()
    root = "/".join([*shared, ""])
    try:
        store.info(f"{root}dataset_dict.json")
    except NotFoundError:
        return
    raise FormatError(
        f"{store.uri}{root} holds {len(folders)} data sets ({', '.join(folders)}); "
        f"open one of them: {store.uri}{folders[-1]}"
    )


def _saved(folder: str, objects: Sequence[ObjectInfo], store: Store) -> list[ObjectInfo]:
    """Return the objects of a folder that its state.json names: others are left-overs of `map`."""
    here = {o.key: o for o in objects if o.key.rpartition("/")[0] == folder}
    prefix = f"{folder}/" if folder else ""
    try:
        state = msgspec.json.decode(store.read(f"{prefix}state.json"))
        keys = [prefix + f["filename"] for f in state["_data_files"]]
    except NotFoundError:
        return list(here.values())
    except (msgspec.DecodeError, KeyError, TypeError):
        raise FormatError(f"{store.uri}{prefix}state.json is damaged; save it again") from None
    for key in keys:
        if key not in here:
            store.info(key)  # Left out by the user's pattern is fine; missing is an error.
    return [here[key] for key in keys if key in here]


@dataclass(frozen=True, slots=True)
class ArrowMessage:
    """One message of a chain: where it lies and what its head says."""

    kind: int
    offset: int
    length: int
    num_rows: int
    nulls: tuple[int, ...]
    """Of a batch: the number of nulls in each node, in the order of the schema's tree."""


def messages_of(store: Store, info: ObjectInfo) -> Iterator[ArrowMessage]:
    """Yield the messages of a stream or file, reading heads only."""
    reader = HeaderReader(store, info, walks=True)
    where = f"{store.uri}{info.key}"
    at = 8 if bytes(reader.read(0, min(8, info.size_bytes)))[:6] == _MAGIC else 0
    while at < info.size_bytes:
        prefix = bytes(reader.read(at, 8))
        head_bytes = int.from_bytes(prefix[4:], "little")
        if prefix[:4] != _MARKER or head_bytes > _HEAD_BYTES_MAX:
            raise FormatError(
                f"{where} has no Arrow message at byte {at} but {prefix!r}: it is damaged, or "
                "older than Arrow 0.15 (Feather of version 1 is); write it again with a newer "
                "pyarrow"
            )
        if head_bytes == 0:
            return
        try:
            message = _parse_head(bytes(reader.read(at + 8, head_bytes)), at, 8 + head_bytes)
        except (struct.error, ValueError):
            raise FormatError(f"{where} has a damaged message at byte {at}") from None
        at += message.length
        if at > info.size_bytes:
            raise FormatError(
                f"{where} is cut off: a message ends at {at}, the object at {info.size_bytes}"
            )
        yield message


def _has_rows(message: ArrowMessage, where: str) -> bool:
    if message.kind == _DICTIONARY:
        raise FormatError(
            f"{where} has a dictionary at byte {message.offset}: its batches cannot be read alone; "
            "decode such columns (`Array.dictionary_decode`) or write the table as Parquet"
        )
    return message.kind == _BATCH and message.num_rows > 0


def _nodes_with_nulls(batches: Sequence[ArrowMessage]) -> list[int]:
    """Return the numbers of all nodes that hold a null in some batch."""
    return sorted({node for m in batches for node, count in enumerate(m.nulls) if count})


def _paths(path: str, kind: Any) -> Iterator[str]:
    """Yield a path for each node of a column, parents first, as batches list them."""
    yield path
    kind = getattr(kind, "storage_type", kind)
    for number in range(kind.num_fields):
        child = kind.field(number)
        yield from _paths(f"{path}.{child.name}", child.type)


def _parse_head(head: bytes, offset: int, prefix_bytes: int) -> ArrowMessage:
    (root,) = struct.unpack_from("<I", head, 0)
    (kind,) = struct.unpack_from("<B", head, _slot(head, root, 1))
    body_at = _slot(head, root, 3)
    body_bytes = struct.unpack_from("<q", head, body_at)[0] if body_at else 0
    if body_bytes < 0:
        raise ValueError(body_bytes)
    length = prefix_bytes + body_bytes
    if kind != _BATCH:
        return ArrowMessage(kind, offset, length, 0, ())
    return ArrowMessage(
        kind, offset, length, *_parse_batch(head, _follow(head, _slot(head, root, 2)))
    )


def _parse_batch(head: bytes, batch: int) -> tuple[int, tuple[int, ...]]:
    rows_at, nodes_at = _slot(head, batch, 0), _slot(head, batch, 1)
    num_rows = struct.unpack_from("<q", head, rows_at)[0] if rows_at else 0
    if num_rows < 0:
        raise ValueError(num_rows)
    if not nodes_at:
        return num_rows, ()
    nodes = _follow(head, nodes_at)
    (num_nodes,) = struct.unpack_from("<I", head, nodes)
    pairs = struct.unpack_from(f"<{min(2 * num_nodes, len(head))}q", head, nodes + 4)
    return num_rows, pairs[1::2]


def _slot(head: bytes, table: int, number: int) -> int:
    """Return where a field of a flatbuffer table lies; 0 when it is absent, that is, 0."""
    vtable = table - struct.unpack_from("<i", head, table)[0]
    (vtable_bytes,) = struct.unpack_from("<H", head, vtable)
    if 4 + 2 * number + 2 > vtable_bytes:
        return 0
    (inside,) = struct.unpack_from("<H", head, vtable + 4 + 2 * number)
    return table + inside if inside else 0


def _follow(head: bytes, at: int) -> int:
    return at + int(struct.unpack_from("<I", head, at)[0])
