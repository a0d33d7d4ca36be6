"""The files of a run, read as far as they have got: each look reads what came since the last one.

A look costs what is new: the end of every process's file, and of every thread's file the rows that
were added. So it may be repeated every second for as long as a run takes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import OptionError
from penstock.trace.chunks import VERSION, Rows, placed_chunks, rows_of
from penstock.trace.native import read_native_head
from penstock.trace.schema import Kind
from penstock.trace.segments import ALONE, read_segment


@dataclass(kw_only=True)
class FollowedProcess:
    """A process that records, and what is new of it."""

    path: Path
    head: dict[str, Any] = field(default_factory=dict)
    """Its pid, rank, role, host, boot, and both clocks at its start; empty: it has no file yet."""
    names: dict[int, str] = field(default_factory=lambda: {0: ""})
    facts: dict[str, Any] = field(default_factory=dict)
    threads: dict[int, str] = field(default_factory=dict)
    dropped: dict[Kind, int] = field(default_factory=dict)
    num_missing: int = 0
    """Rows that should have been there."""
    rows: list[tuple[int, Rows]] = field(default_factory=list)
    """Rows since the last look, with the thread that they are of."""
    counters: list[tuple[int, int, dict[str, float]]] = field(default_factory=list)
    """Counters since the last look: of which process, when, what."""
    is_open: bool = False
    """Whether files of its threads are there: it has not closed its trace."""
    waiting: dict[Path, int] = field(default_factory=dict)
    """Files of threads whose rows follow on others that the last look did not find, and the number
    of their first row."""
    _offset: int = 0
    """Where the part of the file begins that was not read."""
    _num_seen: dict[int, int] = field(default_factory=dict)
    """Of each segment, the number behind its last row that was read."""
    _num_seen_in: dict[str, int] = field(default_factory=dict)
    """The same of each file of the preloaded library, whose threads may have several."""

    @property
    def unix_offset_ns(self) -> int:
        """What to add to its times for nanoseconds since 1970."""
        return int(self.head["time_ns"] - self.head["perf_ns"])

    def look(self) -> None:
        """Read what is new."""
        self.rows, self.counters = [], []
        before, self.waiting = self.waiting, {}
        is_native = self.path.suffix == ".native"
        if is_native:
            self._look_at_native_head()
        else:
            self._look_at_chunks()
        paths: list[Path] = []
        # A packed file holds the rows of its segments, should they still be there.
        if self.head and not self.head.get("is_packed"):
            paths = sorted(self.path.parent.glob(f"{self.path.stem}.*.rows"))
        self.is_open = bool(paths)
        for path in paths:
            if is_native:
                self._look_at_native_rows(path)
            else:
                self._look_at_segment(path, before.get(path))

    def _look_at_chunks(self) -> None:
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        begin = self._offset
        for header, body, stop in placed_chunks(data):
            if header["type"] == "process":
                if header["version"] != VERSION:
                    raise OptionError(
                        f"{self.path} is a trace of version {header['version']}, this release "
                        f"reads version {VERSION}; read it with the release that wrote it"
                    )
                self.head = header
            elif self.head and (take := _TAKERS.get(header["type"])) is not None:
                take(self, header, body)
            self._offset = begin + stop

    def add_rows(self, header: dict[str, Any], body: bytes) -> None:
        """Add rows of a thread, without those that were read from its own file before."""
        rows, first = rows_of(header, body), header["first"]
        num_seen = self._num_seen.get(header["segment"], 0)
        self.num_missing += max(0, first - num_seen)
        rows = rows[max(0, num_seen - first) :]
        if len(rows):
            self.rows.append((header["thread"], rows))
        stop = header.get("stop", first + header["num_rows"])
        self._num_seen[header["segment"]] = max(num_seen, stop)

    def add_dropped(self, header: dict[str, Any], body: bytes) -> None:
        """Add how many rows were left out because the file was full."""
        self.dropped = {Kind(int(kind)): count for kind, count in header["rows"].items()}
        if "stop" in header:
            num_seen = self._num_seen.get(header["segment"], 0)
            self.num_missing += max(0, header["first"] - num_seen)
            self._num_seen[header["segment"]] = header["stop"]

    def add_counters(self, header: dict[str, Any], body: bytes) -> None:
        """Add counters: one process may read those of others of its rank."""
        pid = header.get("pid") or self.head["pid"]
        self.counters.append((pid, header["at_ns"], msgspec.msgpack.decode(body)))

    def _look_at_segment(self, path: Path, first_before: int | None) -> None:
        """Read the rows of a thread that are not in a chunk yet."""
        found = read_segment(path, self._num_seen)
        if found is None:
            return
        num_unknown = found.first - self._num_seen.get(found.number, 0)
        if num_unknown > 0 and found.first != first_before:
            # They were compressed since we read the file of the process: they stand at its end now,
            # and the next look finds them, and these here after them.
            self.waiting[path] = found.first
            return
        if num_unknown > 0:
            # A look later they still are in no chunk: the disk was full, or the file is damaged.
            self.num_missing += num_unknown
            self._num_seen[found.number] = found.first
        if len(found.rows):
            self.rows.append((found.thread, found.rows))
            self._num_seen[found.number] = found.start + len(found.rows)

    def _look_at_native_head(self) -> None:
        with suppress(FileNotFoundError):  # The launcher packs these files when the job has ended.
            if not self.head and (found := read_native_head(self.path)) is not None:
                self.head, self.names, self.dropped = found

    def _look_at_native_rows(self, path: Path) -> None:
        num_seen = self._num_seen_in.get(path.name, 0)
        found = read_segment(path, {ALONE: num_seen})
        if found is not None and len(found.rows):
            self.rows.append((found.thread, found.rows))
            self._num_seen_in[path.name] = num_seen + len(found.rows)


def _add_name(to: FollowedProcess, header: dict[str, Any], body: bytes) -> None:
    to.names[header["number"]] = body.decode()


def _add_thread(to: FollowedProcess, header: dict[str, Any], body: bytes) -> None:
    to.threads[header["thread"]] = header["name"]


def _add_facts(to: FollowedProcess, header: dict[str, Any], body: bytes) -> None:
    to.facts |= msgspec.msgpack.decode(body)


_TAKERS: dict[str, Callable[[FollowedProcess, dict[str, Any], bytes], None]] = {
    "name": _add_name,
    "thread": _add_thread,
    "facts": _add_facts,
    "counters": FollowedProcess.add_counters,
    "rows": FollowedProcess.add_rows,
    "dropped": FollowedProcess.add_dropped,
}


class TraceFollower:
    """Reads the trace of a run again and again."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._processes: dict[str, FollowedProcess] = {}

    def look(self) -> list[FollowedProcess]:
        """Return all processes of the run, each with what is new of it."""
        paths = sorted(self.folder.glob("*.trace")) + sorted(self.folder.glob("*.native"))
        for path in paths:
            # A native file is packed into a trace of the same stem when the job ends: whichever we
            # follow already has those rows, and they must not count twice.
            self._processes.setdefault(path.stem, FollowedProcess(path=path))
        for process in self._processes.values():
            process.look()
        found = [process for process in self._processes.values() if process.head]
        if not found:
            raise OptionError(
                f"{self.folder} holds no trace; record one with penstock.Loader(..., "
                f"trace={str(self.folder)!r}) or penstock trace --out {self.folder} -- python "
                "train.py"
            )
        return found
