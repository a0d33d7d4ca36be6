"""A rank of a simulated cluster: the loader's decisions, with the real flow and membership.

It follows `loader.staging` and `loader.cluster`: a batch is planned as far ahead as the flow asks;
what has a place on this node is fetched into its tier, once, from its store if it is at home here
and else from who has it; all other samples are asked of the nodes that keep them, those of one
batch and the same sources together. Beside the batches, what is at home here is fetched in the
order in which the whole job uses it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

from penstock.flow import (
    Arrived,
    Begin,
    Budget,
    Consumed,
    Deferred,
    Event,
    Failed,
    Fetch,
    Flow,
    Throttled,
    Tick,
    Waiting,
    Wanted,
)
from penstock.flow.choice import peer_of, sources_for, taken_over
from penstock.peers.members import Members
from penstock.simulate.cluster_job import ClusterJob, View
from penstock.simulate.cluster_link import Link
from penstock.simulate.cluster_net import SharedStore
from penstock.simulate.cluster_node import Answered, ClusterNode
from penstock.simulate.virtual import Call

STORE = "store"
STAGE_BYTES = 2 << 20
_FILLS_WAITING = 2
_FILLS_AT_ONCE = 32
_TEND_S = 0.25
_BATCHES_MAX = 64


class Read:
    """Units on their way: into the stage of a batch, or into the tier."""

    __slots__ = ("done", "got", "is_over", "num_open", "sources", "staged", "units", "why")

    def __init__(
        self,
        units: tuple[int, ...],
        sources: tuple[str, ...],
        why: str,
        done: Call,
        *,
        staged: bool,
    ) -> None:
        self.units, self.sources, self.why, self.done = units, sources, why, done
        self.staged = staged
        self.got: dict[int, int] = {}
        """Content by unit, as far as it has come."""
        self.num_open = 0
        """Requests under way."""
        self.is_over = False

    def missing(self) -> tuple[int, ...]:
        """What has not come."""
        return tuple(unit for unit in self.units if unit not in self.got)


class Batch:
    """A batch in the making."""

    __slots__ = ("content", "num_waiting", "step", "units")

    def __init__(self, step: int, units: list[int]) -> None:
        self.step, self.units = step, units
        self.content: dict[int, int] = {}
        self.num_waiting = 0


class ClusterRank:
    """One rank, from where its job stands."""

    def __init__(
        self,
        job: ClusterJob,
        node: ClusterNode,
        local: int,
        members: Members,
        *,
        store: SharedStore,
        others: list[ClusterNode],
        step: int,
    ) -> None:
        self._job, self.node, self._store = job, node, store
        self.local = local
        self.number = node.number * job.ranks + local
        self.members = members
        self.flow = Flow(budget=Budget(stage_bytes_max=STAGE_BYTES))
        self.links = {
            other.number: Link(node, other, self) for other in others if other is not node
        }
        self.step = step
        """The step that comes next."""
        self.delivered: list[tuple[int, list[int]]] = []
        """Steps, and what their batches had in them."""
        self.on_views: Callable[[frozenset[int]], None] = lambda lost: None
        self.peer_bytes = 0
        self._view: View = job.view()
        self._version = members.version
        self._planned = step
        self._stage: deque[Batch] = deque()
        self._reads: dict[int, Read] = {}
        self._num_fetches = self._num_home_fills = 0
        self._wake_s = math.inf
        self._taker: Call | None = None
        self._ahead = self._units_ahead(step)
        self._has_ahead = True
        self._is_tending = False
        self._events: deque[Event] = deque()

    @property
    def is_filling(self) -> bool:
        """Whether anything at home here is still to come by this rank."""
        return self._has_ahead or self._num_home_fills > 0

    @property
    def is_trying(self) -> bool:
        """Whether it has asked for anything that is at home here."""
        return self._num_home_fills > 0

    def is_home(self, unit: int) -> bool:
        """Return whether a unit is at home here, by what this rank knows."""
        return self._view.holders[unit][:1] == (self.node.number,)

    # -- what its training loop wants ----------------------------------------------------------

    def take(self, call: Call) -> None:
        """Have the next batch; be called when it is there."""
        self._taker = call
        if not (self._stage and not self._stage[0].num_waiting):
            self._tell(Waiting(step=self.step, at_s=self._now_s))
        self.look()
        self._give()

    def _give(self) -> None:
        if self._taker is None or not self._stage or self._stage[0].num_waiting:
            return
        batch, taker, self._taker = self._stage.popleft(), self._taker, None
        assert batch.step == self.step
        self.delivered.append((batch.step, [batch.content[unit] for unit in batch.units]))
        self.step += 1
        self._tell(Consumed(step=batch.step, at_s=self._now_s))
        taker()
        self.look()

    # -- planning ------------------------------------------------------------------------------

    @property
    def _now_s(self) -> float:
        return self.node.time.now_s

    def look(self) -> None:
        """Plan what may be planned now, batches before fills."""
        self._follow()
        while self._planned < self._job.num_steps and self._may_plan():
            self._plan()
        # Fills that other nodes owe do not count: these may be waiting for ours.
        if self._has_ahead and self._num_home_fills < _FILLS_WAITING * self.flow.limit(STORE):
            self._fill_ahead()

    def _may_plan(self) -> bool:
        if len(self._stage) >= _BATCHES_MAX:
            return False
        return not self._stage or self.flow.planned_bytes < self.flow.look_ahead_bytes

    def _follow(self) -> None:
        """Take over who is lost by now."""
        if self._version == self.members.version:
            return
        self._version = self.members.version
        lost = {int(name.rsplit("-", 1)[1]) for name in self.members.lost} - {self.node.number}
        gone = taken_over(lost, self._job.nodes)
        self._view = self._job.view(gone)
        self.on_views(gone)
        self._ahead, self._has_ahead = self._units_ahead(self.step), True

    def _plan(self) -> None:
        batch = Batch(self._planned, self._job.batch_of(self.number, self._planned))
        self._planned += 1
        self._stage.append(batch)
        placed = self._view.placed[self.node.number]
        far: dict[tuple[str, ...], list[int]] = {}
        fills: list[int] = []
        for unit in batch.units:
            if unit not in placed:
                far.setdefault(self._sources(unit), []).append(unit)
            elif unit in self.node.present:
                batch.content[unit] = unit
            else:
                fills += [unit] if self.node.claim(unit) else []
                self.node.when_filled(unit, partial(self._one_there, batch, unit))
                batch.num_waiting += 1
        fetches = [self._wanted_fill(unit, batch.step) for unit in fills]
        for sources, units in far.items():
            batch.num_waiting += 1
            why = "asked" if len(sources) > 1 else self._why_store(units[0])
            read = Read(tuple(units), sources, why, lambda: None, staged=True)
            read.done = partial(self._some_there, batch, read)
            fetches.append(self._wanted(read, batch.step))
        if fetches:
            self._tell(Wanted(fetches=tuple(fetches), at_s=self._now_s))

    def _why_store(self, unit: int) -> str:
        return "suspected" if self._job.view().holders[unit] else "bare"

    def _sources(self, unit: int) -> tuple[str, ...]:
        names = [
            self._job.name_of(node) for node in self._view.holders[unit] if node != self.node.number
        ]
        return sources_for(names, self._is_usable, STORE)

    def _is_usable(self, name: str) -> bool:
        return self.members.is_usable(name, self._now_s)

    def _units_ahead(self, step: int) -> Iterator[tuple[int, int]]:
        """Yield step and unit in the order of the job, from a step on until all were seen."""
        width = self._job.num_ranks * self._job.batch
        for number in range(step, step + self._job.steps):
            epoch, inside = divmod(number, self._job.steps)
            if epoch == self._job.epochs:
                return
            for unit in self._job.order[epoch][inside * width : (inside + 1) * width].tolist():
                yield number, unit

    def _fill_ahead(self) -> None:
        fetches: list[Fetch] = []
        mine, here = self.node.number, self.node
        for step, unit in self._ahead if not here.is_full else ():
            holders = self._view.holders[unit]
            is_mine = holders and holders[0] == mine and unit % self._job.ranks == self.local
            if is_mine and unit not in here.present and here.claim(unit):
                fetches.append(self._wanted_fill(unit, step))
                if len(fetches) == _FILLS_AT_ONCE:
                    break
        else:
            self._has_ahead = False
            here.look_at_parked()
        if fetches:
            self._tell(Wanted(fetches=tuple(fetches), at_s=self._now_s))

    def _wanted_fill(self, unit: int, step: int) -> Fetch:
        is_home = self.is_home(unit)
        # A copy comes from its home alone: two copies that waited for each other would wait long.
        homes = () if is_home else self._view.holders[unit][:1]
        names = [self._job.name_of(node) for node in homes]
        sources = sources_for(names, self._is_usable, STORE)
        why = "home" if is_home else "copy"
        filled = partial(self._filled, unit, is_home)
        self._num_home_fills += is_home
        return self._wanted(Read((unit,), sources, why, filled, staged=False), step)

    def _filled(self, unit: int, is_home: bool) -> None:
        self._num_home_fills -= is_home
        self.node.filled((unit,))

    def _wanted(self, read: Read, step: int) -> Fetch:
        number = self._num_fetches
        self._num_fetches += 1
        self._reads[number] = read
        size_bytes = sum(self._job.lengths[unit] for unit in read.units)
        return Fetch(
            number=number,
            step=step,
            size_bytes=size_bytes,
            sources=read.sources,
            staged=read.staged,
        )

    def _one_there(self, batch: Batch, unit: int) -> None:
        batch.content[unit] = unit
        batch.num_waiting -= 1
        self._give()

    def _some_there(self, batch: Batch, read: Read) -> None:
        batch.content.update(read.got)
        batch.num_waiting -= 1
        self._give()

    # -- the flow --------------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        """Tell the flow and do what it says; what comes of it at once is told after it."""
        self._events.append(event)
        if len(self._events) > 1:
            return
        while self._events:
            for action in self.flow.on(self._events[0]):
                assert isinstance(action, Begin), f"the store was given up: {action}"
                self._begin(action)
            self._events.popleft()
        wake_s = self.flow.wake_s
        if wake_s is not None and wake_s < self._wake_s:
            self._wake_s = wake_s
            self.node.at(wake_s, self._wake)

    def _wake(self) -> None:
        if self._now_s < self._wake_s:
            return
        self._wake_s = math.inf
        if self.flow.wake_s is not None:
            self._tell(Tick(at_s=self._now_s))

    def _begin(self, begin: Begin) -> None:
        read = self._reads[begin.number]
        peer = peer_of(begin.source)
        if peer is None:
            self._read_store(begin, read)
            return
        if not self._is_usable(peer):
            self._events.append(Failed(number=begin.number, copy=begin.copy, at_s=self._now_s))
            return
        read.num_open += 1
        missing = read.missing()
        node = int(peer.rsplit("-", 1)[1])
        self.links[node].ask(
            missing,
            # Whoever has only a copy has it by chance: to wait there could take an epoch.
            may_wait=all(self._view.holders[unit][:1] == (node,) for unit in missing),
            parked=partial(self._parked, begin),
            answered=partial(self._answered, begin, read, peer, missing),
            failed=partial(self._failed, begin, read),
        )

    def _read_store(self, begin: Begin, read: Read) -> None:
        why = read.why
        if len(read.sources) > 1:
            is_late = read.num_open > 0 or begin.copy == 0
            why = "late" if is_late else "failed"
        elif begin.copy:
            why = "again"
        missing = read.missing()
        read.num_open += 1
        size_bytes = sum(self._job.lengths[unit] for unit in missing)
        node, life = self.node, self.node.life
        told = Throttled(source=STORE, at_s=0.0)
        self._store.read(
            size_bytes,
            node=node.number,
            why=why,
            done=lambda: node.do(life, lambda: self._from_store(begin, read, missing)),
            told=lambda: node.do(life, lambda: self._tell(told)),
        )

    def _from_store(self, begin: Begin, read: Read, units: tuple[int, ...]) -> None:
        read.got.update((unit, unit) for unit in units if unit not in read.got)
        self._arrived(begin, read)

    def _parked(self, begin: Begin) -> None:
        self._tell(Deferred(number=begin.number, copy=begin.copy, at_s=self._now_s))

    def _answered(
        self, begin: Begin, read: Read, peer: str, asked: tuple[int, ...], answer: Answered
    ) -> None:
        self.members.hear(peer, answer.gossip, self._now_s)
        good = {unit: data for unit, data in answer.payload.items() if data == unit}
        read.got.update((unit, data) for unit, data in good.items() if unit not in read.got)
        self.peer_bytes += sum(self._job.lengths[unit] for unit in good)
        if len(good) < len(answer.payload):
            self.silent(peer, "broken", self._now_s)
        if len(good) < len(asked):
            self._failed(begin, read, "absent")
        else:
            self._arrived(begin, read)
        self._mind()

    def _arrived(self, begin: Begin, read: Read) -> None:
        read.num_open -= 1
        self._tell(Arrived(number=begin.number, copy=begin.copy, at_s=self._now_s))
        if not read.is_over:
            read.is_over = True
            assert not read.missing(), "it is not all there"
            read.done()
        self.look()

    def _failed(self, begin: Begin, read: Read, kind: str) -> None:
        read.num_open -= 1
        self._tell(Failed(number=begin.number, copy=begin.copy, at_s=self._now_s))
        self.look()

    # -- other nodes -----------------------------------------------------------------------------

    def say(self) -> bytes:
        """Return what to tell others."""
        return self.members.say()

    def hear(self, peer: str, data: bytes, at_s: float) -> None:
        """Take what another node says."""
        self.members.hear(peer, data, at_s)
        self._mind()

    def heard(self, peer: str, at_s: float) -> None:
        """Be told that a peer has answered."""
        self.members.heard(peer, at_s)

    def silent(self, peer: str, kind: str, at_s: float) -> None:
        """Be told that a peer failed."""
        self.members.silent(peer, kind, at_s)
        self._mind()

    def _mind(self) -> None:
        """Have those tried again who do not answer, beside the steps."""
        if self.members.suspects and not self._is_tending:
            self._is_tending = True
            self.node.after(_TEND_S, self._tend)

    def _tend(self) -> None:
        self._is_tending = False
        for name in self.members.due(self._now_s):
            self.greet(int(name.rsplit("-", 1)[1]))
        self._mind()

    def greet(self, node: int) -> None:
        """Ask a node whether it is there."""
        link = self.links[node]
        if link.outstanding:
            return
        hear = partial(self._greeted, self._job.name_of(node))
        link.ask((), may_wait=False, parked=lambda: None, answered=hear, failed=lambda kind: None)

    def _greeted(self, peer: str, answer: Answered) -> None:
        self.members.hear(peer, answer.gossip, self._now_s)
        self._mind()
        self.look()
