"""The worker processes, as the engine sees them.

Each worker has two requests at most: one that it works on and one that waits in its socket, so that
it never waits for the engine. A worker that dies is named, and its requests are given to others, a
bounded number of times.
"""

from __future__ import annotations

import logging
import pickle
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from penstock.engine.channel import ChannelClosed, FrameChannel, channel_pair
from penstock.engine.shared import Inbox, Outbox, SharedSegments
from penstock.engine.work import CopyRequest, WorkReply, WorkRequest
from penstock.errors import WorkerError

DEPTH = 2
"""Requests that a worker has at once."""
_TRIES_MAX = 3
"""Workers that may die of the same samples."""
_TRANSFORM_HINT = 'workers="here" runs the transform in this process, where a debugger sees it'
_DEATHS_MAX = 64
"""Workers that may die in all, before it is an error."""
_STATUS_S = 2.0
"""How long the spawner may take to say how a worker ended."""

_log = logging.getLogger("penstock.loader")


AnyRequest = WorkRequest | CopyRequest
MakeRequest = Callable[["WorkerHandle"], tuple[AnyRequest, list[int]]]
"""Makes a request for the worker that gets it, with the files of segments that it lacks."""


class Spawner(Protocol):
    """Whoever can start worker processes."""

    def start(self, number: int, end: int) -> None:
        """Start a worker that speaks through a descriptor."""
        ...

    def status(self, number: int, wait_s: float) -> int | None:
        """Return how a worker has ended, as `os.waitpid` says it; None if nobody knows."""
        ...

    def pid(self, number: int) -> int | None:
        """Return the process of a worker, once it is known."""
        ...


class WorkerHandle:
    """One worker process and what the engine knows of it."""

    def __init__(self, number: int, channel: FrameChannel, segments: SharedSegments) -> None:
        self.number = number
        self.num_asked = 0
        """Requests that it has now."""
        self.is_dead = False
        self.inbox = Inbox(segments, passes_on=True)
        self.outbox = Outbox(segments)
        self._channel = channel
        self._released: deque[tuple[int, int]] = deque()
        self._sending = threading.Lock()  # Tickets are drawn in the order of requests.
        self._turn = threading.Condition()  # Guards whose reply comes next.
        self._num_sent = self._num_answered = 0

    def ask(self, make: MakeRequest) -> WorkReply:
        """Send a request and return its reply; replies come in the order of requests."""
        with self._sending:
            request, files = make(self)
            released = [self._released.popleft() for _ in range(len(self._released))]
            self._channel.send(pickle.dumps(request._replace(released=released), 5), files)
            ticket, self._num_sent = self._num_sent, self._num_sent + 1
        with self._turn:
            self._turn.wait_for(lambda: self._num_answered == ticket)
        try:
            frame, files = self._channel.receive()
            reply: WorkReply = pickle.loads(frame)
            self.inbox.add(reply.fresh, files)
            self.inbox.forget(reply.gone)
            return reply
        finally:
            with self._turn:
                self._num_answered += 1
                self._turn.notify_all()

    def releaser(self, number: int) -> Callable[[int], None]:
        """Return what is called when a reference of a parcel is not looked at any more."""
        # The garbage collector may call it, so no lock: a deque appends atomically.
        released = self._released
        return lambda index: released.append((number, index))

    def close(self) -> None:
        """End it."""
        self._channel.close()


class Workers:
    """All worker processes of a loader."""

    def __init__(self, spawner: Spawner, segments: SharedSegments, num_workers: int) -> None:
        self._spawner = spawner
        self._segments = segments
        self._changed = threading.Condition()  # Guards everything below.
        self._handles: list[WorkerHandle] = []
        self._num_wanted = num_workers
        self._num_started = 0
        self._num_deaths = 0
        self._is_closed = False
        self.busy_s = 0.0
        """Time that workers have spent on requests, all together."""
        self.events: list[str] = []
        """What happened to workers, in sentences."""

    @property
    def num_workers(self) -> int:
        """How many there should be."""
        return self._num_wanted

    @property
    def num_alive(self) -> int:
        """How many there are; they are started when there is work for them."""
        return len(self._handles)

    def resize(self, num_workers: int) -> None:
        """Have more workers, or fewer; those that are too many end when they have nothing to do."""
        with self._changed:
            self._num_wanted = num_workers
            self._retire()
            self._changed.notify_all()

    def _retire(self) -> None:
        idle = [h for h in self._handles if h.num_asked == 0]
        for handle in idle[: max(0, len(self._handles) - self._num_wanted)]:
            self._handles.remove(handle)
            handle.close()

    def ask(
        self, make: MakeRequest, what: str, hint: str = _TRANSFORM_HINT
    ) -> tuple[WorkerHandle, WorkReply]:
        """Have samples made by some worker; by another one, should it die of something."""
        for attempt in range(_TRIES_MAX):
            handle = self._acquired()
            try:
                reply = handle.ask(make)
                self.busy_s += reply.decode_s
                return handle, reply
            except ChannelClosed:
                story = self._buried(handle)
                if self._is_closed:
                    raise
                if attempt + 1 == _TRIES_MAX or self._num_deaths > _DEATHS_MAX:
                    raise WorkerError(
                        f"{story} while it made {what}, and so did the {attempt} that tried before "
                        f"it; {hint}"
                    ) from None
            finally:
                self._give_back(handle)
        raise AssertionError("not reached")

    def _acquired(self) -> WorkerHandle:
        with self._changed:
            while True:
                if self._is_closed:
                    raise ChannelClosed("the loader is closed")
                free = [h for h in self._handles if h.num_asked < DEPTH]
                idle = [h for h in free if h.num_asked == 0]
                if not idle and len(self._handles) < self._num_wanted:
                    idle = [self._started()]
                if idle or free:
                    handle = min(idle or free, key=lambda h: h.num_asked)
                    handle.num_asked += 1
                    return handle
                self._changed.wait()

    def _started(self) -> WorkerHandle:
        channel, theirs = channel_pair()
        number = self._num_started
        self._num_started += 1
        with theirs:
            self._spawner.start(number, theirs.fileno())
        handle = WorkerHandle(number, channel, self._segments)
        self._handles.append(handle)
        return handle

    def _give_back(self, handle: WorkerHandle) -> None:
        with self._changed:
            handle.num_asked -= 1
            self._retire()
            self._changed.notify_all()

    def _buried(self, handle: WorkerHandle) -> str:
        """Take a dead worker out; return what became of it."""
        with self._changed:
            if handle in self._handles:
                self._handles.remove(handle)
            is_new, handle.is_dead = not handle.is_dead, True
        status = self._spawner.status(handle.number, _STATUS_S)
        story = f"worker process {self._spawner.pid(handle.number)} {_end_of(status)}"
        if is_new and not self._is_closed:
            handle.close()
            self._num_deaths += 1
            self.events.append(f"{story}; its samples were made by another")
            _log.warning("%s; its samples are made by another", story)
        return story

    def pids(self) -> list[int]:
        """Return the processes of all workers."""
        with self._changed:
            found = [self._spawner.pid(h.number) for h in self._handles]
        return [pid for pid in found if pid is not None]

    def close(self) -> None:
        """End all workers."""
        with self._changed:
            self._is_closed = True
            handles, self._handles = self._handles, []
            self._changed.notify_all()
        for handle in handles:
            handle.close()


def _end_of(status: int | None) -> str:
    if status is None:
        return "died"
    if status < 0:
        name = signal.Signals(-status).name
        hint = ", perhaps for lack of memory" if name == "SIGKILL" else ""
        return f"was ended by {name}{hint}"
    return f"ended with exit status {status}"


def wait_for(condition: Callable[[], Any], wait_s: float, every_s: float = 0.005) -> Any:
    """Return what a condition returns once that is true, or after a while."""
    end_s = time.monotonic() + wait_s
    while not (found := condition()) and time.monotonic() < end_s:
        time.sleep(every_s)
    return found
