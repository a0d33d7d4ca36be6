"""What connects the nodes of a simulated cluster, and the store that they share.

A message takes a latency and is then held until its way is open: a cut link or a frozen process
loses nothing, it only takes time, as with TCP. What dies is a connection: when the client gives it
up, or when either end is gone. The bytes of answers share the link of the node that sends them.

A server with something to answer says at least a few times a second that it is alive. That is not
played out beat by beat: a client hears from a server as long as the way between them is open, and
knows since when it is not.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable

from penstock.simulate.virtual import Call, SharedPipe, VirtualTime
from penstock.storage.retry import RetryPolicy, waits

LATENCY_S = 0.0005
_STORE_LATENCY_S, _STORE_SIGMA = 0.015, 0.4
_RETRIES = RetryPolicy(attempts_max=sys.maxsize)
"""As a loader's, but never given up: a store that fails for good fails every job."""
EVERYBODY = -1


class NodeReachability:
    """Which node can reach which, and since when it cannot."""

    def __init__(self, num_nodes: int) -> None:
        self._num_closed: Counter[tuple[int, int]] = Counter()
        """By asker and server: the reasons why nothing passes."""
        self._closed_s: dict[tuple[int, int], float] = {}
        self._held: dict[tuple[int, int], list[Call]] = {}
        self._num_nodes = num_nodes

    def is_open(self, asker: int, server: int) -> bool:
        """Return whether messages pass, in both directions."""
        return not self._num_closed[asker, server]

    def closed_since_s(self, asker: int, server: int) -> float:
        """Return when the way was closed."""
        return self._closed_s[asker, server]

    def close(self, asker: int, server: int, now_s: float) -> None:
        """Let nothing pass; must be opened as often as it was closed."""
        if self.is_open(asker, server):
            self._closed_s[asker, server] = now_s
        self._num_closed[asker, server] += 1

    def open(self, asker: int, server: int) -> None:
        """Take back one reason; what was held passes with the last."""
        self._num_closed[asker, server] -= 1
        if self.is_open(asker, server):
            for call in self._held.pop((asker, server), []):
                call()

    def to_and_from(self, node: int) -> list[tuple[int, int]]:
        """Return the ways on which a node is asked."""
        return [(asker, node) for asker in range(self._num_nodes) if asker != node]

    def pass_on(self, asker: int, server: int, call: Call) -> None:
        """Do something as soon as the way is open."""
        if self.is_open(asker, server):
            call()
        else:
            self._held.setdefault((asker, server), []).append(call)


class SharedStore:
    """The store: one link for all nodes, and 503 at times."""

    def __init__(self, time: VirtualTime, bytes_s: float, seed: int) -> None:
        self._time = time
        self._pipe = SharedPipe(time, bytes_s)
        self._draws = random.Random(seed)
        self._refusing: Counter[int] = Counter()
        self._num_lagging = 0
        self.read_bytes: Counter[str] = Counter()
        """What was asked for, by reason."""

    def refuse(self, change: int, node: int = EVERYBODY) -> None:
        """Begin (1) or cease (-1) to refuse everything, to one node or to all."""
        self._refusing[node] += change

    def lag(self, change: int, factor: float) -> None:
        """Become slow (1), or as before (-1)."""
        self._num_lagging += change
        self._pipe.slow_down(factor if self._num_lagging else 1.0)

    def read(self, size_bytes: int, *, node: int, why: str, done: Callable[[int], None]) -> None:
        """Read for a node; `done` is called with the number of refusals."""
        self.read_bytes[why] += size_bytes
        waits_s, attempt = waits(_RETRIES, self._draws), 0

        def ask() -> None:
            nonlocal attempt
            latency_s = _STORE_LATENCY_S * self._draws.lognormvariate(0.0, _STORE_SIGMA)
            if self._refusing[EVERYBODY] or self._refusing[node]:
                attempt += 1
                self._time.after(latency_s + next(waits_s), ask)
            else:
                self._time.after(latency_s, lambda: self._pipe.send(size_bytes, finish))

        def finish() -> None:
            done(attempt)

        ask()
