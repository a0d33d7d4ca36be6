"""Files of threads: rows that are not in a chunk yet, read while the thread goes on writing.

Nothing is locked. A row is whole once its last column says so, and that column is written last;
but whoever copies a row while it is written may get its old beginning and its new end. So rows that
were whole in one copy are taken from a second one, and both copies count only if the head of the
file is the same before and after: else the thread has begun anew meanwhile.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.trace.chunks import Rows
from penstock.trace.recorder import COUNTED_MAGIC, SEGMENT_HEAD, SEGMENT_MAGIC
from penstock.trace.schema import ROW

_ROWS_AT_ONCE = 256
_TRIES = 8
ALONE = -1
"""The number of a segment whose rows are in no chunk: a file of the preloaded library."""
_NONE: Rows = np.zeros(0, ROW)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRows:
    """Some rows of a thread."""

    number: int
    """Of the segment, in its process, or `ALONE`."""
    first: int
    """The number of the first row that is in the file: those before it are in chunks."""
    thread: int
    rows: Rows
    """Those from `start` on."""
    start: int


def read_segment(path: Path, seen: dict[int, int]) -> SegmentRows | None:
    """Return the rows in a file, without those that were seen; None where it is not one, or gone.

    `seen`: of each segment, how many of its rows are known.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None  # Its process has compressed it meanwhile.
    try:
        for _ in range(_TRIES):
            head = os.pread(file, SEGMENT_HEAD.size, 0)
            if len(head) < SEGMENT_HEAD.size:
                return None
            magic, number, first, mark = SEGMENT_HEAD.unpack(head)
            if magic == COUNTED_MAGIC:
                # Its mark is the number of rows, and was read before them.
                start = seen.get(ALONE, 0)
                rows = _read(file, start, mark - start)
                return SegmentRows(number=ALONE, first=0, thread=number, rows=rows, start=start)
            start = max(first, seen.get(number, 0))
            if magic != SEGMENT_MAGIC:
                return None
            rows = _marked(file, start - first, mark & 0xFFFF)
            if os.pread(file, SEGMENT_HEAD.size, 0) == head:
                break
        else:
            rows = _NONE  # It begins anew all the time: what it had is in chunks.
        return SegmentRows(number=number, first=first, thread=mark >> 32, rows=rows, start=start)
    finally:
        os.close(file)


def _marked(file: int, start: int, mark: int) -> Rows:
    """Return the rows from `start` on, up to the first that is not whole."""
    parts = [_NONE]
    while True:
        found = _read(file, start, _ROWS_AT_ONCE)
        others = np.flatnonzero(found["spare"] != mark)
        num_whole = int(others[0]) if len(others) else len(found)
        parts.append(_read(file, start, num_whole))
        start += num_whole
        if num_whole < _ROWS_AT_ONCE:
            return np.concatenate(parts)


def _read(file: int, start: int, count: int) -> Rows:
    if count <= 0:
        return _NONE
    data = os.pread(file, count * ROW.itemsize, SEGMENT_HEAD.size + start * ROW.itemsize)
    return np.frombuffer(data[: len(data) // ROW.itemsize * ROW.itemsize], ROW)
