"""The worker processes, as the engine sees them.

Each worker has at most two requests: one that it works on and one that waits in its socket, so that
it never waits for the engine. When a worker dies, the log says how, and other workers get its
requests, a bounded number of times.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable

from penstock.engine.channel import ChannelClosed, FrameChannel, channel_pair
from penstock.engine.shared import Inbox, Outbox, SharedSegments
from penstock.engine.work import CopyRequest, WorkReply, WorkRequest
from penstock.errors import WorkerError

DEPTH = 2
"""Requests that a worker has at once."""
_TRIES_MAX = 3
"""Workers that get the same request, each after the one before has died."""
_TRANSFORM_HINT = 'workers="here" runs the transform in this process, where a debugger sees it'
_DEATHS_MAX = 64
"""Deaths of workers in the life of an engine; after one more, the next is an error."""
_STATUS_S = 2.0
"""How long the spawner may take to say how a worker ended."""

_log = logging.getLogger("penstock.loader")

AnyRequest = WorkRequest | CopyRequest
MakeRequest = Callable[["WorkerHandle"], tuple[AnyRequest, list[int]]]
"""Makes the request for one worker, with the files of those segments that it has not mapped yet."""


class SpawnerClient:
    """Asks the spawner for workers, and hears how they ended."""

    def __init__(self, channel: FrameChannel) -> None:
        self._channel = channel
        self._pids: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._ended = threading.Condition()  # Guards `_ends`; `status` waits for an entry.
        threading.Thread(target=self._listen, name="penstock-spawner", daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                frame, _ = self._channel.receive()
            except ChannelClosed:
                os._exit(1)  # The spawner is gone; nobody else would end this process.
            number, pid, code = pickle.loads(frame)
            self._pids[number] = pid
            if code is not None:
                with self._ended:
                    self._ends[number] = code
                    self._ended.notify_all()

    def start(self, number: int, end: int) -> None:
        """Start a worker that speaks through a descriptor."""
        self._channel.send(str(number).encode(), [end])

    def pid(self, number: int) -> int | None:
        """Return the process of a worker, once it is known."""
        return self._pids.get(number)

    def status(self, number: int, wait_s: float) -> int | None:
        """Return the exit code of a worker, negative for a signal; None if it is not known yet."""
        with self._ended:
            self._ended.wait_for(lambda: number in self._ends, wait_s)
            return self._ends.get(number)


class WorkerHandle:
    """One worker process: its channel, its requests and the memory that it shares."""

    def __init__(self, number: int, channel: FrameChannel, segments: SharedSegments) -> None:
        self.number = number
        self.num_asked = 0
        """Requests that it has and has not answered."""
        self.is_dead = False
        self.inbox = Inbox(segments, passes_on=True)
        self.outbox = Outbox(segments)
        self._channel = channel
        self._released: deque[tuple[int, int]] = deque()
        # Held from the making of a request until its ticket is drawn: the worker answers in the
        # order of requests, and a request may name segments that only the one before brings.
        self._sending = threading.Lock()
        # Guards `_num_answered`, the ticket whose reply comes next: the thread that has drawn it
        # reads the channel, all others wait.
        self._turn = threading.Condition()
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
        """Return a function that releases a reference of a parcel with the next request."""
        # No lock, because the garbage collector may call it anywhere: a deque appends atomically.
        released = self._released
        return lambda index: released.append((number, index))

    def close(self) -> None:
        """Close its channel; the worker then ends."""
        self._channel.close()


class Workers:
    """All worker processes of a loader."""

    def __init__(self, spawner: SpawnerClient, segments: SharedSegments, num_workers: int) -> None:
        self._spawner = spawner
        self._segments = segments
        # Guards everything below; notified when a worker has room for a request or the number of
        # workers changes.
        self._changed = threading.Condition()
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
        """The number of workers that there should be."""
        return self._num_wanted

    @property
    def num_alive(self) -> int:
        """The number of workers that there are; each is started when there is work for it."""
        return len(self._handles)

    def resize(self, num_workers: int) -> None:
        """Change the number of workers; surplus ones end as soon as they have no request."""
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
        """Have some worker do a request; if it dies, another one."""
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
        """Remove a dead worker; return a sentence that says how it ended."""
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
