"""One iteration of a plan: tasks begun as soon as they may, on the lanes where they belong.

Computation runs on the thread that called the step. Communication is only begun, by the thread
that has just made it possible, in the order of its lane; the lane's own thread completes it and
calls back. Loads are only begun as well: their stages have threads of their own (`loads`). Output
runs on a thread of its own. An error on any of them ends the iteration and is raised to the caller.

On a device, a task that is over has only been launched; `streams` keeps the order there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from heapq import heappop, heappush

from penstock.step.comms.comm import Handle
from penstock.step.program.plan import COMPUTE, IO, Plan, Task
from penstock.step.streams import StreamOrder

__all__ = ["Begun", "PreparedTasks", "PlanIteration", "TaskTime"]

_LOOK_S = 0.2
"""How often to check whether something under way has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """Communication under way, and what is left to do when it has arrived."""

    handle: Handle
    finish: Callable[[], None]
    is_host: bool = False
    """Whether it arrives on a thread of the host that is not on the lane's stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTime:
    """When a task ran, in seconds since the iteration began; below 0 if it was before."""

    task: str
    lane: str
    start_s: float
    stop_s: float
    ahead: int = 0
    """How many iterations later its result is used: a batch is loaded ahead."""


@dataclass(kw_only=True)
class PreparedTasks:
    """What tasks do: prepared once, used by each iteration."""

    run: dict[str, Callable[[], None]]
    """Tasks that are done when they return, by name: computation and output."""
    begin: dict[str, Callable[[], Begun]]
    """Tasks that are only begun, by name: communication and input."""


class PlanIteration:
    """The tasks of a plan, once through."""

    def __init__(
        self,
        plan: Plan,
        prepared_tasks: PreparedTasks,
        io: ThreadPoolExecutor,
        *,
        keeps_times: bool,
        order: StreamOrder | None = None,
    ) -> None:
        self._plan = plan
        self._prepared_tasks = prepared_tasks
        self._io = io
        self._order = order
        self._waiting = {task.name: len(task.after) for task in plan.tasks}
        self._places = {task.name: number for number, task in enumerate(plan.tasks)}
        self._ready: list[tuple[int, int, Task]] = []
        self._lanes = {
            lane: _AgreedLane(list(plan.on(lane)))
            for lane in plan.lanes
            if lane not in (COMPUTE, IO)
        }
        # Guards `_ready`, `_waiting`, `_left`, `_error` and `_flying`. Notified when the caller's
        # thread has something to do: a task to compute, an error to raise, or nothing left.
        self._changed = threading.Condition()
        self._left = len(plan.tasks)
        self._error: BaseException | None = None
        self._flying: dict[str, Handle] = {}
        self._followers = _followers(plan)
        self.began_s = time.perf_counter()
        self._keeps_times = keeps_times
        self.times: list[TaskTime] = []

    def run(self) -> None:
        """Do everything, or raise the first error; nothing new is begun after one."""
        try:
            self._run()
        except BaseException as error:
            self._fail(error)
            raise

    def _run(self) -> None:
        for task in self._plan.tasks:
            if not task.after:
                self._note_ready(task)
        self._issue_all()
        while (next_one := self._next()) is not None:
            start_s = time.perf_counter()
            with self._on(next_one):
                self._prepared_tasks.run[next_one.name]()
                self._note_over(next_one, start_s)
        if self._order is not None:
            self._order.end()

    def _on(self, task: Task) -> AbstractContextManager[object]:
        """Return the stream of a task, to be entered; on the host there is none."""
        return nullcontext() if self._order is None else self._order.on(task)

    def _next(self) -> Task | None:
        """Return the next task to compute, or None when everything is over."""
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                if self._ready:
                    return heappop(self._ready)[2]
                if not self._left:
                    return None
                # With a timeout: communication that fails calls nobody back.
                if not self._changed.wait(_LOOK_S):
                    self._look()

    def _look(self) -> None:
        """Raise what has gone wrong with communication."""
        for handle in list(self._flying.values()):
            if handle.is_done():
                handle.wait()

    def _note_ready(self, task: Task) -> None:
        """Note that a task waits for nothing but its lane."""
        if task.lane == COMPUTE:
            with self._changed:
                heappush(self._ready, (task.priority, self._places[task.name], task))
                self._changed.notify_all()
        elif task.lane == IO:
            self._io.submit(self._do_io, task)
        else:
            self._lanes[task.lane].ready.add(task.name)

    def _note_over(self, task: Task, start_s: float) -> None:
        """Note that a task is over, and begin what waited for it."""
        if self._order is not None:
            self._order.over(task)
        if self._keeps_times:
            now_s = time.perf_counter()
            began_s = self.began_s
            spent = TaskTime(
                task=task.name, lane=task.lane, start_s=start_s - began_s, stop_s=now_s - began_s
            )
            self.times.append(spent)
        with self._changed:
            self._flying.pop(task.name, None)
            self._left -= 1
            freed = []
            for follower in self._followers[task.name]:
                self._waiting[follower.name] -= 1
                if not self._waiting[follower.name]:
                    freed.append(follower)
            self._changed.notify_all()
        for follower in freed:
            self._note_ready(follower)
        self._issue_all()

    # -- communication -------------------------------------------------------------------------

    def _issue_all(self) -> None:
        """Begin what is next on each lane, as far as it is ready, on whatever thread this is."""
        for lane in self._lanes.values():
            while self._error is None and (task := lane.take()) is not None:
                try:
                    self._issue(task)
                finally:
                    lane.release()

    def _issue(self, task: Task) -> None:
        start_s = time.perf_counter()
        with self._on(task):
            try:
                begun = self._prepared_tasks.begin[task.name]()
            except BaseException as error:
                self._fail(error)
                raise
            with self._changed:
                self._flying[task.name] = begun.handle
            begun.handle.then(lambda: self._arrived(task, begun, start_s))

    def _arrived(self, task: Task, begun: Begun, start_s: float) -> None:
        try:
            with self._on(task) if begun.is_host else nullcontext():
                begun.finish()
                self._note_over(task, start_s)
        except BaseException as error:
            self._fail(error)

    def _do_io(self, task: Task) -> None:
        start_s = time.perf_counter()
        try:
            with self._on(task):
                self._prepared_tasks.run[task.name]()
                self._note_over(task, start_s)
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()


@dataclass
class _AgreedLane:
    """Communication in the order that all ranks have agreed on."""

    tasks: list[Task]
    ready: set[str] = field(default_factory=set)
    at: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self) -> Task | None:
        """Return the next task, if it is ready and no other thread is at it; `release` follows.

        The lock is held from here until the task is begun, so that tasks of a lane are begun in
        order, whichever threads make them ready.
        """
        while self._is_next_ready():
            # Not blocking: the thread that has the lock looks again after it has released it, and
            # a thread that waited here could be the one that this lane needs to go on.
            if not self.lock.acquire(blocking=False):
                return None
            if self._is_next_ready():  # another thread may have taken it before we had the lock
                self.at += 1
                return self.tasks[self.at - 1]
            self.lock.release()
        return None

    def _is_next_ready(self) -> bool:
        return self.at < len(self.tasks) and self.tasks[self.at].name in self.ready

    def release(self) -> None:
        """Let others take the next one."""
        self.lock.release()


def _followers(plan: Plan) -> dict[str, list[Task]]:
    out: dict[str, list[Task]] = {task.name: [] for task in plan.tasks}
    for task in plan.tasks:
        for name in task.after:
            out[name].append(task)
    return out
