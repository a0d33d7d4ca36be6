"""Chunks: what a process appends to its trace file.

A chunk is a fixed head (magic, length, checksum), a header in MessagePack that says what it is, and
a body. Rows are stored column by column, compressed; times as differences. Chunks are complete or
ignored, so a file that was cut by a kill, or is still being written, can be read at any time.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from penstock.trace.schema import ROW

VERSION = 1
MAGIC = b"PsT1"
_HEAD = struct.Struct("<4sIIQ")
CHUNK_BYTES_MAX = 1 << 28
"""No chunk is larger; a length beyond it is damage."""

Rows = npt.NDArray[np.void]
_WIDE, _NARROW = np.dtype("<i8"), np.dtype("<i4")
_NARROW_MAX = np.iinfo(_NARROW).max


def chunk(header: dict[str, Any], body: bytes = b"") -> bytes:
    """Return a chunk as it is appended to a file."""
    packed = msgspec.msgpack.encode(header)
    digest = xxhash.xxh64_intdigest(packed + body)
    return _HEAD.pack(MAGIC, len(packed), len(body), digest) + packed + body


def rows_chunk(rows: Rows, header: dict[str, Any]) -> bytes:
    """Return rows as a chunk; a column that is the same in all rows is one number in its header."""
    constant: dict[str, int] = {}
    columns: list[tuple[str, int]] = []
    parts: list[bytes] = []
    for name in ROW.names or ():
        column = rows[name]
        first = column[0]
        if (column == first).all():
            constant[name] = int(first)
            continue
        if name == "start_ns":
            column = np.diff(column, prepend=np.int64(0))
        if column.dtype == _WIDE and len(rows) > 1 and np.abs(column[1:]).max() <= _NARROW_MAX:
            # Half the bytes to compress; the first time is large, and stands in the header.
            constant[f"{name}[0]"] = int(column[0])
            column = column.astype(_NARROW)
        part = np.ascontiguousarray(column).tobytes()
        columns.append((name, len(part)))
        parts.append(part)
    body = zstandard.ZstdCompressor(level=1).compress(b"".join(parts))
    about = {"type": "rows", "num_rows": len(rows), "constant": constant, "columns": columns}
    return chunk({**about, **header}, body)


def rows_of(header: dict[str, Any], body: bytes) -> Rows:
    """Return the rows of a chunk."""
    num_rows = int(header["num_rows"])
    rows = np.zeros(num_rows, ROW)
    constant = header["constant"]
    for name, value in constant.items():
        if name in (ROW.names or ()):
            rows[name] = value
    plain_bytes = sum(size for _, size in header["columns"])
    if plain_bytes > CHUNK_BYTES_MAX:
        raise ValueError(f"a chunk of {plain_bytes} bytes")
    data = zstandard.ZstdDecompressor().decompress(body, max_output_size=max(1, plain_bytes))
    start = 0
    for name, size in header["columns"]:
        is_narrow = size < num_rows * ROW[name].itemsize
        column = np.frombuffer(data, _NARROW if is_narrow else ROW[name], num_rows, start)
        if is_narrow:
            column = column.astype(_WIDE)
            column[0] = constant[f"{name}[0]"]
        rows[name] = np.cumsum(column) if name == "start_ns" else column
        start += size
    return rows


def chunks_of(data: bytes | memoryview) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield header and body of every whole chunk.

    What is cut off or damaged is skipped: reading goes on at the next place where a chunk begins.
    """
    for header, body, _ in placed_chunks(data):
        yield header, body


def placed_chunks(data: bytes | memoryview) -> Iterator[tuple[dict[str, Any], bytes, int]]:
    """Yield header and body of every whole chunk, and where it ends: later ones begin there."""
    data = bytes(data)
    start = data.find(MAGIC)
    while 0 <= start <= len(data) - _HEAD.size:
        _, header_bytes, body_bytes, digest = _HEAD.unpack_from(data, start)
        begin = start + _HEAD.size
        stop = begin + header_bytes + body_bytes
        is_whole = stop <= len(data) and header_bytes + body_bytes <= CHUNK_BYTES_MAX
        if is_whole and xxhash.xxh64_intdigest(data[begin:stop]) == digest:
            middle = begin + header_bytes
            yield msgspec.msgpack.decode(data[begin:middle]), data[middle:stop], stop
            start = data.find(MAGIC, stop)
        else:
            start = data.find(MAGIC, start + 1)
