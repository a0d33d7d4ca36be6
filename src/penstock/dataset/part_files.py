"""Parts in files that are named by their hash: verified before they are trusted, once for a file.

The name of a part is the hash of its bytes. A small file is read and hashed whenever it is opened.
A large one is mapped, so that opening it costs a page or two whatever its size; hashing it each
time would read all of it. So the first to open it hashes it and checks that every extent lies
inside its object, and leaves a *stamp* in the user's cache: device, inode, size and times of the
file. As long as these are the same it is not hashed again. Writing to the file changes its times,
and the time of the last change of an inode cannot be set back.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import xxhash

from penstock.dataset.columns import READ_BYTES_MAX, REINDEX, map_file, parse_columns
from penstock.dataset.part import ABSENT, Ints, Part, Table, part_of
from penstock.errors import CorruptError, FormatError
from penstock.storage.keys import TEMPORARY_PREFIX

_CHUNK = 1 << 20
"""Rows that are looked at together: few enough for the processor's cache."""


def open_verified(path: Path, name: str | None, stamps: Path) -> Part:
    """Return the part in a file whose hash is `name`, or raise `CorruptError`.

    Of a file that is not named by its hash (None) only the extents are checked.
    """
    data = map_file(path)
    if len(data) <= READ_BYTES_MAX:
        return part_verified(data, name, str(path), path)
    stamp = stamps / f"{name or 'extents'}-{xxhash.xxh3_64_hexdigest(os.fsencode(path))}"
    identity = _identity(path)
    if _stamped(stamp) == identity:
        return part_of(parse_columns(data, str(path), path), str(path))
    part = part_verified(data, name, str(path), path)
    if isinstance(data.obj, mmap.mmap):
        # Hashing has read all of it into memory, and little of it will be needed soon.
        data.obj.madvise(mmap.MADV_DONTNEED)
    if _identity(path) == identity:  # Else it was changed while it was hashed.
        _leave(stamp, identity)
    return part


def part_verified(data: memoryview, name: str | None, where: str, path: Path | None = None) -> Part:
    """Return the part in some bytes whose hash is `name`, or raise `CorruptError`."""
    found = xxhash.xxh3_128_hexdigest(data) if name is not None else None
    if found != name:
        raise CorruptError(
            f"{where} is damaged: its {len(data)} bytes have the hash {found}, its name says "
            f"{name}; {REINDEX}"
        )
    part = part_of(parse_columns(data, where, path), where)
    check_bounds(part, where)
    return part


def _identity(path: Path) -> str:
    status = path.stat()
    return (
        f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns} "
        f"{status.st_ctime_ns}"
    )


def _stamped(stamp: Path) -> str:
    try:
        return stamp.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _leave(stamp: Path, identity: str) -> None:
    with suppress(OSError):  # Without a stamp the file is hashed again next time.
        stamp.parent.mkdir(parents=True, exist_ok=True)
        # Renamed when it is whole: other processes may read it at any moment.
        temporary = stamp.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}")
        temporary.write_text(identity)
        temporary.replace(stamp)


def check_bounds(part: Part, where: str) -> None:
    """Raise `FormatError` unless every extent of a part lies inside its object."""
    for name, column in part.columns.items():
        if name.endswith((".ends", ".first")) and not _rises(column):
            raise FormatError(f"{where}: the numbers in column {name} do not rise; {REINDEX}")
    for name in part.columns:
        if name.endswith(".ends"):
            ends, data = part.columns[name], part.columns[name.removesuffix("ends") + "bytes"]
            if len(ends) and int(ends[-1]) != len(data):
                raise FormatError(f"{where}: texts of column {name} are cut off; {REINDEX}")
    for number, table in enumerate(part.tables):
        if int(table.first_sample[0]) != 0 or not all(map(bool, _inside(part, table, number))):
            raise FormatError(
                f"{where}: samples lie outside of the objects they are said to lie in; {REINDEX}"
            )
    if "member.offset" in part.columns and not all(map(bool, _members_inside(part))):
        raise FormatError(f"{where}: fields lie outside of their samples; {REINDEX}")


def _rises(column: Ints) -> bool:
    for at in range(0, len(column) - 1, _CHUNK):
        some = column[at : at + _CHUNK + 1]
        if not (some[1:] >= some[:-1]).all():
            return False
    return len(column) == 0 or int(column[0]) >= 0


def _inside(part: Part, table: Table, number: int) -> Iterator[np.bool_ | bool]:
    """Yield for some extents at a time whether all of them end inside their objects."""
    sizes = table.sizes
    yield (sizes >= 0).all()
    if table.addressing == "even":
        base, stride, width = table.even_layout()
        steps = np.diff(table.first_sample) - 1  # to the last row; -1 where there is none
        for column in (base, width):
            yield ((steps < 0) | ((column >= 0) & (column <= sizes))).all()
        room = sizes - base - width
        yield ((steps < 0) | ((stride >= 0) & (room >= 0))).all()
        # Divided rather than multiplied: a product could overflow.
        yield ((steps <= 0) | (stride == 0) | (room // np.maximum(stride, 1) >= steps)).all()
        return
    prefix = f"t{number}." + ("block." if table.addressing == "blocks" else "")
    offset, length = part.columns[f"{prefix}offset"], part.columns[f"{prefix}length"]
    for at in range(0, len(offset), _CHUNK):
        stop = min(at + _CHUNK, len(offset))
        if table.addressing == "blocks":
            numbers = part.columns[f"{prefix}object"][at:stop]
            yield (numbers < len(sizes)).all()
            limits = sizes[numbers]
        else:
            limits = _sizes_of(table, at, stop)
        # Unsigned, and no sum that could overflow: lengths are at most the limits when they are
        # taken from them.
        room, lengths = limits.astype(np.uint64), length[at:stop]
        yield (lengths <= room).all()
        yield (offset[at:stop] <= room - lengths).all()


def _sizes_of(table: Table, start: int, stop: int) -> Ints:
    """Return the size of the object of each of some samples."""
    first = table.first_sample
    low = int(np.searchsorted(first, start, side="right")) - 1
    high = int(np.searchsorted(first, stop, side="left"))
    edges = np.clip(first[low : high + 1], start, stop)
    return np.repeat(table.sizes[low:high], edges[1:] - edges[:-1])


def _members_inside(part: Part) -> Iterator[np.bool_]:
    offset, length = part.columns["member.offset"], part.columns["member.length"]
    table = part.tables[0]
    for at in range(0, part.num_samples, _CHUNK):
        stop = min(at + _CHUNK, part.num_samples)
        if table.addressing == "extents":
            room = table.sample_bytes()[at:stop]
        else:
            room = table.extents(np.arange(at, stop)).length
        lengths = length[at:stop]
        ends = offset[at:stop].astype(np.uint64) + lengths
        yield ((ends <= room.astype(np.uint64)[:, None]) | (lengths == ABSENT)).all()
