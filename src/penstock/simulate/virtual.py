"""Virtual time: an event queue, and devices that take time in it.

Work is given to a device with a callback, which it calls when the work is done. Three kinds of
queue are enough:

* `VirtualServers`: a number of servers with one queue, first come first served (cores, a lock);
* `SharedPipe`: all transfers at once share a bandwidth fairly, each up to a limit (a link);
* waiting, which is only a later event (a latency, a pause).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from itertools import count

Call = Callable[[], None]


class VirtualTime:
    """A clock and the events to come."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Call]] = []
        self._numbers = count()

    def at(self, at_s: float, call: Call) -> None:
        """Call a function at a time; equal times in the order in which they were asked for."""
        # The number breaks ties: functions cannot be compared, and runs must be repeatable.
        heapq.heappush(self._events, (max(at_s, self.now_s), next(self._numbers), call))

    def after(self, seconds: float, call: Call) -> None:
        """Call a function some seconds from now."""
        self.at(self.now_s + seconds, call)

    def run(self, is_done: Callable[[], bool]) -> None:
        """Handle events until `is_done`, or until none are left."""
        events = self._events
        while events and not is_done():
            self.now_s, _, call = heapq.heappop(events)
            call()


class VirtualServers:
    """A number of servers with one queue.

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
        """Keep a server busy for a time, then call back."""
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
    """A bandwidth that all transfers in flight share fairly.

    All move at the same rate, so one number describes them: the bytes that an endless transfer
    would have moved. A transfer of s bytes ends when this number has grown by s since it began.

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
        """Begin a transfer; call back when it has ended."""
        self._look()
        self.sent_bytes += size_bytes
        heapq.heappush(self._ends, (self._moved + size_bytes, next(self._numbers), call))
        self._plan()

    def slow_down(self, factor: float) -> None:
        """Divide the first bandwidth by a factor, from now on."""
        self._look()
        self._factor = factor
        self._plan()

    def _rate(self) -> float:
        share = self._bytes_s / len(self._ends)
        return min(share, self._each_bytes_s) / self._factor

    def _look(self) -> None:
        """Add the bytes moved since the last look; the rate was the same all the time."""
        now = self._time.now_s
        if self._ends:
            self._moved += (now - self._looked_s) * self._rate()
        self._looked_s = now

    def _plan(self) -> None:
        """Schedule the end of the transfer that ends first."""
        # The rate has changed, so an end that was scheduled before is at the wrong time: it finds
        # another turn, and does nothing.
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
