"""The description of a tier in its files: the header of `state`, and `meta.json`."""

from __future__ import annotations

import json
import os
import struct
import time
from dataclasses import dataclass, fields

from penstock.storage.tier_cells import CELL_BYTES
from penstock.storage.tier_folders import CELLS, DATA, META, STATE, SUMS, Folder, write_named
from penstock.storage.tier_shape import TierShape

FORMAT = 2
GENERATION_MAX = 254

_MAGIC = b"PENSTOCK"
_FIELDS = struct.Struct("<8sIIQQqqq")
FIELDS_BYTES = _FIELDS.size
HEADER_BYTES = 512
"""The fields, then values that users of the tier share (`tier_files`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The fields that all users of a tier agree on."""

    magic: bytes = _MAGIC
    format: int = FORMAT
    generation: int = 0
    num_units: int
    digest: int
    """A hash of the layout."""
    promised_bytes: int = 0
    """The most that any user of this generation may fill."""
    first: int = 0
    """Where the part of the layout begins that the first user of this generation placed here."""
    last: int = 0
    """Where that part ends."""

    def packed(self) -> bytes:
        """Return the header as bytes."""
        values = (self.magic, self.format, self.generation, self.num_units, self.digest)
        return _FIELDS.pack(*values, self.promised_bytes, self.first, self.last)


def read_header(descriptor: int) -> Header | None:
    """Return the header of a state file; None if it does not carry our mark."""
    data = os.pread(descriptor, _FIELDS.size, 0)
    if len(data) < _FIELDS.size or data[:8] != _MAGIC:
        return None
    names = [field.name for field in fields(Header)]
    return Header(**dict(zip(names, _FIELDS.unpack(data), strict=True)))


def header_in(folder: Folder) -> Header | None:
    """Return the header of the tier in a folder; None if there is none of ours."""
    try:
        descriptor = folder.open_file(STATE, os.O_RDONLY)
    except OSError:
        return None
    try:
        return read_header(descriptor)
    finally:
        os.close(descriptor)


def meta_in(folder: Folder) -> dict[str, object]:
    """Return the contents of `meta.json`; empty if it cannot be read."""
    try:
        descriptor = folder.open_file(META, os.O_RDONLY)
        with os.fdopen(descriptor, "rb") as file:
            meta = json.loads(file.read(2**20))
    except (OSError, ValueError, RecursionError):
        return {}
    return meta if isinstance(meta, dict) and meta.get("penstock") == "tier" else {}


def is_marked(folder: Folder) -> bool:
    """Return whether the files in a folder carry our mark, so that we may remove them."""
    return header_in(folder) is not None or bool(meta_in(folder))


def fits(folder: Folder, shape: TierShape) -> bool:
    """Return whether a folder holds a complete tier of this shape and format."""
    header, meta = header_in(folder), meta_in(folder)
    if header is None or (header.format, meta.get("format")) != (FORMAT, FORMAT):
        return False
    if (header.num_units, header.digest) != (shape.num_units, shape.digest):
        return False
    if not 1 <= header.generation <= GENERATION_MAX:
        return False
    sizes = {name: _size_in(folder, name) for name in (STATE, SUMS, CELLS, DATA)}
    return (
        sizes[STATE] == HEADER_BYTES + shape.num_units
        and sizes[SUMS] == 8 * shape.num_units
        and sizes[CELLS] == _cells_bytes(shape)
        and 0 <= sizes[DATA] <= shape.size_bytes
    )


def _cells_bytes(shape: TierShape) -> int:
    return 8 * (shape.size_bytes // CELL_BYTES)


def _size_in(folder: Folder, name: str) -> int:
    try:
        descriptor = folder.open_file(name)
    except OSError:
        return -1
    try:
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def make_files(folder: Folder, shape: TierShape) -> None:
    """Write the files of an empty tier into a folder that has none of them."""
    header = Header(generation=1, num_units=shape.num_units, digest=shape.digest)
    # First, because it carries our mark: without it, the other files could never be removed.
    write_named(folder, STATE, header.packed(), size_bytes=HEADER_BYTES + shape.num_units)
    sizes = {SUMS: 8 * shape.num_units, CELLS: _cells_bytes(shape), DATA: 0}
    for name, size_bytes in sizes.items():
        descriptor = folder.open_file(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        os.ftruncate(descriptor, size_bytes)
        os.close(descriptor)
    meta = {
        "penstock": "tier",
        "format": FORMAT,
        "name": shape.name,
        "num_units": shape.num_units,
        "size_bytes": shape.size_bytes,
        "layout": f"{shape.digest:016x}",
        "about": shape.about,
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    write_named(folder, META, json.dumps(meta, indent=2).encode())
