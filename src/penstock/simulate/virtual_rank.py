"""A rank in virtual time: the decisions of a loader, carried out by devices that only take time.

The code that runs in a loader decides how far to plan and to fill (`flow.planning`,
`flow.filling`), which route a sample's bytes take (`flow.routes`) and which request begins when
(`flow.Flow`). Devices in virtual time carry it out: requests, writes into tiers, copies into
batches, and a training loop that takes batches in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from penstock.dataset.part import Ints
from penstock.flow import (
    Begin,
    Consumed,
    Fetch,
    Flow,
    FlowBudget,
    SourcePrior,
    Waiting,
    Wanted,
)
from penstock.flow.filling import FillCourse
from penstock.flow.planning import may_fill, may_plan
from penstock.flow.routes import Route, routes_of
from penstock.simulate.driver import FlowDriver
from penstock.simulate.virtual import Call, VirtualServers
from penstock.simulate.virtual_node import Costs, VirtualNode

STORE = "store"


class VirtualBatch:
    """A batch in the making."""

    __slots__ = ("ids", "is_done", "num_waiting", "number", "size_bytes", "staged_bytes")

    def __init__(self, number: int, ids: Ints, size_bytes: int) -> None:
        self.number, self.ids, self.size_bytes = number, ids, size_bytes
        self.staged_bytes = 0
        """Bytes of it that are read for this batch alone, not into a tier."""
        self.num_waiting = 0
        self.is_done = False


class _BufferMemory:
    """Buffers that are used again. Only the first use of a byte costs: the kernel clears it."""

    __slots__ = ("_free_bytes",)

    def __init__(self) -> None:
        self._free_bytes = 0

    def take(self, size_bytes: int) -> int:
        """Take a buffer; return how many of its bytes were never used before."""
        again = min(self._free_bytes, size_bytes)
        self._free_bytes -= again
        return size_bytes - again

    def give(self, size_bytes: int) -> None:
        """Give a buffer back."""
        self._free_bytes += size_bytes


class _VirtualRead:
    """A read for one batch (`unit` is -1), or of a unit into its tier."""

    __slots__ = ("done", "is_over", "size_bytes", "unit")

    def __init__(self, size_bytes: int, unit: int, done: Call) -> None:
        self.size_bytes, self.unit, self.done = size_bytes, unit, done
        self.is_over = False


class VirtualRank:
    """One rank: its flow, its stage and its training loop."""

    def __init__(
        self,
        node: VirtualNode,
        batches: Iterator[Ints],
        *,
        costs: Costs,
        budget: FlowBudget,
        threads: int,
        prior: SourcePrior | None,
        ahead: Callable[[], Iterator[Ints]],
    ) -> None:
        """`ahead` returns the samples of batches to come, for filling tiers."""
        self._node, self._batches, self._costs = node, batches, costs
        self._time = node.time
        self.flow = Flow(budget=budget, prior={STORE: prior} if prior else None)
        self._stage_max = budget.stage_bytes_max
        self._threads = threads
        self._python = VirtualServers(node.time, 1)
        self._memory = _BufferMemory()
        self._stage: deque[VirtualBatch] = deque()
        self._stage_bytes = 0
        self._num_planned = self._num_fetches = self._num_open = 0
        self._was_near = self._is_planning = self._is_filling = self._is_exhausted = False
        self._reads: dict[int, _VirtualRead] = {}
        self._driver = FlowDriver(
            self.flow, now_s=lambda: node.time.now_s, at=node.time.at, begin=self._begin
        )
        self._taker: Call | None = None
        self._course: FillCourse[None, Ints] = FillCourse(lambda _: ahead(), None)

    def start(self) -> None:
        """Begin to plan."""
        self._time.after(self._costs.start_s, self._look)

    def take(self, call: Call) -> None:
        """Ask for the next batch; call back when it is there."""
        assert self._taker is None
        self._taker = call
        if not (self._stage and self._stage[0].is_done):
            number = self._stage[0].number if self._stage else self._num_planned
            self._driver.tell(Waiting(step=number, at_s=self._time.now_s))
        self._give()

    # -- planning ------------------------------------------------------------------------------

    def _look(self) -> None:
        """Plan the next batch or the next fills, if one of them may be planned now."""
        if self._may_plan():
            # Python plans one batch at a time: its lock is taken until `_plan` has run.
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
        return may_plan(
            num_batches=len(self._stage),
            size_bytes=self._stage_bytes,
            was_near=self._was_near,
            num_makers=self._threads,
            stage_bytes_max=self._stage_max,
            look_ahead_bytes=lambda: self.flow.look_ahead_bytes,
        )

    def _may_fill(self) -> bool:
        if self._is_filling or self._course.is_over(0):
            return False
        return may_fill(num_waiting=self._num_open, requests_limit=self.flow.limit(STORE))

    def _plan(self, ids: Ints) -> None:
        node = self._node
        batch = VirtualBatch(self._num_planned, ids, int(node.samples.lengths[ids].sum()))
        self._num_planned += 1
        self._stage.append(batch)
        self._stage_bytes += batch.size_bytes
        units = node.samples.units[ids]
        routes = routes_of(np.all(node.tier_of[units] >= 0, axis=1))
        absent = np.unique(units[routes == Route.TIER])
        absent = absent[~node.present[absent]]
        alone = ids[routes == Route.ALONE]
        batch.num_waiting = len(absent) + len(alone)
        self._was_near = not batch.num_waiting
        self._is_planning = False
        if not batch.num_waiting:
            self._make(batch)
        done = partial(self._one_there, batch)
        sizes = node.samples.lengths[alone].tolist()
        batch.staged_bytes = sum(sizes)
        fetches = [self._want(_VirtualRead(size, -1, done), batch.number) for size in sizes]
        for unit in absent.tolist():
            if node.claim(unit):
                fetches.append(self._fill(unit, batch.number))
            node.when_filled(unit, done)
        if fetches:
            self._driver.tell(Wanted(fetches=tuple(fetches), at_s=self._time.now_s))
        self._look()

    def _fill_next(self) -> None:
        """Ask the flow for units that later batches need in the tiers."""
        fetches: list[Fetch] = []
        for number, ids in self._course.next(len, for_others=False):
            units = np.unique(self._node.samples.units[ids])
            units = units[(self._node.tier_of[units] >= 0) & ~self._node.present[units]]
            fetches += [self._fill(u, number) for u in units.tolist() if self._node.claim(u)]
        self._is_filling = False
        if fetches:
            self._driver.tell(Wanted(fetches=tuple(fetches), at_s=self._time.now_s))
        self._look()

    # -- reading -------------------------------------------------------------------------------

    def _fill(self, unit: int, step: int) -> Fetch:
        size_bytes = int(self._node.samples.unit_lengths[unit])
        return self._want(_VirtualRead(size_bytes, unit, partial(self._node.filled, unit)), step)

    def _want(self, read: _VirtualRead, step: int) -> Fetch:
        number = self._num_fetches
        self._num_fetches += 1
        self._num_open += 1
        self._reads[number] = read
        return Fetch(
            number=number,
            step=step,
            size_bytes=read.size_bytes,
            sources=(STORE,),
            staged=read.unit < 0,
        )

    def _begin(self, begin: Begin) -> None:
        read = self._reads[begin.number]
        answered = partial(self._answered, begin, read)
        ask = partial(self._node.store.read, read.size_bytes, answered)
        self._python.ask(self._costs.request_s, ask)

    def _answered(self, begin: Begin, read: _VirtualRead, num_retries: int) -> None:
        seconds = read.size_bytes * self._costs.byte_s
        seconds += self._memory.take(read.size_bytes) * self._costs.fresh_byte_s
        if read.unit >= 0:
            seconds += self._node.write_s(read.unit)
        self._node.cores.ask(seconds, partial(self._arrived, begin, read, num_retries))

    def _arrived(self, begin: Begin, read: _VirtualRead, num_retries: int) -> None:
        self._driver.arrived(begin, num_retries=num_retries)
        # A hedged read arrives twice. The second copy, like what a tier has taken, frees its
        # buffer.
        if read.unit >= 0 or read.is_over:
            self._memory.give(read.size_bytes)
        if not read.is_over:
            read.is_over = True
            self._num_open -= 1
            del self._reads[begin.number]
            read.done()
        self._look()

    # -- batches -------------------------------------------------------------------------------

    def _one_there(self, batch: VirtualBatch) -> None:
        batch.num_waiting -= 1
        if not batch.num_waiting:
            self._make(batch)

    def _make(self, batch: VirtualBatch) -> None:
        """Read the batch's samples from disk tiers, then copy all samples into the batch."""
        node = self._node
        tiers = node.tier_of[node.samples.units[batch.ids, 0]]
        lengths = node.samples.lengths[batch.ids]
        # One more than there are tiers, so that tiers that answer at once do not end the wait
        # early.
        # One more than there are tiers, so that tiers that answer at once do not end the wait
        # early.
        left = [1 + len(node.machine.tiers)]

        def read() -> None:
            left[0] -= 1
            if not left[0]:
                self._copy(batch)

        for tier in range(len(node.machine.tiers)):
            node.read_tier(tier, float(lengths[tiers == tier].sum()), read)
        read()

    def _copy(self, batch: VirtualBatch) -> None:
        left = [self._threads]

        def copied() -> None:
            left[0] -= 1
            if not left[0]:
                self._python.ask(self._costs.batch_s, partial(self._made, batch))

        fresh_s = self._memory.take(batch.size_bytes) * self._costs.fresh_byte_s
        seconds = (self._node.copy_s(batch.size_bytes) + fresh_s) / self._threads
        for _ in range(self._threads):
            self._node.cores.ask(seconds, copied)

    def _made(self, batch: VirtualBatch) -> None:
        batch.is_done = True
        self._memory.give(batch.staged_bytes)
        self._give()

    def _give(self) -> None:
        """Hand over the next batch if it is ready and the training loop waits for it."""
        if self._taker is None or not (self._stage and self._stage[0].is_done):
            return
        # Cleared before the call, because the training loop may ask for the next batch within it.
        batch, taker, self._taker = self._stage.popleft(), self._taker, None
        self._stage_bytes -= batch.size_bytes
        self._memory.give(batch.size_bytes)
        self._driver.tell(Consumed(step=batch.number, at_s=self._time.now_s))
        taker()
        self._look()
