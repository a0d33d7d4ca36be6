"""A rank in virtual time: a loader's decisions, carried out by devices that only count.

It follows the loader: batches are planned in order as far ahead as the flow asks for; what no tier
holds is read for its batch alone, what a tier is to hold is fetched into it, once, also beyond the
batches that are planned; a batch whose bytes are all there is copied together; the training loop
takes batches in order. Which request begins when is `penstock.flow`'s decision, the very code that
runs in a loader.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial

import numpy as np

from penstock.dataset.part import Ints
from penstock.flow import (
    Action,
    Arrived,
    Begin,
    Budget,
    Consumed,
    Event,
    Fetch,
    Flow,
    Throttled,
    Tick,
    Waiting,
    Wanted,
)
from penstock.simulate.virtual import Call, Servers
from penstock.simulate.virtual_node import Costs, VirtualNode

_NEAR_SPARE = 2
_FILLS_WAITING = 2
_FILL_SAMPLES = 4096
"""As `loader.runner` and `loader.ahead` have them."""
STORE = "store"


class Batch:
    """A batch in the making."""

    __slots__ = ("ids", "is_done", "num_waiting", "number", "size_bytes")

    def __init__(self, number: int, ids: Ints, size_bytes: int) -> None:
        self.number, self.ids, self.size_bytes = number, ids, size_bytes
        self.num_waiting = 0
        self.is_done = False


class VirtualRank:
    """One rank: its flow, its stage and its training loop."""

    def __init__(
        self, node: VirtualNode, batches: Iterator[Ints], *, costs: Costs, budget: Budget, threads: int
    ) -> None:
        self._node, self._batches, self._costs = node, batches, costs
        self._time = node.time
        self.flow = Flow(budget=budget)
        self._stage_max = budget.stage_bytes_max
        self._threads = threads
        self._python = Servers(node.time, 1)
        self._stage: deque[Batch] = deque()
        self._stage_bytes = 0
        self._num_planned = self._num_fetches = self._num_open = 0
        self._was_near = self._is_planning = self._is_filling = self._is_exhausted = False
        self._reads: dict[int, tuple[int, Call]] = {}
        """By fetch: the unit that it fills or -1, and what to do when it is there."""
        self._over: set[int] = set()
        self._wake_s = np.inf
        self._taker: Call | None = None
        self._ahead: Iterator[tuple[int, Ints]] = iter(())

    def start(self, ahead: Iterator[tuple[int, Ints]]) -> None:
        """Begin to plan; `ahead` are the samples of batches to come, for filling tiers."""
        self._ahead = ahead
        self._look()

    def take(self, call: Call) -> None:
        """Have the next batch; be called when it is there."""
        assert self._taker is None
        self._taker = call
        if not (self._stage and self._stage[0].is_done):
            number = self._stage[0].number if self._stage else self._num_planned
            self._tell(Waiting(step=number, at_s=self._time.now_s))
        self._give()

    # -- planning ------------------------------------------------------------------------------

    def _look(self) -> None:
        """Plan what may be planned now."""
        if self._may_plan():
            self._is_planning = True
            ids = next(self._batches, None)
            if ids is None:
                self._is_planning, self._is_exhausted = False, True
            else:
                seconds = self._costs.batch_s + len(ids) * self._costs.sample_s
                self._python.ask(seconds, partial(self._plan, ids))
        elif self._may_fill():
            self._is_filling = True
            self._python.ask(self._costs.batch_s, self._fill_next)

    def _may_plan(self) -> bool:
        if self._is_planning or self._is_exhausted:
            return False
        if self._was_near and len(self._stage) >= self._threads + _NEAR_SPARE:
            return False
        room = self._stage_max
        if not self._was_near:
            room = min(room, self.flow.look_ahead_bytes)
        return not self._stage or self._stage_bytes < room

    def _may_fill(self) -> bool:
        if self._is_filling or self._ahead is None:
            return False
        return self._num_open < _FILLS_WAITING * self.flow.limit(STORE)

    def _plan(self, ids: Ints) -> None:
        node = self._node
        batch = Batch(self._num_planned, ids, int(node.samples.lengths[ids].sum()))
        self._num_planned += 1
        self._stage.append(batch)
        self._stage_bytes += batch.size_bytes
        units = node.samples.units[ids]
        is_placed = (node.tier_of[units] >= 0).all(axis=1)
        absent = np.unique(units[is_placed])
        absent = absent[~node.present[absent]]
        alone = ids[~is_placed]
        batch.num_waiting = len(absent) + len(alone)
        self._was_near = not batch.num_waiting
        self._is_planning = False
        if not batch.num_waiting:
            self._make(batch)
        done = partial(self._one_there, batch)
        fetches = [self._read(int(size), batch.number, done) for size in node.samples.lengths[alone]]
        for unit in absent.tolist():
            if node.claim(unit):
                fetches.append(self._fill(unit, batch.number))
            node.when_filled(unit, done)
        if fetches:
            self._tell(Wanted(fetches=tuple(fetches), at_s=self._time.now_s))
        self._look()

    def _fill_next(self) -> None:
        """Want what later batches need of the tiers."""
        fetches: list[Fetch] = []
        seen = 0
        while seen < _FILL_SAMPLES:
            number, ids = next(self._ahead, (-1, None))
            if ids is None:
                break
            seen += len(ids)
            units = np.unique(self._node.samples.units[ids])
            units = units[(self._node.tier_of[units] >= 0) & ~self._node.present[units]]
            fetches += [self._fill(u, number) for u in units.tolist() if self._node.claim(u)]
        self._is_filling = not seen  # Never again: all was seen once.
        if fetches:
            self._tell(Wanted(fetches=tuple(fetches), at_s=self._time.now_s))
        self._look()

    # -- reading -------------------------------------------------------------------------------

    def _read(self, size_bytes: int, step: int, done: Call) -> Fetch:
        return self._fetch(size_bytes, step, -1, done, staged=True)

    def _fill(self, unit: int, step: int) -> Fetch:
        size_bytes = int(self._node.samples.unit_lengths[unit])
        return self._fetch(size_bytes, step, unit, partial(self._node.filled, unit), staged=False)

    def _fetch(self, size_bytes: int, step: int, unit: int, done: Call, *, staged: bool) -> Fetch:
        number = self._num_fetches
        self._num_fetches += 1
        self._num_open += 1
        self._reads[number] = (unit, done)
        return Fetch(
            number=number, step=step, size_bytes=size_bytes, sources=(STORE,), staged=staged
        )

    def _tell(self, event: Event) -> None:
        """Tell the flow, and do what it says."""
        self._act(self.flow.on(event))
        wake_s = self.flow.wake_s
        if wake_s is not None and not self._time.now_s <= self._wake_s <= wake_s:
            self._wake_s = wake_s
            self._time.at(wake_s, self._wake)

    def _wake(self) -> None:
        self._wake_s = np.inf
        if self.flow.wake_s is not None:
            self._tell(Tick(at_s=self._time.now_s))

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            assert isinstance(action, Begin), f"a store that never fails was given up: {action}"
            self._begin(action)

    def _begin(self, begin: Begin) -> None:
        unit = self._reads[begin.number][0] if begin.number in self._reads else -1
        size_bytes = self._sizes(begin.number, unit)
        asked = partial(self._node.store.read, size_bytes, partial(self._answered, begin, size_bytes))
        self._python.ask(self._costs.request_s, asked)

    def _answered(self, begin: Begin, size_bytes: int, num_retries: int) -> None:
        unit = self._reads.get(begin.number, (-1, None))[0]
        seconds = size_bytes * self._costs.byte_s
        if unit >= 0:
            seconds += self._node.write_s(unit)
        self._node.cores.ask(seconds, partial(self._arrived, begin, num_retries))

    def _arrived(self, begin: Begin, num_retries: int) -> None:
        now_s = self._time.now_s
        if num_retries:
            self._tell(Throttled(source=STORE, at_s=now_s))
        self._tell(Arrived(number=begin.number, copy=begin.copy, at_s=now_s))
        found = self._reads.pop(begin.number, None)
        if found is not None:
            self._num_open -= 1
            found[1]()
        self._look()
