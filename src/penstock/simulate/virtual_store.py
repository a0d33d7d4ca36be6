"""A store in virtual time: latency, a shared link, a limit of requests a second, refusals (503).

A request waits for its first byte, then its bytes share the link with all others of the node. One
that is refused is asked again after the waits of `storage.retry`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock.machine import StoreModel
from penstock.simulate.virtual import SharedPipe, VirtualTime
from penstock.simulate.weather import RequestWeather, Weather

_BURST_S = 0.1
"""A burst may take this much of the limit ahead of time."""


@dataclass(slots=True)
class _StoreRead:
    size_bytes: float
    done: Callable[[int], None]
    waits_s: Iterator[float]
    num_retries: int = 0


class VirtualStore:
    """The store of a machine, seen from one node."""

    def __init__(self, time: VirtualTime, model: StoreModel, weather: Weather) -> None:
        self._time, self._weather = time, weather
        plain = model.without_latency()
        self._draws = RequestWeather(plain, weather)
        connection = plain.throughput.at(1)
        self._pipe = SharedPipe(
            time, max(*plain.throughput.bytes_s, connection), each_bytes_s=connection
        )
        self._each_s = 1 / model.requests_s_max if model.requests_s_max else 0.0
        self._used_until_s = -math.inf
        self.num_requests = 0
        self.num_refused = 0
        self.arrivals: list[tuple[float, float]] = []
        """Time and bytes of each read, in the order of arrival."""
        for change_s in weather.changes_s():
            time.at(change_s, self._change)

    @property
    def read_bytes(self) -> float:
        """Bytes sent so far."""
        return self._pipe.sent_bytes

    def read(self, size_bytes: float, done: Callable[[int], None]) -> None:
        """Begin a read; call `done` with the number of retries when it has ended."""
        self._ask(_StoreRead(size_bytes, done, self._draws.retry_waits_s()))

    def _ask(self, read: _StoreRead) -> None:
        now = self._time.now_s
        self.num_requests += 1
        queued_s = self._queued_s(now)
        if queued_s and self._weather.excess == "queue":
            # A queued request takes its turn now, so that the next one waits behind it.
            self._used_until_s += self._each_s
            self._time.after(queued_s, lambda: self._answer(read))
        elif queued_s or self._draws.is_refused(now):
            self.num_refused += 1
            read.num_retries += 1
            again_s = self._draws.latency_s(now) + next(read.waits_s)
            self._time.after(again_s, lambda: self._ask(read))
        else:
            self._used_until_s = max(self._used_until_s, now) + self._each_s
            self._answer(read)

    def _queued_s(self, now: float) -> float:
        """Return how many seconds a request is above the limit; 0 if it may pass."""
        if not self._each_s:
            return 0.0
        return max(0.0, self._used_until_s - max(0.0, _BURST_S - self._each_s) - now)

    def _answer(self, read: _StoreRead) -> None:
        self._time.after(
            self._draws.latency_s(self._time.now_s),
            lambda: self._pipe.send(read.size_bytes, lambda: self._there(read)),
        )

    def _there(self, read: _StoreRead) -> None:
        self.arrivals.append((self._time.now_s, read.size_bytes))
        read.done(read.num_retries)

    def _change(self) -> None:
        self._pipe.slow_down(self._weather.factor_at(self._time.now_s))
