"""The thread that completes what a lane has begun.

An operation is a generator. What it does before its first `yield` happens on the caller's thread,
so that the network has work before the call returns; each `yield` hands over something to wait for,
and what follows runs on the lane's own thread. Operations complete in the order in which they were
asked, and waiting for one never holds up the beginning of the next.

The first error is the lane's end: the operation that met it, all that are under way and all that
are asked later raise it. Nobody waits for a dead peer twice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Protocol

from penstock.step.comms.recording import begun_ns, record_collective

__all__ = ["OPERATIONS_MAX", "Completion", "Operation", "Pending"]

OPERATIONS_MAX = 512
"""Under way at once; whoever asks for more waits for the oldest."""


class Pending(Protocol):
    """Something that takes time."""

    def wait(self) -> None:
        """Return when it is over, or raise."""


class Operation:
    """A handle: one operation of a lane."""

    def __init__(self, name: str, steps: Iterator[Pending], lane: Completion) -> None:
        self.name = name
        self.begun_ns = begun_ns()
        self._steps = steps
        self._lane = lane
        self._first: Pending | None = None
        self._is_done = False
        self._lock = threading.Lock()
        self._works: list[Callable[[], None]] = []
        self._error: BaseException | None = None
        # Held until the end: much lighter than an event, and there are thousands a second.
        self._gate = threading.Lock()
        self._gate.acquire()

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
        """Let those who wait go on; what was to follow runs here, unless it failed."""
        with self._lock:
            self._error, self._is_done = error, True
            works, self._works = self._works, []
        # A generator keeps tensors and buffers; a failed one would keep them with its handle.
        self._steps = iter(())
        self._gate.release()
        if error is None:
            for work in works:
                work()

    def wait(self) -> None:
        """Return when it is done, or raise what went wrong."""
        assert self._is_done or not self._lane.is_here, (
            f"{self.name}: waited for by the thread that completes it"
        )
        with self._gate:
            error = self._error or self._lane.error
        if error is not None:
            raise error

    def is_done(self) -> bool:
        """Whether it is over, well or not."""
        return self._is_done

    def then(self, work: Callable[[], None]) -> None:
        """Have something called by the lane's thread, or now; not at all if it failed."""
        with self._lock:
            if not self._is_done:
                self._works.append(work)
                return
        if self._error is None:
            work()


class Completion:
    """One lane's thread and the operations it has yet to complete, oldest first."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._queue: SimpleQueue[Operation | None] = SimpleQueue()
        self._room = threading.Semaphore(OPERATIONS_MAX)
        self._last: Operation | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    @property
    def is_here(self) -> bool:
        """Whether the lane's thread is the one that asks."""
        return threading.current_thread() is self._thread

    def start(self, name: str, steps: Iterator[Pending]) -> Operation:
        """Begin an operation on this thread and leave its completion to the lane's."""
        assert not self._is_closed, f"{self.name} is closed"
        if self.error is not None:
            raise self.error
        operation = Operation(name, steps, self)
        # Work that was chained may ask for more: it cannot wait for itself.
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
        """Return when all that was asked so far is done, or raise what went wrong."""
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
        except BaseException as error:  # of the work that was to follow
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self.error = self.error or error
