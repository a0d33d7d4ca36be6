"""The recorder of a process: rows of its threads, names, facts and counters.

Each thread writes rows into a mapped file of its own, without a lock. When the file is full, its
rows are compressed and appended to the file of the process. The kernel keeps mapped pages of a
process that is killed, so its last rows can be read as well.

Memory is bounded by the number of threads times `ROWS_MAX`, and by `NAMES_MAX`. Disk is bounded by
`file_bytes_max`: beyond it only spans of the training loop are kept, and the others are counted.

Recording never ends the work that is recorded. Blocks of mapped files are allocated before they are
written, because writing to a mapped file on a full disk ends the process. Where there is no room,
rows stay in memory until they are compressed. Rows are numbered, so the reader knows how many it
misses.
"""

from __future__ import annotations

import atexit
import logging
import mmap
import os
import socket
import struct
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from penstock.errors import OptionError
from penstock.trace.boot import boot_id
from penstock.trace.chunks import VERSION, chunk, rows_chunk
from penstock.trace.clocks import clock_pair
from penstock.trace.schema import PACKED, ROW, Kind

TRACE_VARIABLE = "PENSTOCK_TRACE"
"""The environment variable that names the folder of a traced job's run."""
ROWS_MAX = 2048
"""Rows of a thread before they are compressed."""
NAMES_MAX = 1 << 20
"""Names of a process; later ones are all called `(other)`."""
FILE_BYTES_MAX = 1 << 29
SEGMENT_HEAD = struct.Struct("<8sQQQ")
"""Of a thread's file: magic, number of the segment, number of its first row, and its mark."""
SEGMENT_MAGIC = b"PsTrows2"
"""The mark is the thread (upper half) and the generation (lower half): a row is whole, and not left
over from before the last compression, if its last column is the generation."""
COUNTED_MAGIC = b"PsTrows1"
"""The mark is the number of rows: simpler for writers in other languages."""
_GENERATIONS = 0xFFFF
_ALWAYS_KEPT = frozenset({Kind.NEXT, Kind.LAUNCH, Kind.COPY, Kind.STEP, Kind.MARK, Kind.CHECKPOINT})
_ROW_BYTES = PACKED.size
_END = SEGMENT_HEAD.size + ROWS_MAX * _ROW_BYTES
_pack_into = PACKED.pack_into
_NEXT = int(Kind.NEXT)

_log = logging.getLogger("penstock.trace")


class _ThreadRows:
    """Rows of one thread that are not compressed yet, and what the thread is doing now."""

    __slots__ = (
        "_first", "_is_compressing", "_is_file", "_path", "_recorder", "at", "epoch", "flags",
        "generation", "map", "number", "step", "thread",
    )  # fmt: skip

    def __init__(self, recorder: Recorder, number: int) -> None:
        self._recorder = recorder
        self.number = number
        self.thread = threading.get_native_id()
        self._path = recorder.path.with_suffix(f".{number}.rows")
        found = _mapped(self._path)
        self._is_file = found is not None
        self.map = mmap.mmap(-1, _END) if found is None else found
        self._first = 0
        self._is_compressing = False
        self.at = SEGMENT_HEAD.size
        """Where the next row goes."""
        self.generation = 1
        self.step = self.epoch = -1
        self.flags = 0
        self._write_head()

    def _write_head(self) -> None:
        mark = self.thread << 32 | self.generation
        SEGMENT_HEAD.pack_into(self.map, 0, SEGMENT_MAGIC, self.number, self._first, mark)

    def compress(self) -> bool:
        """Move the rows into the file of the process; return whether they are there."""
        count = (self.at - SEGMENT_HEAD.size) // _ROW_BYTES
        if not count:
            return True
        if self._is_compressing:
            # A signal handler has interrupted this very call, and records. Its row takes the place
            # of the one before.
            self.at = min(self.at, _END - _ROW_BYTES)
            return True
        self._is_compressing = True
        rows = np.frombuffer(self.map, ROW, count, SEGMENT_HEAD.size).copy()
        stop = self._first + count
        about = {"segment": self.number, "first": self._first, "stop": stop, "thread": self.thread}
        is_there = self._recorder.append_rows(rows, about)
        self._first = stop
        self.generation = self.generation % _GENERATIONS + 1
        # Rows are numbered: should we be killed just now, the reader knows those it has already.
        self._write_head()
        self.at = SEGMENT_HEAD.size
        self._is_compressing = False
        return is_there

    def close(self) -> None:
        """Compress what is left, and remove the file.

        The mapping stays as long as somebody holds it: another thread may just be writing a row.
        """
        before = bytes(self.map[: self.at])
        if not self.compress() and self._is_file:
            # The disk is full. The rows can be read where they are.
            self.map[: len(before)] = before
        elif self._is_file:
            self._path.unlink(missing_ok=True)


def _mapped(path: Path) -> mmap.mmap | None:
    """Return a new file for rows, mapped; None where there is no room for it."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    except OSError:
        return None
    try:
        os.posix_fallocate(file, 0, _END)
        return mmap.mmap(file, _END)
    except OSError:
        with suppress(OSError):
            path.unlink()
        return None
    finally:
        os.close(file)


class Recorder:
    """Records what this process does. Safe to use from many threads and after a fork."""

    def __init__(
        self,
        folder: str | Path,
        *,
        role: str,
        rank: int = 0,
        file_bytes_max: int = FILE_BYTES_MAX,
        must_open: bool = True,
    ) -> None:
        """`must_open`: whether it is an error that the folder cannot be written. Else the process
        goes on, and its trace is missing."""
        self.folder = Path(folder)
        self.role, self.rank = role, rank
        self._file_bytes_max = file_bytes_max
        # Guards the file and the tables below. Rows take it only when a segment is full.
        self._lock = threading.RLock()
        self._begin()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            if not must_open:
                self._complain(error.strerror or str(error))
                _RECORDERS.add(self)
                return
            raise OptionError(
                f"a trace cannot be written to {self.folder}: {error.strerror or error}; trace= "
                "names a folder that this process may write to"
            ) from None
        _RECORDERS.add(self)

    def _begin(self) -> None:
        """Hold nothing, as a process does that has not recorded yet."""
        self._pid, self._parent = os.getpid(), os.getppid()
        self._names: dict[str, int] = {"": 0}
        self._segments: dict[int, _ThreadRows] = {}
        self._num_segments = 0
        self._local = threading.local()
        self._size_bytes = 0
        self._dropped: dict[int, int] = {}
        self._file = -1
        """Its descriptor; -1: not open."""
        self._identity = (0, 0)
        """Device and number of the file: the program may have closed our descriptor and been given
        the same number for a file of its own."""
        self._has_complained = False
        # A process id may come back in a long run, on another node at the same time.
        self._key = f"{self._pid}-{os.urandom(4).hex()}"

    @property
    def path(self) -> Path:
        """The file of this process."""
        return self.folder / f"{self.rank:05d}-{self.role}-{self._key}.trace"

    @property
    def has_file(self) -> bool:
        """Whether this process has a file already. A forked child gets one when it records."""
        return self._identity != (0, 0)

    def become(self, role: str) -> None:
        """Say what this process is; without effect once it has recorded."""
        if not self.has_file and not self._segments:
            self.role = role

    def _open(self) -> None:
        """Open the file; the first time begin it."""
        is_new = not self.has_file
        flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | (os.O_CREAT if is_new else 0)
        self._file = os.open(self.path, flags, 0o644)
        self._identity = _identity(self._file)
        if is_new:
            self._size_bytes += os.write(self._file, chunk(self._about()))

    def _about(self) -> dict[str, Any]:
        perf_ns, time_ns = clock_pair()
        return {
            "type": "process",
            "version": VERSION,
            "pid": self._pid,
            "parent": self._parent,
            "rank": self.rank,
            "role": self.role,
            "host": socket.gethostname(),
            # One machine, one clock: its boot tells machines and containers apart.
            "boot": boot_id(),
            "perf_ns": perf_ns,
            "time_ns": time_ns,
        }

    # -- what is recorded --------------------------------------------------------------------

    def span(
        self,
        kind: int,
        start_ns: int,
        end_ns: int,
        *,
        object_id: int = 0,
        source_id: int = 0,
        offset: int = -1,
        size_bytes: int = 0,
        step: int = -1,
        epoch: int = -1,
        count: int = 0,
        attempt: int = 0,
        flags: int = 0,
        cpu_ns: int = 0,
        wait_ns: int = 0,
        lock_ns: int = 0,
    ) -> None:
        """Record that something took from `start_ns` to `end_ns` (`time.perf_counter_ns`).

        Without `step`, `epoch` and `flags` it belongs to what the thread is `working_on`.
        """
        try:
            segment: _ThreadRows = self._local.segment
        except AttributeError:
            segment = self._new_segment()
        if step < 0:
            step, epoch, flags = segment.step, segment.epoch, flags | segment.flags
        if segment.at == _END:
            segment.compress()
        at = segment.at
        # Taken before it is written: a signal handler that records in between takes the next one.
        segment.at = at + _ROW_BYTES
        # One call writes the row, its generation last: whoever reads the file of a killed process
        # sees whole rows only.
        _pack_into(
            segment.map, at, start_ns, end_ns - start_ns, cpu_ns, wait_ns, lock_ns, offset,
            size_bytes, step, count, epoch, object_id, source_id, kind, flags, attempt,
            segment.generation,
        )  # fmt: skip

    def next_row(
        self,
        start_ns: int,
        end_ns: int,
        wait_ns: int,
        what: tuple[int, int, int, int, int],
        object_id: int = 0,
    ) -> None:
        """Record a NEXT span: step, epoch, count, bytes and flags of a batch.

        As `span` does, in half the time: the training loop pays for this one.
        """
        try:
            segment: _ThreadRows = self._local.segment
        except AttributeError:
            segment = self._new_segment()
        step, epoch, count, size_bytes, flags = what
        if segment.at == _END:
            segment.compress()
        at = segment.at
        segment.at = at + _ROW_BYTES
        _pack_into(
            segment.map, at, start_ns, end_ns - start_ns, 0, wait_ns, 0, -1, size_bytes, step,
            count, epoch, object_id, 0, _NEXT, flags, 0, segment.generation,
        )  # fmt: skip

    def working_on(self, step: int = -1, epoch: int = -1, flags: int = 0) -> None:
        """Say what the rows of this thread belong to from now on."""
        try:
            segment: _ThreadRows = self._local.segment
        except AttributeError:
            segment = self._new_segment()
        segment.step, segment.epoch, segment.flags = step, epoch, flags

    @property
    def doing(self) -> tuple[int, int, int]:
        """What this thread is working on: step, epoch, flags."""
        segment: _ThreadRows | None = getattr(self._local, "segment", None)
        return (-1, -1, 0) if segment is None else (segment.step, segment.epoch, segment.flags)

    def mark(self, what: str, **more: int) -> None:
        """Record that something happened now."""
        now_ns = time.perf_counter_ns()
        self.span(Kind.MARK, now_ns, now_ns, object_id=self.name(what), **more)

    def name(self, text: str) -> int:
        """Return the number of a name, for `object_id` and `source_id`."""
        number = self._names.get(text)
        return self._new_name(text) if number is None else number

    def facts(self, facts: dict[str, Any]) -> None:
        """Record facts of this process or its rank: parameters, versions. Later ones win."""
        self._append(chunk({"type": "facts"}, msgspec.msgpack.encode(facts)))

    def counters(self, at_ns: int, values: dict[str, float], *, pid: int | None = None) -> None:
        """Record counters of this process or its machine as they are now.

        With `pid` they are those of another process of this machine that records in this run, and
        the reader gives them to it.
        """
        if self._size_bytes > self._file_bytes_max:
            return
        header = {"type": "counters", "at_ns": at_ns, "pid": pid or self._pid}
        self._append(chunk(header, msgspec.msgpack.encode(values)))

    # -- files -------------------------------------------------------------------------------

    def _new_segment(self) -> _ThreadRows:
        with self._lock:
            # At once, like names: the rows of a killed process should have the name of its thread.
            thread, name = threading.get_native_id(), threading.current_thread().name
            self._append(chunk({"type": "thread", "thread": thread, "name": name}))
            segment = _ThreadRows(self, self._num_segments)
            self._num_segments += 1
            self._segments[segment.number] = segment
        self._local.segment = segment
        self._local.owner = _ThreadGuard(self, segment)
        return segment

    def _new_name(self, text: str) -> int:
        with self._lock:
            if text in self._names:
                return self._names[text]
            if len(self._names) >= NAMES_MAX:
                text = "(other)"
                if text in self._names:
                    return self._names[text]
            number = self._names[text] = len(self._names)
            # At once: rows with this number may be all that is left of a killed process.
            self._append(chunk({"type": "name", "number": number}, text.encode()))
            return number

    def append_rows(self, rows: Any, about: dict[str, Any]) -> bool:
        """Append rows of a thread to the file of the process; return whether they are there."""
        with self._lock:
            if self._size_bytes <= self._file_bytes_max:
                return self._append(rows_chunk(rows, about))
            is_kept = np.isin(rows["kind"], [int(kind) for kind in _ALWAYS_KEPT])
            kinds, counts = np.unique(rows["kind"][~is_kept], return_counts=True)
            for kind, count in zip(kinds.tolist(), counts.tolist(), strict=True):
                self._dropped[kind] = self._dropped.get(kind, 0) + count
            is_there = not is_kept.any() or self._append(rows_chunk(rows[is_kept], about))
            dropped = {str(kind): count for kind, count in self._dropped.items()}
            self._append(chunk({"type": "dropped", "rows": dropped, **about}))
            return is_there

    def _append(self, data: bytes) -> bool:
        """Append a chunk; return whether that was possible.

        A full disk, or a folder that is gone, must not end the training. A chunk that was written
        in part has a checksum that does not fit, and the reader passes over it.
        """
        with self._lock:
            try:
                if self._file < 0 or _identity(self._file) != self._identity:
                    self._open()
                num_written = os.write(self._file, data)
            except OSError as error:
                self._complain(error.strerror or str(error))
                return False
            self._size_bytes += num_written
            if num_written < len(data):
                self._complain("there is no room")
            return num_written == len(data)

    def _complain(self, why: str) -> None:
        if not self._has_complained:
            self._has_complained = True
            _log.warning("the trace in %s is not complete: %s", self.folder, why)

    def flush(self) -> None:
        """Compress the rows of this thread; those of others are readable where they are."""
        segment = getattr(self._local, "segment", None)
        if segment is not None:
            segment.compress()

    def close(self) -> None:
        """Compress the rows of all threads, which must have stopped recording, and end the file."""
        with self._lock:
            if self._pid != os.getpid():
                return
            # First: a thread that records all the same begins anew, with a file of its own.
            self._local = threading.local()
            segments, self._segments = self._segments, {}
            for segment in segments.values():
                segment.close()

    def drop_segment(self, segment: _ThreadRows) -> None:
        """Take over the rows of a thread that has ended."""
        with self._lock:
            if self._segments.pop(segment.number, None) is not None:
                segment.close()

    def after_fork(self) -> None:
        """Begin anew, in a child: the parent goes on with the file that was open.

        The child's own file is made when it records: most children never do, and making a file may
        fail.
        """
        with suppress(OSError):
            if self._file >= 0 and _identity(self._file) == self._identity:
                os.close(self._file)
        self._lock = threading.RLock()  # A thread of the parent may have held it.
        if self.role == "train":
            self.role = "worker"  # Unless it says otherwise before it records.
        self._begin()


def _identity(file: int) -> tuple[int, int]:
    about = os.fstat(file)
    return about.st_dev, about.st_ino


class _ThreadGuard:
    """Lives as long as its thread: threads come and go, and their rows must not pile up."""

    __slots__ = ("_pid", "_recorder", "_segment")

    def __init__(self, recorder: Recorder, segment: _ThreadRows) -> None:
        self._recorder, self._segment, self._pid = weakref.ref(recorder), segment, os.getpid()

    def __del__(self) -> None:
        recorder = self._recorder()
        if recorder is not None and os.getpid() == self._pid:
            recorder.drop_segment(self._segment)


_RECORDERS: weakref.WeakSet[Recorder] = weakref.WeakSet()
_OF_FOLDER: dict[tuple[str, int], Recorder] = {}
_OPENING = threading.Lock()
"""Two loaders of a process may begin at once; they share a recorder."""


def recorder_of(folder: str | Path, *, role: str, rank: int) -> Recorder:
    """Return the recorder of this process for a run; it is closed when the process ends."""
    key = str(Path(folder).absolute()), rank
    with _OPENING:
        if key not in _OF_FOLDER:
            # Engine and workers begin after the training process, perhaps in the midst of a run: it
            # goes on without their rows.
            is_first = role == "train"
            _OF_FOLDER[key] = Recorder(key[0], role=role, rank=rank, must_open=is_first)
        else:
            _OF_FOLDER[key].become(role)
        return _OF_FOLDER[key]


def recorder_here() -> Recorder | None:
    """Return the recorder of this training process, if one was opened: by a loader, or by
    `penstock trace`."""
    found = [recorder for recorder in list(_OF_FOLDER.values()) if recorder.role == "train"]
    return found[-1] if found else None


def close_recorders() -> None:
    """Close all recorders of this process: before an exit that skips `atexit`."""
    for recorder in list(_RECORDERS):
        recorder.close()


def _after_fork() -> None:
    global _OPENING
    _OPENING = threading.Lock()
    for recorder in list(_RECORDERS):
        recorder.after_fork()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(close_recorders)
