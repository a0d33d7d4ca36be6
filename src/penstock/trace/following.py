"""A trace that is still being written: each look reads what came since the last one.

A look costs what is new: the end of every process's file, and of every thread's file the rows that
were added. So it may be repeated every second for as long as a run takes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import OptionError
from penstock.trace.chunks import VERSION, Rows, placed_chunks, rows_of
from penstock.trace.segments import read_segment


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
                rows = rows_of(header, body)
                self._add(header["segment"], header["first"], rows, header.get("stop"))
            case "dropped" if "stop" in header:
                self._num_seen[header["segment"]] = header["stop"]

    def _add(self, segment: int, first: int, rows: Rows, stop: int | None = None) -> None:
        """Add rows of a thread, without those that were read from its own file before.

        `stop`: the number behind the last of them, where some were dropped.
        """
        num_seen = self._num_seen.get(segment, 0)
        fresh = rows[max(0, num_seen - first) :]
        if len(fresh):
            self.rows.append(fresh)
        self._num_seen[segment] = max(num_seen, first + len(rows) if stop is None else stop)

    def _look_at_segment(self, path: Path) -> None:
        """Read the rows of a thread that are not in a chunk yet."""
        found = read_segment(path, self._num_seen)
        # Rows before `first` that we have not seen are in a chunk that was appended since we read
        # the file of the process: the next look finds them, and these here after them.
        if found is not None and found.first <= self._num_seen.get(found.number, 0):
            self._add(found.number, found.start, found.rows)


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
