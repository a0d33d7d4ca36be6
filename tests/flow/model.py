"""A store and a consumer in virtual time, small enough to be trusted, to drive a flow with.

A request waits for its first byte (log-normal), then its bytes pass a link that it shares with all
others of its store, first come first served. Above a rate of requests the store answers "slow
down", and the request tries again after a random back-off, as a client would.

Peers are further stores, each with a link of its own; a fetch is asked of one of them first.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from statistics import median

from penstock.flow import (
    Action,
    Arrived,
    Begin,
    Consumed,
    Fetch,
    Flow,
    FlowBudget,
    Throttled,
    Tick,
    Waiting,
    Wanted,
)


@dataclass(frozen=True, kw_only=True)
class ModelStore:
    latency_s: float = 0.02
    sigma: float = 0.2
    bytes_s: float = 100e6
    connection_bytes_s: float = 1e12
    requests_s: float | None = None
    straggler_share: float = 0.0
    straggler_s: float = 2.0
    slow: tuple[float, float] = (0.0, 0.0)
    """From when to when it is slow."""
    slow_latency: float = 1.0
    slow_bytes: float = 1.0
    """How many times slower it is then."""

    refuse: tuple[float, float] = (0.0, 0.0)
    """From when to when it refuses every request."""

    def is_slow(self, at_s: float) -> bool:
        return self.slow[0] <= at_s < self.slow[1]


@dataclass
class Ask:
    begin: Begin
    size_bytes: int
    began_s: float
    num_refused: int = 0


@dataclass
class Log:
    done: list[tuple[float, int, float]] = field(default_factory=list)
    """When, how many bytes, after how long."""
    asked: Counter[str] = field(default_factory=Counter)
    """Requests, by source."""
    throttles: list[float] = field(default_factory=list)
    begins: list[float] = field(default_factory=list)
    limits: list[tuple[float, int]] = field(default_factory=list)
    stalls: list[tuple[float, float]] = field(default_factory=list)
    """When a step was asked for and how long it was waited for, by step."""
    stage_bytes_max: int = 0

    def rate(self, from_s: float, to_s: float) -> float:
        return sum(size for at, size, _ in self.done if from_s <= at < to_s) / (to_s - from_s)

    def latency_s(self, from_s: float, to_s: float) -> float:
        return median(took for at, _, took in self.done if from_s <= at < to_s)


class Run:
    """A loader in virtual time: plans as far ahead as the flow asks, and consumes in order."""

    def __init__(
        self,
        store: ModelStore,
        *,
        compute_s: float = 0.0,
        batch: int = 32,
        size_bytes: int = 110_000,
        stage_bytes: int = 256 << 20,
        requests_max: int = 64,
        seed: int = 7,
        num_steps: int = 10**9,
        peers: Mapping[str, ModelStore] | None = None,
    ) -> None:
        self.stores = {"store": store, **(peers or {})}
        self._first = list(peers or {})
        self.flow = Flow(budget=FlowBudget(stage_bytes_max=stage_bytes, requests_max=requests_max))
        self.log = Log()
        self.compute_s = compute_s
        self.batch = batch
        self.size_bytes = size_bytes
        self.num_steps = num_steps
        self.now_s = 0.0
        self._random = random.Random(seed)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._link_free_s = dict.fromkeys(self.stores, 0.0)
        self._tokens, self._tokens_s = float("inf"), 0.0  # It begins rested.
        self._next_number = self._next_step = 0
        self._missing: dict[int, set[int]] = {}
        self._step_of: dict[int, int] = {}
        self._step = 0
        self._asked_s: float | None = None
        self._tick_s: float | None = None
        self._at(0.0, self._ask)

    def until(self, end_s: float) -> Log:
        while self._heap and self._heap[0][0] <= end_s and self._step < self.num_steps:
            self.now_s, _, do = heappop(self._heap)
            do()
            self._plan()
            self._watch()
        return self.log

    # -- the loader's part ---------------------------------------------------------------------

    def _plan(self) -> None:
        while (
            self.flow.planned_bytes < self.flow.look_ahead_bytes
            and self._next_step < self.num_steps
        ):
            numbers = range(self._next_number, self._next_number + self.batch)
            step = self._next_step
            fetches = tuple(
                Fetch(number=n, step=step, size_bytes=self.size_bytes, sources=self._sources(n))
                for n in numbers
            )
            self._missing[step] = set(numbers)
            self._step_of.update(dict.fromkeys(numbers, step))
            self._next_number += self.batch
            self._next_step += 1
            self._act(self.flow.on(Wanted(fetches=fetches, at_s=self.now_s)))

    def _sources(self, number: int) -> tuple[str, ...]:
        """Peers and store have equal shares."""
        place = number % (len(self._first) + 1)
        return (*self._first[place : place + 1], "store")

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            assert isinstance(action, Begin)
            self.log.begins.append(self.now_s)
            self.log.asked[action.source] += 1
            self._request(Ask(action, self.size_bytes, self.now_s))

    def _ask(self) -> None:
        """The consumer wants its next step."""
        if self._asked_s is None:
            self._asked_s = self.now_s
        if self._next_step > self._step and not self._missing[self._step]:
            self.log.stalls.append((self._asked_s, self.now_s - self._asked_s))
            self._asked_s = None
            self._step += 1
            self._act(self.flow.on(Consumed(step=self._step - 1, at_s=self.now_s)))
            self._at(self.now_s + self.compute_s, self._ask)
        else:
            self._act(self.flow.on(Waiting(step=self._step, at_s=self.now_s)))

    def _watch(self) -> None:
        log, flow = self.log, self.flow
        log.stage_bytes_max = max(log.stage_bytes_max, flow.stage_bytes)
        limit = flow.limit("store")
        if not log.limits or log.limits[-1][1] != limit:
            log.limits.append((self.now_s, limit))
        wake_s = flow.wake_s
        if wake_s is not None and (self._tick_s is None or wake_s < self._tick_s):
            self._tick_s = max(wake_s, self.now_s)
            self._at(self._tick_s, self._tick)

    def _tick(self) -> None:
        self._tick_s = None
        self._act(self.flow.on(Tick(at_s=self.now_s)))

    # -- the store's part ----------------------------------------------------------------------

    def _request(self, ask: Ask) -> None:
        store = self.stores[ask.begin.source]
        refuses = store.refuse[0] <= self.now_s < store.refuse[1]
        if refuses or (store.requests_s and not self._has_token(store.requests_s)):
            ask.num_refused += 1
            self._at(self.now_s + 0.002, lambda: self._refuse(ask))
            return
        first_s = store.latency_s * self._random.lognormvariate(0.0, store.sigma)
        if self._random.random() < store.straggler_share:
            first_s += store.straggler_s
        if store.is_slow(self.now_s):
            first_s *= store.slow_latency
        self._at(self.now_s + first_s, lambda: self._transfer(ask))

    def _has_token(self, requests_s: float) -> bool:
        gained = (self.now_s - self._tokens_s) * requests_s
        self._tokens = min(self._tokens + gained, max(1.0, requests_s * 0.02))
        self._tokens_s = self.now_s
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def _refuse(self, ask: Ask) -> None:
        self.log.throttles.append(self.now_s)
        wait_s = self._random.uniform(0, min(0.1 * 2 ** (ask.num_refused - 1), 10.0))
        self._at(self.now_s + wait_s, lambda: self._request(ask))
        self._act(self.flow.on(Throttled(source=ask.begin.source, at_s=self.now_s)))

    def _transfer(self, ask: Ask) -> None:
        store = self.stores[ask.begin.source]
        bytes_s = store.bytes_s / (store.slow_bytes if store.is_slow(self.now_s) else 1.0)
        link_free_s = max(self._link_free_s[ask.begin.source], self.now_s)
        self._link_free_s[ask.begin.source] = link_free_s + ask.size_bytes / bytes_s
        alone_s = self.now_s + ask.size_bytes / store.connection_bytes_s
        self._at(max(self._link_free_s[ask.begin.source], alone_s), lambda: self._arrive(ask))

    def _arrive(self, ask: Ask) -> None:
        number, attempt = ask.begin.number, ask.begin.attempt
        self.log.done.append((self.now_s, ask.size_bytes, self.now_s - ask.began_s))
        missing = self._missing[self._step_of[number]]
        missing.discard(number)
        self._act(self.flow.on(Arrived(number=number, attempt=attempt, at_s=self.now_s)))
        if self._asked_s is not None and not self._missing[self._step]:
            self._ask()

    def _at(self, at_s: float, do: Callable[[], None]) -> None:
        self._sequence += 1
        heappush(self._heap, (at_s, self._sequence, do))
