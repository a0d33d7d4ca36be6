"""A lane: operations of one communicator, one after the other, beside the caller.

`start` returns at once with a handle; a thread of the lane's own does the work in the order in
which it was started. A caller that waits for a handle before the thread has begun does the work
itself: a switch of threads costs as much as a small operation, and many callers wait at once.

An operation that fails breaks the lane: ranks that share flags would be out of step after it, so
everything started later fails with the same error.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable

from penstock.step.comms.comm import HostHandle
from penstock.step.comms.recording import begun_ns, record_collective

__all__ = ["ShmLane", "ShmTask"]

TASKS_MAX = 512
"""Under way at once; a caller that starts more does the oldest first."""


class ShmTask(HostHandle):
    """One operation of a lane, and its handle."""

    is_host = True
    """Whether it is done when it has run; else a device has only been asked for it."""

    def __init__(self, lane: ShmLane, work: Callable[[], None]) -> None:
        super().__init__()
        self._lane, self._work = lane, work
        self.begun_ns = begun_ns()

    def wait(self) -> None:
        """Return when it is done, or raise what went wrong; do the work if the lane is free."""
        if not self._is_done:
            self._lane.help_until(self)
        super().wait()

    def run(self, broken: BaseException | None) -> None:
        """Do the work, unless the lane is broken; `error` has what went wrong, if anything did."""
        # The handle may be kept for long; what the work holds on to should not be.
        work, self._work = self._work, nothing
        error = broken
        if error is None:
            try:
                work()
            except BaseException as failure:
                error = failure
        try:
            self.end(error)
        except BaseException as failure:  # of a callback
            self.error = failure


def nothing() -> None:
    """Do nothing, in the place of work that is done."""


class ShmLane:
    """Runs tasks in order.

    Args:
        name: of the thread.
        fail: called once, when an operation has failed.
    """

    def __init__(self, name: str, fail: Callable[[], None]) -> None:
        self._name, self._fail = name, fail
        self._tasks: deque[ShmTask] = deque()
        # Held by the thread that runs tasks, so that they run one at a time and in order. It is
        # reentrant because a callback inside a task may wait for the next one.
        self._turn = threading.RLock()
        # One entry for each task wakes the thread; it finds nothing to do where a waiter was
        # faster. False ends it.
        self._bell: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def start(self, work: Callable[[], None]) -> ShmTask:
        """Add an operation; return its handle."""
        task = ShmTask(self, work)
        self.add(task)
        return task

    def add(self, task: ShmTask) -> None:
        """Add an operation that has its handle already."""
        while len(self._tasks) >= TASKS_MAX:
            with self._turn:
                self._run_one()
        self._tasks.append(task)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self._bell.put(True)

    def help_until(self, task: ShmTask) -> None:
        """Run what was started up to a task, unless another thread is running tasks."""
        # Not blocking: the thread that has the turn will come to this task anyway.
        if not self._turn.acquire(blocking=False):
            return
        try:
            while not task.is_done():
                assert self._tasks, "an operation waits for itself"
                self._run_one()
        finally:
            self._turn.release()

    def close(self) -> None:
        """Finish all that was started and end the thread."""
        if self._thread is not None:
            self._bell.put(False)
            self._thread.join()
            self._thread = None

    def _serve(self) -> None:
        while self._bell.get():
            with self._turn:
                self._run_one()

    def _run_one(self) -> None:
        if self._tasks:
            task = self._tasks.popleft()
            task.run(self.error)
            if task.is_host:
                record_collective(self._name, task.begun_ns)
            if task.error is not None and self.error is None:
                self.error = task.error
                # Peers that wait for this rank are told at once, not after their timeout.
                self._fail()
