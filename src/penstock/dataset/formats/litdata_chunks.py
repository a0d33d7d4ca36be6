"""Where the items of a LitData chunk lie, for each of the ways in which they are packed."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from penstock.dataset.fields import Field
from penstock.dataset.formats.arrow_fields import import_pyarrow
from penstock.dataset.formats.arrow_rows import decoding
from penstock.dataset.formats.base import Sample, block_rows
from penstock.dataset.formats.headers import HeaderReader
from penstock.dataset.formats.shards import INDEX, packed_rows, sample_rows, table_bytes
from penstock.dataset.formats.zstd_frames import check_claim
from penstock.dataset.part import Part, Rows
from penstock.errors import FormatError
from penstock.storage.base import ObjectInfo, Store

_ARROW_MAGIC = b"LDARW01\0"
_ARROW_TAIL = struct.Struct("<I8s")
_FRAMES_MAGIC = b"LDFZ01\0\0"
_FRAMES_HEAD = struct.Struct("<8sHHIII")
_FRAME = np.dtype(
    [("first", "<u4"), ("count", "<u4"), ("at", "<u8"), ("length", "<u4"), ("raw", "<u4")]
)


def _item_rows(store: Store, info: ObjectInfo, note: Mapping[str, Any]) -> Rows:
    return sample_rows(store, info, note["num_items"])


def _token_rows(store: Store, info: ObjectInfo, note: Mapping[str, Any]) -> Rows:
    field = msgspec.convert(note["fields"][0], Field)
    assert field.shape is not None
    base, item_bytes = table_bytes(note["num_items"]), np.dtype(field.dtype).itemsize
    end = base + note["num_tokens"] * item_bytes
    if end > info.size_bytes:
        raise FormatError(
            f"{store.uri}{info.key} is cut off: its {note['num_tokens']} tokens end at byte {end}, "
            f"the chunk at {info.size_bytes}; copy it anew"
        )
    width = np.array([field.shape[0] * item_bytes])
    return Rows(
        objects=[info],
        counts=[note["num_tokens"] // field.shape[0]],
        addressing="even",
        columns={"base": np.array([base]), "stride": width, "width": width},
    )


def _chunk_rows(store: Store, info: ObjectInfo, note: Mapping[str, Any]) -> Rows:
    return packed_rows(info, note["num_items"], note["raw_bytes"])


def _arrow_rows(store: Store, info: ObjectInfo, note: Mapping[str, Any]) -> Rows:
    reader = HeaderReader(store, info)
    at = info.size_bytes - _ARROW_TAIL.size
    length, magic = _ARROW_TAIL.unpack(reader.read(at, _ARROW_TAIL.size))
    if magic != _ARROW_MAGIC or not 0 < length <= at - table_bytes(note["num_items"]):
        raise FormatError(
            f"{store.uri}{info.key} has no Arrow table of {note['num_items']} rows at its end, as "
            "the first chunk of the set has one; it is cut off: copy it anew"
        )
    return block_rows(info, [(at - length, length, note["num_items"])], b"")


def _frame_rows(store: Store, info: ObjectInfo, note: Mapping[str, Any]) -> Rows:
    reader = HeaderReader(store, info)
    head = _FRAMES_HEAD.unpack(reader.read(0, _FRAMES_HEAD.size))
    magic, version, _, num_items, _, num_frames = head
    if (magic, version, num_items) != (_FRAMES_MAGIC, 1, note["num_items"]):
        raise FormatError(
            f"{store.uri}{info.key} is not a chunk of zstd frames with {note['num_items']} items, "
            f"as {INDEX} says (it says: version {version}, {num_items} items); write it anew"
        )
    at = _FRAMES_HEAD.size + 4 * (num_items + 1)
    frames = np.frombuffer(reader.read(at, num_frames * _FRAME.itemsize), _FRAME)
    held = int(frames["count"].sum(dtype=np.uint64))
    if held != num_items:
        raise FormatError(
            f"{store.uri}{info.key} is damaged: its frames hold {held} items, {INDEX} says "
            f"{num_items}; copy it anew"
        )
    for raw_bytes, length in frames[["raw", "length"]].tolist():
        check_claim(raw_bytes, length, f"{store.uri}{info.key}")
    blocks = frames[["at", "length", "count"]].tolist()
    return block_rows(info, blocks, int(frames["raw"].max(initial=0)).to_bytes(8, "little"))


SCANS = {
    "items": _item_rows,
    "samples": _item_rows,
    "frames": _frame_rows,
    "chunk": _chunk_rows,
    "arrow": _arrow_rows,
    "tokens": _token_rows,
}
"""What finds the items of a chunk, by how they lie in it."""


class ArrowBlock:
    """Rows of an Arrow table."""

    def __init__(self, part: Part, raw: memoryview, num_rows: int) -> None:
        pa = import_pyarrow("LitData with Arrow tables")
        is_file = bytes(raw[:6]) == b"ARROW1"
        with decoding("its Arrow table"):
            opened = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(pa.py_buffer(raw))
            table = opened.read_all()
            # In full and first of all: Arrow follows a wrong offset to memory that is not there.
            table.validate(full=True)
            self._table = table.combine_chunks()
        if self._table.num_rows != num_rows:
            raise FormatError(
                f"the Arrow table holds {self._table.num_rows} rows, {INDEX} says {num_rows}; "
                "copy it anew"
            )
        self._fields = [f for f in part.fields if f.name in self._table.column_names]

    @property
    def size_bytes(self) -> int:
        """Memory it takes while it is kept."""
        return int(self._table.nbytes)

    def sample(self, row: int) -> Sample:
        """Return one row."""
        with decoding(f"row {row} of its Arrow table"):
            values = {f.name: self._table[f.name][row].as_py() for f in self._fields}
            return {
                f.name: np.dtype(f.dtype).type(values[f.name]) if f.is_fixed else values[f.name]
                for f in self._fields
            }
