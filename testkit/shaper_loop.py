"""One thread that waits for sockets and for timers, to a fraction of a millisecond.

Each socket is registered once, edge-triggered, for reading and writing: a handler that could not go
on is called when that changes. So a request costs no system calls but its own.
"""

from __future__ import annotations

import heapq
import itertools
import select
import socket
import time
from collections.abc import Callable

_EVENTS_MAX = 256
"""The most events of one turn, so that timers never wait for long."""
_ALL = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET

CAN_READ = select.EPOLLIN
CAN_WRITE = select.EPOLLOUT
HAS_ENDED = select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP


class Timer:
    """A call at a time, which can be cancelled."""

    __slots__ = ("action",)

    def __init__(self, action: Callable[[], None]) -> None:
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        """Do nothing then."""
        self.action = None


class Loop:
    """Runs actions of sockets and timers until it is stopped."""

    def __init__(self) -> None:
        self._epoll = select.epoll()  # made first: `select` takes low descriptors only
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._closing: list[socket.socket] = []
        self._is_running = False

    def now_s(self) -> float:
        """Return monotonic seconds."""
        return time.monotonic()

    def watch(self, of: socket.socket, handler: Callable[[int], None]) -> None:
        """Call a handler with a mask whenever something changes with a socket."""
        self._handlers[of.fileno()] = handler
        self._epoll.register(of.fileno(), _ALL)

    def watch_level(self, descriptor: int, handler: Callable[[int], None]) -> None:
        """Call a handler as long as there is something to read."""
        self._handlers[descriptor] = handler
        self._epoll.register(descriptor, select.EPOLLIN)

    def close(self, what: socket.socket) -> None:
        """Close a socket; events that are still queued for its number reach no other socket."""
        if self._handlers.pop(what.fileno(), None) is not None:
            self._epoll.unregister(what.fileno())
            self._closing.append(what)

    def at(self, at_s: float, action: Callable[[], None]) -> Timer:
        """Call a function at a time; a past time means soon."""
        timer = Timer(action)
        heapq.heappush(self._timers, (at_s, next(self._numbers), timer))
        return timer

    def stop(self) -> None:
        """End `run`."""
        self._is_running = False

    def run(self) -> None:
        """Go on until `stop`."""
        self._is_running = True
        while self._is_running:
            self._wait()
            for descriptor, mask in self._epoll.poll(0, _EVENTS_MAX):
                handler = self._handlers.get(descriptor)
                if handler is not None:
                    handler(mask)
            for timer in self._due():
                if timer.action is not None:
                    timer.action()
            for each in self._closing:
                each.close()
            self._closing.clear()

    def _wait(self) -> None:
        """Wait for an event or a timer; epoll's own timeout would round up to milliseconds."""
        while self._timers and self._timers[0][2].action is None:
            heapq.heappop(self._timers)
        if not self._timers:
            select.select([self._epoll], (), ())
            return
        wait_s = self._timers[0][0] - time.monotonic()
        if wait_s > 0:
            select.select([self._epoll], (), (), wait_s)

    def _due(self) -> list[Timer]:
        """Run the timers that are due; timers added meanwhile wait for a turn of the sockets."""
        now_s = time.monotonic()
        due = []
        while self._timers and self._timers[0][0] <= now_s:
            due.append(heapq.heappop(self._timers)[2])
        return due
