"""Virtual time: events in their order, and the devices that take their time in it.

A device is asked with a callback, and calls it when it is done. Three kinds of queue are enough:

* `VirtualServers`: so many at once, first come first served, each for its own time (cores, a lock);
* `SharedPipe`: all at once, sharing a bandwidth fairly, no one faster than its own limit (a link);
* waiting, which is only an event later on (a latency, a pause).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from itertools import count

Call = Callable[[], None]


class VirtualTime:
    """What happens next."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Call]] = []
        self._numbers = count()

    def at(self, at_s: float, call: Call) -> None:
        """Have something called at a time; equal times in the order of asking."""
        heapq.heappush(self._events, (max(at_s, self.now_s), next(self._numbers), call))

    def after(self, seconds: float, call: Call) -> None:
        """Have something called later."""
        self.at(self.now_s + seconds, call)

    def run(self, is_done: Callable[[], bool]) -> None:
        """Let time pass until it is done, or until nothing more will happen."""
        events = self._events
        while events and not is_done():
            self.now_s, _, call = heapq.heappop(events)
            call()


class VirtualServers:
    """Servers with one queue.

    >>> time, done = VirtualTime(), []
    >>> servers = VirtualServers(time, 2)
    >>> for name in "abc":
    ...     servers.ask(1.0, lambda name=name: done.append((name, time.now_s)))
    >>> time.run(lambda: False)
    >>> done
    [('a', 1.0), ('b', 1.0), ('c', 2.0)]
    """

    def __init__(self, time: VirtualTime, num_servers: int) -> None:
        self._time = time
        self._num_free = num_servers
        self._queue: deque[tuple[float, Call]] = deque()
        self.busy_s = 0.0
        """Seconds of work taken on so far."""

    def ask(self, seconds: float, call: Call) -> None:
        """Have a server busy for so long, and be called after that."""
        self.busy_s += seconds
        if self._num_free:
            self._num_free -= 1
            self._time.after(seconds, lambda: self._done(call))
        else:
            self._queue.append((seconds, call))

    def _done(self, call: Call) -> None:
        if self._queue:
            seconds, following = self._queue.popleft()
            self._time.after(seconds, lambda: self._done(following))
        else:
            self._num_free += 1
        call()


class SharedPipe:
    """A bandwidth shared fairly by all transfers under way.

    All move at the same rate, so it is enough to count how far a transfer that never ends would
    have come: one of s bytes ends when that has grown by s since it began.

    >>> time, done = VirtualTime(), []
    >>> pipe = SharedPipe(time, 100.0)
    >>> pipe.send(100, lambda: done.append(time.now_s))
    >>> time.after(0.5, lambda: pipe.send(25, lambda: done.append(time.now_s)))
    >>> time.run(lambda: False)
    >>> done
    [1.0, 1.25]
    """

    def __init__(
        self, time: VirtualTime, bytes_s: float, *, each_bytes_s: float = math.inf
    ) -> None:
        self._time = time
        self._bytes_s, self._each_bytes_s = bytes_s, each_bytes_s
        self._factor = 1.0
        self._moved = 0.0
        self._looked_s = 0.0
        self._ends: list[tuple[float, int, Call]] = []
        self._numbers = count()
        self._turn = 0
        self.sent_bytes = 0.0

    def send(self, size_bytes: float, call: Call) -> None:
        """Begin a transfer; be called when it is through."""
        self._look()
        self.sent_bytes += size_bytes
        heapq.heappush(self._ends, (self._moved + size_bytes, next(self._numbers), call))
        self._plan()

    def slow_down(self, factor: float) -> None:
        """Be so many times slower than at first, from now on."""
        self._look()
        self._factor = factor
        self._plan()

    def _rate(self) -> float:
        share = self._bytes_s / len(self._ends)
        return min(share, self._each_bytes_s) / self._factor

    def _look(self) -> None:
        """Count what has moved since the last look."""
        now = self._time.now_s
        if self._ends:
            self._moved += (now - self._looked_s) * self._rate()
        self._looked_s = now

    def _plan(self) -> None:
        """Have a look when the next transfer ends; older plans are void."""
        self._turn += 1
        if self._ends:
            turn = self._turn
            left = max(0.0, self._ends[0][0] - self._moved)
            self._time.after(left / self._rate(), lambda: self._end(turn))

    def _end(self, turn: int) -> None:
        if turn != self._turn:
            return
        self._look()
        self._moved = max(self._moved, self._ends[0][0])
        _, _, call = heapq.heappop(self._ends)
        self._plan()
        call()
