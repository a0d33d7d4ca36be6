"""The recorder of a process: rows of its threads, names, facts and counters.

Each thread writes rows into a mapped file of its own, without a lock. When the file is full, its
rows are compressed and appended to the file of the process. The kernel keeps mapped pages of a
process that is killed, so its last rows can be read as well.

Memory is bounded by the number of threads times `ROWS_MAX`. Disk is bounded by `file_bytes_max`:
beyond it only spans of the training loop are kept, and what is dropped is counted.
"""

from __future__ import annotations

import atexit
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


class _Segment:
    """Rows of one thread that are not compressed yet, and what the thread is doing now."""

    __slots__ = (
        "_first", "_path", "_recorder", "at", "epoch", "flags", "generation", "map", "number",
        "step", "thread",
    )  # fmt: skip

    def __init__(self, recorder: Recorder, number: int) -> None:
        self._recorder = recorder
        self.number = number
        self.thread = threading.get_native_id()
        self._path = recorder.path.with_suffix(f".{number}.rows")
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            os.ftruncate(file, _END)
            self.map = mmap.mmap(file, _END)
        finally:
            os.close(file)
        self._first = 0
        self.at = SEGMENT_HEAD.size
        """Where the next row goes."""
        self.generation = 1
        self.step = self.epoch = -1
        self.flags = 0
        self._write_head()

    def _write_head(self) -> None:
        mark = self.thread << 32 | self.generation
        SEGMENT_HEAD.pack_into(self.map, 0, SEGMENT_MAGIC, self.number, self._first, mark)

    def compress(self) -> None:
        """Move the rows into the file of the process."""
        count = (self.at - SEGMENT_HEAD.size) // _ROW_BYTES
        if not count:
            return
        rows = np.frombuffer(self.map, ROW, count, SEGMENT_HEAD.size).copy()
        about = {"segment": self.number, "first": self._first, "thread": self.thread}
        self._recorder.append_rows(rows, about)
        self._first += count
        self.generation = self.generation % _GENERATIONS + 1
        # Rows are numbered: should we be killed just now, the reader knows those it has already.
        self._write_head()
        self.at = SEGMENT_HEAD.size

    def close(self) -> None:
        """Compress what is left, and remove the file."""
        self.compress()
        self.forget()
        self._path.unlink(missing_ok=True)

    def forget(self) -> None:
        """Let go of the mapping without touching its rows: after a fork they are the parent's."""
        with suppress(BufferError):
            self.map.close()


class Recorder:
    """Records what this process does. Safe to use from many threads and after a fork."""

    def __init__(
        self,
        folder: str | Path,
        *,
        role: str,
        rank: int = 0,
        file_bytes_max: int = FILE_BYTES_MAX,
    ) -> None:
        self.folder = Path(folder)
        self.role, self.rank = role, rank
        self._file_bytes_max = file_bytes_max
        # Guards the file and the tables below. Rows take it only when a segment is full.
        self._lock = threading.RLock()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            raise OptionError(
                f"a trace cannot be written to {self.folder}: {error.strerror or error}; trace= "
                "names a folder that this process may write to"
            ) from None
        _RECORDERS.add(self)

    def _open(self) -> None:
        self._pid = os.getpid()
        self._names: dict[str, int] = {"": 0}
        self._segments: dict[int, _Segment] = {}
        self._num_segments = 0
        self._local = threading.local()
        self._size_bytes = 0
        self._dropped: dict[int, int] = {}
        # A process id may come back in a long run, on another node at the same time.
        self.path = (
            self.folder / f"{self.rank:05d}-{self.role}-{self._pid}-{os.urandom(4).hex()}.trace"
        )
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        perf_ns, time_ns = clock_pair()
        self._append(
            chunk(
                {
                    "type": "process",
                    "version": VERSION,
                    "pid": self._pid,
                    "parent": os.getppid(),
                    "rank": self.rank,
                    "role": self.role,
                    "host": socket.gethostname(),
                    # One machine, one clock: its boot tells machines and containers apart.
                    "boot": boot_id(),
                    "perf_ns": perf_ns,
                    "time_ns": time_ns,
                }
            )
        )

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
            segment: _Segment = self._local.segment
        except AttributeError:
            segment = self._new_segment()
        if step < 0:
            step, epoch, flags = segment.step, segment.epoch, flags | segment.flags
        at = segment.at
        # One call writes the row, its generation last: whoever reads the file of a killed process
        # sees whole rows only.
        _pack_into(
            segment.map, at, start_ns, end_ns - start_ns, cpu_ns, wait_ns, lock_ns, offset,
            size_bytes, step, count, epoch, object_id, source_id, kind, flags, attempt,
            segment.generation,
        )  # fmt: skip
        segment.at = at = at + _ROW_BYTES
        if at == _END:
            segment.compress()

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
            segment: _Segment = self._local.segment
        except AttributeError:
            segment = self._new_segment()
        at = segment.at
        step, epoch, count, size_bytes, flags = what
        _pack_into(
            segment.map, at, start_ns, end_ns - start_ns, 0, wait_ns, 0, -1, size_bytes, step,
            count, epoch, object_id, 0, _NEXT, flags, 0, segment.generation,
        )  # fmt: skip
        segment.at = at = at + _ROW_BYTES
        if at == _END:
            segment.compress()

    def working_on(self, step: int = -1, epoch: int = -1, flags: int = 0) -> None:
        """Say what the rows of this thread belong to from now on."""
        try:
            segment: _Segment = self._local.segment
        except AttributeError:
            segment = self._new_segment()
        segment.step, segment.epoch, segment.flags = step, epoch, flags

    @property
    def doing(self) -> tuple[int, int, int]:
        """What this thread is working on: step, epoch, flags."""
        segment: _Segment | None = getattr(self._local, "segment", None)
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
        header = {"type": "counters", "at_ns": at_ns, "pid": pid or self._pid}
        self._append(chunk(header, msgspec.msgpack.encode(values)))

    # -- files -------------------------------------------------------------------------------

    def _new_segment(self) -> _Segment:
        with self._lock:
            segment = _Segment(self, self._num_segments)
            self._num_segments += 1
            self._segments[segment.number] = segment
            # At once, like names: the rows of a killed process should have the name of its thread.
            name = threading.current_thread().name
            self._append(chunk({"type": "thread", "thread": segment.thread, "name": name}))
        self._local.segment = segment
        self._local.owner = _Owner(self, segment)
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

    def append_rows(self, rows: Any, about: dict[str, Any]) -> None:
        """Append rows of a thread to the file of the process."""
        with self._lock:
            if self._size_bytes > self._file_bytes_max:
                is_kept = np.isin(rows["kind"], [int(kind) for kind in _ALWAYS_KEPT])
                kinds, counts = np.unique(rows["kind"][~is_kept], return_counts=True)
                for kind, count in zip(kinds.tolist(), counts.tolist(), strict=True):
                    self._dropped[kind] = self._dropped.get(kind, 0) + count
                dropped = {str(kind): count for kind, count in self._dropped.items()}
                self._append(chunk({"type": "dropped", "rows": dropped}))
                rows = rows[is_kept]
            if len(rows):
                self._append(rows_chunk(rows, about))

    def _append(self, data: bytes) -> None:
        with self._lock:
            try:
                os.write(self._file, data)
            except OSError:
                # A full disk must not end the training: the trace is incomplete, and says so
                # because the checksum of the last chunk does not fit.
                return
            self._size_bytes += len(data)

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
            for segment in self._segments.values():
                segment.close()
            self._segments.clear()
            self._local = threading.local()

    def drop_segment(self, segment: _Segment) -> None:
        """Take over the rows of a thread that has ended."""
        with self._lock:
            if self._segments.pop(segment.number, None) is not None:
                segment.close()

    def after_fork(self) -> None:
        """Begin a file of this process's own: the parent goes on with the one that was open."""
        for segment in self._segments.values():
            segment.forget()
        os.close(self._file)
        self._lock = threading.RLock()  # A thread of the parent may have held it.
        self._open()


class _Owner:
    """Lives as long as its thread: threads come and go, and their rows must not pile up."""

    __slots__ = ("_pid", "_recorder", "_segment")

    def __init__(self, recorder: Recorder, segment: _Segment) -> None:
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
            _OF_FOLDER[key] = Recorder(key[0], role=role, rank=rank)
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
