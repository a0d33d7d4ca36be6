"""The network of a simulated cluster, and the store that its nodes share.

A message takes a latency and is then held until its path is open: a cut link or a frozen process
loses nothing and only delays, as with TCP. A connection dies when the client gives it up, or when
either end is gone. The bytes of replies share the link of the node that sends them.

A server that owes a reply sends a heartbeat a few times a second. Heartbeats are not simulated one
by one: a client hears a server as long as the path between them is open, and knows since when it is
closed.
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
"""Those of a loader, but never given up: a store that fails for good fails every job."""
EVERYBODY = -1


class NodeReachability:
    """Which node can reach which, and since when it cannot."""

    def __init__(self, num_nodes: int) -> None:
        self._num_closed: Counter[tuple[int, int]] = Counter()
        """Number of reasons why nothing passes, by asker and server."""
        self._closed_s: dict[tuple[int, int], float] = {}
        self._held: dict[tuple[int, int], list[Call]] = {}
        self._num_nodes = num_nodes

    def is_open(self, asker: int, server: int) -> bool:
        """Return whether messages pass, in both directions."""
        return not self._num_closed[asker, server]

    def closed_since_s(self, asker: int, server: int) -> float:
        """Return when the path was closed."""
        return self._closed_s[asker, server]

    def close(self, asker: int, server: int, now_s: float) -> None:
        """Add a reason why nothing passes; the path must be opened as often as it was closed."""
        if self.is_open(asker, server):
            self._closed_s[asker, server] = now_s
        self._num_closed[asker, server] += 1

    def open(self, asker: int, server: int) -> None:
        """Remove one reason; with the last one, messages that were held pass."""
        self._num_closed[asker, server] -= 1
        if self.is_open(asker, server):
            for call in self._held.pop((asker, server), []):
                call()

    def to_and_from(self, node: int) -> list[tuple[int, int]]:
        """Return the paths on which other nodes ask a node."""
        return [(asker, node) for asker in range(self._num_nodes) if asker != node]

    def pass_on(self, asker: int, server: int, call: Call) -> None:
        """Call a function as soon as the path is open."""
        if self.is_open(asker, server):
            call()
        else:
            self._held.setdefault((asker, server), []).append(call)


class SharedStore:
    """The store: one link for all nodes, which refuses requests (503) at times."""

    def __init__(self, time: VirtualTime, bytes_s: float, seed: int) -> None:
        self._time = time
        self._pipe = SharedPipe(time, bytes_s)
        self._draws = random.Random(seed)
        self._refusing: Counter[int] = Counter()
        self._num_lagging = 0
        self.read_bytes: Counter[str] = Counter()
        """Bytes that were asked for, by reason."""

    def refuse(self, change: int, node: int = EVERYBODY) -> None:
        """Begin (1) or stop (-1) to refuse all requests of one node, or of all nodes."""
        self._refusing[node] += change

    def lag(self, change: int, factor: float) -> None:
        """Begin (1) or stop (-1) to be slow."""
        self._num_lagging += change
        self._pipe.slow_down(factor if self._num_lagging else 1.0)

    def read(self, size_bytes: int, *, node: int, why: str, done: Callable[[int], None]) -> None:
        """Read for a node; call `done` with the number of refusals."""
        self.read_bytes[why] += size_bytes
        # Each read has waits of its own; all draw from one source, so a seed repeats the run.
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
