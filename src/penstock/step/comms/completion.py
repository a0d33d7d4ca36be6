"""The thread that completes what a lane has begun.

An operation is a generator. What it does before its first `yield` happens on the caller's thread,
so that the network has work before the call returns; each `yield` hands over something to wait for,
and the rest runs on the lane's own thread. Operations complete in the order in which they were
started, and waiting for one never delays the beginning of the next.

The first error ends the lane: the operation that met it, all that are under way and all that are
started later raise it. Nobody waits for a dead peer twice.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Protocol

from penstock.step.comms.comm import HostHandle
from penstock.step.comms.recording import begun_ns, record_collective

__all__ = ["OPERATIONS_MAX", "Completion", "Operation", "Pending"]

OPERATIONS_MAX = 512
"""Under way at once; a caller that starts more waits for the oldest."""


class Pending(Protocol):
    """Something that takes time."""

    def wait(self) -> None:
        """Return when it is over, or raise."""


class Operation(HostHandle):
    """One operation of a lane, and its handle."""

    def __init__(self, name: str, steps: Iterator[Pending], lane: Completion) -> None:
        super().__init__()
        self.name = name
        self.begun_ns = begun_ns()
        self._steps = steps
        self._lane = lane
        self._first: Pending | None = None

    def begin(self) -> None:
        """Go to the first thing there is to wait for."""
        self._first = next(self._steps, None)

    def complete(self) -> None:
        """Go through to the end, on the lane's thread."""
        pending, self._first = self._first, None
        while pending is not None:
            pending.wait()
            pending = next(self._steps, None)

    def end(self, error: BaseException | None = None) -> None:
        """Wake those who wait, then call what was to follow, unless the operation failed."""
        # A generator keeps tensors and buffers; a failed one would keep them with its handle.
        self._steps = iter(())
        super().end(error)

    def wait(self) -> None:
        """Return when it is done, or raise what went wrong, also with what followed it."""
        assert self._is_done or not self._lane.is_here, (
            f"{self.name}: waited for by the thread that completes it"
        )
        super().wait()
        if self._lane.error is not None:
            raise self._lane.error


class Completion:
    """One lane's thread and the operations it has yet to complete, oldest first."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.error: BaseException | None = None
        """The first error, of an operation or of a callback."""
        self._thread: threading.Thread | None = None
        self._queue: SimpleQueue[Operation | None] = SimpleQueue()
        self._room = threading.Semaphore(OPERATIONS_MAX)
        self._last: Operation | None = None
        self._is_closed = False
        # Callers of several threads start operations: one of them makes the thread, `_last` is what
        # is last in the queue, and the first error stays.
        self._lock = threading.Lock()

    @property
    def is_here(self) -> bool:
        """Whether the caller is on the lane's thread."""
        return threading.current_thread() is self._thread

    def start(self, name: str, steps: Iterator[Pending]) -> Operation:
        """Begin an operation on this thread and leave its completion to the lane's."""
        assert not self._is_closed, f"{self.name} is closed"
        if self.error is not None:
            raise self.error
        operation = Operation(name, steps, self)
        # A callback on the lane's thread may start more: that thread is the one that makes room, so
        # it must not wait for room.
        self._room.acquire(blocking=not self.is_here)
        try:
            operation.begin()
        except Exception as error:
            self._fail(error)
            raise
        with self._lock:
            if self.error is not None:
                raise self.error
            self._last = operation
            self._queue.put(operation)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                self._thread.start()
        return operation

    def drain(self) -> None:
        """Return when everything started so far is done, or raise what went wrong."""
        if self._last is not None:
            self._last.wait()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Complete what is under way and end the thread."""
        with self._lock:
            self._is_closed = True
            self._queue.put(None)
        if self._thread is not None and not self.is_here:
            self._thread.join()

    def _run(self) -> None:
        while (operation := self._queue.get()) is not None:
            if self.error is not None:
                operation.end(self.error)
                self._room.release()
                continue
            try:
                operation.complete()
            except BaseException as error:
                self._fail(error)
                operation.end(error)
            else:
                record_collective(operation.name, operation.begun_ns)
                self._end(operation)
            self._room.release()

    def _end(self, operation: Operation) -> None:
        try:
            operation.end()
        except BaseException as error:  # of a callback
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self.error = self.error or error
