"""A lane: operations of one communicator, one after the other, beside the caller.

`start` returns at once with a handle; a thread of the lane's own does the work in the order in
which it was started. Who waits for a handle before the thread has begun does the work himself: a
change of threads costs as much as a small operation, and many callers wait at once.

An operation that fails breaks the lane: ranks that share flags would be out of step after it, so
all that was started later fails by the same error.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable

from penstock.step.comms.recording import begun_ns, record_collective

__all__ = ["ShmLane", "ShmTask"]

TASKS_MAX = 512
"""Under way at once; who starts more does the oldest first."""


class ShmTask:
    """An operation under way: a `Handle`."""

    is_host = True
    """Whether it is done when it has run; else a device has only been asked for it."""

    def __init__(self, lane: ShmLane, work: Callable[[], None]) -> None:
        self._lane, self._work = lane, work
        self.begun_ns = begun_ns()
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._after: list[Callable[[], None]] = []
        self.error: BaseException | None = None

    def wait(self) -> None:
        """Wait until it is done. Raises what went wrong."""
        if not self._done.is_set() and not self._lane.help_until(self):
            self._done.wait()
        if self.error is not None:
            raise self.error

    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done.is_set()

    def then(self, work: Callable[[], None]) -> None:
        """Call something once it is done well: at once if it is, else by who completes it."""
        with self._lock:
            if not self._done.is_set():
                self._after.append(work)
                return
        if self.error is None:
            work()

    def run(self, broken: BaseException | None) -> BaseException | None:
        """Do the work, unless the lane is broken; return the error if there was one."""
        try:
            # The handle may be kept for long; what the work holds on to should not be.
            work, self._work = self._work, _nothing
            if broken is not None:
                raise broken
            work()
        except BaseException as error:
            self.error = error
        with self._lock:
            self._done.set()
            after = self._after if self.error is None else []
        for follow in after:
            try:
                follow()
            except BaseException as error:
                self.error = self.error or error
        return self.error


def _nothing() -> None:
    pass


class ShmLane:
    """Runs tasks in order.

    Args:
        name: of the thread.
        fail: called once, when an operation has failed.
    """

    def __init__(self, name: str, fail: Callable[[], None]) -> None:
        self._name, self._fail = name, fail
        self._tasks: deque[ShmTask] = deque()
        # Who is called back inside an operation may wait for the next one.
        self._turn = threading.RLock()
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
        self._make_room()
        self._tasks.append(task)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self._bell.put(True)

    def help_until(self, task: ShmTask) -> bool:
        """Run what was started up to a task; False if the thread is at it already."""
        if not self._turn.acquire(blocking=False):
            return False
        try:
            while not task.is_done():
                assert self._tasks, "an operation waits for itself"
                self._run_one()
        finally:
            self._turn.release()
        return True

    def close(self) -> None:
        """Finish all that was started and end the thread."""
        if self._thread is not None:
            self._bell.put(False)
            self._thread.join()
            self._thread = None

    def _make_room(self) -> None:
        while len(self._tasks) >= TASKS_MAX:
            with self._turn:
                self._run_one()

    def _serve(self) -> None:
        while self._bell.get():
            with self._turn:
                self._run_one()

    def _run_one(self) -> None:
        if self._tasks:
            task = self._tasks.popleft()
            error = task.run(self.error)
            if task.is_host:
                record_collective(self._name, task.begun_ns)
            if error is not None and self.error is None:
                self.error = error
                self._fail()
