"""A trace that is still being written: each look reads what came since the last one.

A look costs what is new: the end of every process's file, and of every thread's file the rows that
were added. So it may be repeated every second for as long as a run takes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from penstock.errors import OptionError
from penstock.trace.chunks import VERSION, Rows, placed_chunks, rows_of
from penstock.trace.recorder import SEGMENT_HEAD
from penstock.trace.schema import ROW

_COUNTED, _MARKED = b"PsTrows1", b"PsTrows2"
"""Threads' files: with the number of rows in the head, or with a mark in each row."""
_FIXED_BYTES = 24
"""Of the head, what stays until rows are compressed: magic, segment, number of the first row."""
_ROWS_AT_ONCE = 256


@dataclass(kw_only=True)
class FollowedProcess:
    """A process that records, and what is new of it."""

    path: Path
    head: dict[str, Any] = field(default_factory=dict)
    """Its pid, rank, role, host, boot, and both clocks at its start."""
    names: dict[int, str] = field(default_factory=lambda: {0: ""})
    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[Rows] = field(default_factory=list)
    """Rows since the last look."""
    counters: list[tuple[int, int, dict[str, float]]] = field(default_factory=list)
    """Counters since the last look: of which process, when, what."""
    is_open: bool = False
    """Whether files of its threads are there: it has not closed its trace."""
    _offset: int = 0
    _num_seen: dict[int, int] = field(default_factory=dict)
    """Of each segment, how many of its rows were read."""

    @property
    def unix_offset_ns(self) -> int:
        """What to add to its times for nanoseconds since 1970."""
        return int(self.head["time_ns"] - self.head["perf_ns"])

    def look(self) -> None:
        """Read what is new."""
        self.rows, self.counters = [], []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        begin = self._offset
        for header, body, stop in placed_chunks(data):
            self._take(header, body)
            self._offset = begin + stop
        segments = list(self.path.parent.glob(f"{self.path.stem}.*.rows")) if self.head else []
        self.is_open = bool(segments)
        for path in segments:
            self._look_at_segment(path)

    def _take(self, header: dict[str, Any], body: bytes) -> None:
        match header["type"]:
            case "process":
                if header["version"] != VERSION:
                    raise OptionError(
                        f"{self.path} is a trace of version {header['version']}, this release "
                        f"reads version {VERSION}; read it with the release that wrote it"
                    )
                self.head = header
            case "name":
                self.names[header["number"]] = body.decode()
            case "facts":
                self.facts |= msgspec.msgpack.decode(body)
            case "counters":
                # One process may read the counters of others of its rank.
                pid = header.get("pid") or self.head["pid"]
                self.counters.append((pid, header["at_ns"], msgspec.msgpack.decode(body)))
            case "rows":
                self._add(header["segment"], header["first"], rows_of(header, body))

    def _add(self, segment: int, first: int, rows: Rows) -> None:
        """Add rows of a thread, without those that were read from its own file before."""
        num_seen = self._num_seen.get(segment, 0)
        fresh = rows[max(0, num_seen - first) :]
        if len(fresh):
            self.rows.append(fresh)
        self._num_seen[segment] = max(num_seen, first + len(rows))

    def _look_at_segment(self, path: Path) -> None:
        """Read the rows of a thread that are not in a chunk yet."""
        try:
            file = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return  # Its process has compressed it meanwhile.
        try:
            head = os.pread(file, SEGMENT_HEAD.size, 0)
            if len(head) < SEGMENT_HEAD.size:
                return
            magic, number, first, mark = SEGMENT_HEAD.unpack(head)
            num_seen = self._num_seen.get(number, 0)
            # Rows before `first` that we have not seen are in a chunk that was appended since we
            # read the file of the process: the next look finds them, and these here after them.
            if first > num_seen:
                return
            rows = _rows_after(file, magic, mark, num_seen - first)
            # The process may have compressed its rows while we read them, and begun anew.
            again = os.pread(file, SEGMENT_HEAD.size, 0)
            if again[:_FIXED_BYTES] == head[:_FIXED_BYTES]:
                self._add(number, num_seen, rows)
        finally:
            os.close(file)


def _rows_after(file: int, magic: bytes, mark: int, num_known: int) -> Rows:
    """Return the rows of a thread's file behind those that are known already."""
    if magic == _COUNTED:
        size = (mark - num_known) * ROW.itemsize
        data = os.pread(file, size, _place(num_known)) if size > 0 else b""
        return np.frombuffer(data[: len(data) // ROW.itemsize * ROW.itemsize], ROW)
    parts = [np.zeros(0, ROW)]
    while magic == _MARKED:
        # The rows themselves say where they end: the first that has another mark is not there yet.
        data = os.pread(file, _ROWS_AT_ONCE * ROW.itemsize, _place(num_known))
        rows = np.frombuffer(data[: len(data) // ROW.itemsize * ROW.itemsize], ROW)
        others = np.flatnonzero(rows["spare"] != mark & 0xFFFF)
        parts.append(rows[: others[0]] if len(others) else rows)
        num_known += len(rows)
        if len(others) or len(rows) < _ROWS_AT_ONCE:
            break
    return np.concatenate(parts)


def _place(row: int) -> int:
    return SEGMENT_HEAD.size + row * ROW.itemsize


class TraceFollower:
    """Reads the trace of a run again and again."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._processes: dict[str, FollowedProcess] = {}

    def look(self) -> list[FollowedProcess]:
        """Return all processes of the run, each with what is new of it."""
        paths = self.folder.glob("*.trace")
        for path in sorted(paths):
            self._processes.setdefault(path.name, FollowedProcess(path=path)).look()
        found = [process for process in self._processes.values() if process.head]
        if not found:
            raise OptionError(
                f"{self.folder} holds no trace; record one with penstock.Loader(..., "
                f"trace={str(self.folder)!r}) or penstock trace --out {self.folder} -- python "
                "train.py"
            )
        return found
