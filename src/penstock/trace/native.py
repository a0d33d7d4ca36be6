"""Files of the preloaded library: what was seen below Python.

The library (foreign/preload.c) writes rows of the same layout as the recorder, one mapped file for
each thread, and one file for the process with a head and its names. `pack_native` turns them into
compressed traces when the job has ended.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from penstock.trace.boot import boot_id
from penstock.trace.chunks import VERSION, chunk, rows_chunk
from penstock.trace.schema import ROW, Kind

MAGIC = b"PsTnatv1"
HEAD = struct.Struct("<8s4I3q64Q64s64s")
"""magic, version, rank, pid, parent, perf_ns, time_ns, names_bytes, dropped by kind, boot, host."""
NAMES_AT = 4096
_NAME = struct.Struct("<2I")
_SEGMENT_HEAD = struct.Struct("<8sQQQ")
_NATIVE_VERSION = 1
_NUM_KINDS = 64
_ROWS_A_CHUNK = 1 << 16


def read_native_head(
    path: Path,
) -> tuple[dict[str, Any], dict[int, str], dict[Kind, int]] | None:
    """Return what a file says of its process, the names, and rows that were dropped."""
    with path.open("rb") as file:
        data = file.read(NAMES_AT)
        if len(data) < HEAD.size or data[:8] != MAGIC:
            return None
        _, version, rank, pid, parent, perf_ns, time_ns, names_bytes, *rest = HEAD.unpack_from(data)
        if version != _NATIVE_VERSION:
            return None
        file.seek(NAMES_AT)
        names = _names(file.read(names_bytes))
    dropped, (boot, host) = rest[:_NUM_KINDS], rest[_NUM_KINDS:]
    about = {
        "type": "process",
        "version": VERSION,
        "pid": pid,
        "parent": parent,
        "rank": rank,
        "role": "native",
        "host": host.rstrip(b"\0").decode(errors="replace"),
        "boot": boot.rstrip(b"\0").decode(errors="replace"),
        "perf_ns": perf_ns,
        "time_ns": time_ns,
    }
    kinds = {int(kind) for kind in Kind}
    return about, names, {Kind(k): n for k, n in enumerate(dropped) if n and k in kinds}


def _names(data: bytes) -> dict[int, str]:
    names, start = {0: ""}, 0
    while start + _NAME.size <= len(data):
        number, size = _NAME.unpack_from(data, start)
        start += _NAME.size
        # Paths are bytes; one that is no UTF-8 is shown as well as it can be.
        names[number] = data[start : start + size].decode(errors="backslashreplace")
        start += size
    return names


def pack_native(folder: Path) -> str:
    """Turn the native files of a job that has ended on this machine into compressed traces.

    Return "", or why some could not be: then they stay, and are read as they are.
    """
    problem = ""
    for path in sorted(folder.glob("*.native")):
        found = read_native_head(path)
        if found is not None and found[0]["boot"] != boot_id():
            continue  # The folder is shared, and the other machine's part may still run.
        parts = sorted(folder.glob(f"{path.stem}.*.rows"))
        try:
            if found is not None:
                _write_packed(path.with_suffix(".trace"), found, parts)
        except OSError as error:
            problem = f"{path.name} could not be compressed: {error.strerror or error}"
            continue
        for old in (path, *parts):
            old.unlink(missing_ok=True)
    return problem


def _write_packed(
    path: Path, found: tuple[dict[str, Any], dict[int, str], dict[Kind, int]], parts: list[Path]
) -> None:
    # Under another name until it is whole: else rows would be read twice, or in part.
    unfinished = path.with_suffix(".packing")
    try:
        with unfinished.open("wb") as out:
            _write_chunks(out, found, parts)
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def _write_chunks(
    out: Any, found: tuple[dict[str, Any], dict[int, str], dict[Kind, int]], parts: list[Path]
) -> None:
    about, names, dropped = found
    # The reader leaves the files alone that it was packed from, should they still be there.
    out.write(chunk({**about, "is_packed": True}))
    for number, text in names.items():
        if number:
            out.write(chunk({"type": "name", "number": number}, text.encode()))
    for segment, part in enumerate(parts):
        _pack_part(out, segment, part)
    if dropped:
        counts = {str(int(kind)): count for kind, count in dropped.items()}
        out.write(chunk({"type": "dropped", "rows": counts}))


def _pack_part(out: Any, segment: int, part: Path) -> None:
    with part.open("rb") as file:
        head = file.read(_SEGMENT_HEAD.size)
        if len(head) < _SEGMENT_HEAD.size:
            return
        _, thread, _, count = _SEGMENT_HEAD.unpack(head)
        for first in range(0, count, _ROWS_A_CHUNK):
            data = file.read(min(_ROWS_A_CHUNK, count - first) * ROW.itemsize)
            rows = np.frombuffer(data, ROW, len(data) // ROW.itemsize)
            if not len(rows):
                return
            about = {"segment": segment, "first": first, "thread": thread, "name": ""}
            out.write(rows_chunk(rows, about))
