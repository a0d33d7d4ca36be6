"""A rank of a simulated cluster: the decisions of an engine, in virtual time.

The code of a real rank decides: how far to plan and when to fill (`flow.planning`), which route a
sample's bytes take (`flow.routes`), which nodes have them (`flow.holders`), in which order the tier
is filled (`flow.filling`), and which request begins when (`flow.Flow`). This module does what an
engine does with threads: it keeps the batches that are being made and the fills that several
batches wait for, and exchanges messages with other nodes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import numpy.typing as npt

from penstock.dataset.part import Ints
from penstock.engine.peers.members import Members
from penstock.flow import Consumed, Fetch, Waiting, Wanted
from penstock.flow.filling import FillCourse, FillProgress
from penstock.flow.holders import Holders, Sources
from penstock.flow.planning import may_fill, may_plan
from penstock.flow.routes import Route, routes_of
from penstock.simulate.virtual import Call
from testkit.virtual_cluster.job import STAGE_BYTES, ClusterJob
from testkit.virtual_cluster.link import ClusterLink
from testkit.virtual_cluster.net import SharedStore
from testkit.virtual_cluster.node import ClusterNode, UnitReply
from testkit.virtual_cluster.reads import STORE, ClusterRead, ClusterReads

_FILL_SAMPLES = 32
"""A small data set is looked through in small parts; else all of it would be fetched at once."""
_MAKERS = 2
_TEND_S = 0.25
_FROM_STORE = Sources(names=(STORE,), home="")


class ClusterBatch:
    """A batch that is being made."""

    __slots__ = ("content", "num_waiting", "size_bytes", "step", "units")

    def __init__(self, step: int, units: list[int], size_bytes: int) -> None:
        self.step, self.units = step, units
        self.size_bytes = size_bytes
        """Memory for the batch and for what is staged for it alone."""
        self.content: dict[int, int] = {}
        self.num_waiting = 0


class ClusterRank:
    """One rank, from the step that its job has reached."""

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
        self._job, self.node = job, node
        self.number = node.number * job.ranks + local
        self.members = members
        self.holders = Holders(
            job.homes,
            job.offsets,
            node=node.number,
            local_rank=local,
            num_local_ranks=job.ranks,
        )
        self.links = {
            other.number: ClusterLink(node, other, self) for other in others if other is not node
        }
        self.reads = ClusterReads(
            job,
            node,
            self.holders,
            members,
            store=store,
            links=self.links,
            heard=self._heard,
            moved=self.look,
        )
        self.flow = self.reads.driver.flow
        self.step = step
        """The next step."""
        self.delivered: list[tuple[int, list[int]]] = []
        """Steps, and the content of their batches."""
        self.on_views: Callable[[frozenset[int]], None] = lambda lost: None
        self._version = members.version
        self._planned = step
        self._was_near = False
        self._stage: deque[ClusterBatch] = deque()
        self._fills: dict[int, list[Call]] = {}
        """Units that this rank fetches into the tier, and the calls that wait for each."""
        self._taker: Call | None = None
        self._course: FillCourse[int, int] = FillCourse(
            self._steps_from, step, samples_at_once=_FILL_SAMPLES
        )
        self._progress = FillProgress()
        self._is_tending = False

    # -- for the server of its node ------------------------------------------------------------

    def progress_mark(self) -> int:
        """Return a number that grows as long as this rank fetches units that are at home here."""
        return self._progress.progress_mark(len(self._job.lengths), self._now_s)

    def is_coming(self, unit: int) -> bool:
        """Return whether an absent unit may still arrive."""
        return not self._progress.is_over and self.holders.are_at_home(np.array([unit]))

    # -- for its training loop -----------------------------------------------------------------

    def take(self, call: Call) -> None:
        """Ask for the next batch; call back when it is there."""
        self._taker = call
        if not (self._stage and not self._stage[0].num_waiting):
            self.reads.driver.tell(Waiting(step=self.step, at_s=self._now_s))
        self.look()
        self._give()

    def _give(self) -> None:
        if self._taker is None or not self._stage or self._stage[0].num_waiting:
            return
        batch, taker, self._taker = self._stage.popleft(), self._taker, None
        assert batch.step == self.step
        self.delivered.append((batch.step, [batch.content[unit] for unit in batch.units]))
        self.step += 1
        self.reads.driver.tell(Consumed(step=batch.step, at_s=self._now_s))
        taker()
        self.look()

    # -- planning ------------------------------------------------------------------------------

    @property
    def _now_s(self) -> float:
        return self.node.time.now_s

    def look(self) -> None:
        """Plan all that may be planned now, batches before fills."""
        self._follow()
        while self._planned < self._job.num_steps and self._may_plan():
            self._plan()
        while self._may_fill():
            self._fill_ahead()

    def _may_plan(self) -> bool:
        return may_plan(
            num_batches=len(self._stage),
            size_bytes=sum(batch.size_bytes for batch in self._stage),
            was_near=self._was_near,
            num_makers=_MAKERS,
            stage_bytes_max=STAGE_BYTES,
            look_ahead_bytes=lambda: self.flow.look_ahead_bytes,
        )

    def _may_fill(self) -> bool:
        return not self._course.is_over(self.holders.version) and may_fill(
            num_waiting=self.reads.num_waiting, requests_limit=self.flow.limit(STORE)
        )

    def _follow(self) -> None:
        """Follow changes of the membership."""
        if self._version != self.members.version:
            self._version = self.members.version
            self.on_views(self.holders.set_lost(self.members.lost))

    def _look_around(self) -> None:
        """Record which nodes can be asked now."""
        self.holders.set_usable([self.reads.is_usable(node.name) for node in self._job.homes.nodes])

    def _plan(self) -> None:
        self._look_around()
        units = np.array(self._job.batch_of(self.number, self._planned))
        routes = routes_of(
            self._has_place(units), can_come_from_peers=lambda: self.holders.peers_of(units)[0] >= 0
        )
        staged = self._size_bytes(units[routes != Route.TIER])
        batch = ClusterBatch(self._planned, units.tolist(), self._size_bytes(units) + staged)
        self._planned += 1
        self._stage.append(batch)
        fetches = self._fetches_of(batch, units[routes == Route.TIER])
        alone = units[routes == Route.ALONE]
        if len(alone):
            fetches.append(self._staged(batch, alone, _FROM_STORE, "alone"))
        far = units[routes == Route.PEER]
        for sources, numbers in self.holders.by_sources(far, STORE) if len(far) else ():
            fetches.append(self._staged(batch, far[numbers], sources, "asked"))
        self._was_near = not batch.num_waiting
        self._want(fetches)

    def _has_place(self, units: Ints) -> npt.NDArray[np.bool_]:
        """Return which units lie in the tier, or have a place there and room."""
        kept = self.holders.kept_here()[self._job.spans_of(units)]
        if self.node.is_full:
            kept &= np.array([unit in self.node.present for unit in units.tolist()], bool)
        return kept

    def _size_bytes(self, units: Ints) -> int:
        return sum(self._job.lengths[unit] for unit in units.tolist())

    def _want(self, fetches: list[Fetch]) -> None:
        if fetches:
            self.reads.driver.tell(Wanted(fetches=tuple(fetches), at_s=self._now_s))

    def _staged(self, batch: ClusterBatch, units: Ints, sources: Sources, why: str) -> Fetch:
        """Return the fetch of units that are read for one batch only."""
        batch.num_waiting += 1
        read = ClusterRead(tuple(units.tolist()), sources, why, lambda: None, staged=True)
        read.done = partial(self._some_there, batch, read)
        return self.reads.fetch_of(read, batch.step)

    def _some_there(self, batch: ClusterBatch, read: ClusterRead) -> None:
        batch.content.update(read.got)
        batch.num_waiting -= 1
        self._give()

    # -- filling -------------------------------------------------------------------------------

    def _fetches_of(self, batch: ClusterBatch, units: Ints) -> list[Fetch]:
        """Return new fetches of units that a batch needs in the tier; it waits for old ones too."""
        new: list[int] = []
        for unit in units.tolist():
            if unit in self.node.present:
                batch.content[unit] = unit
                continue
            new += [] if unit in self._fills else [unit]
            batch.num_waiting += 1
            self._fills.setdefault(unit, []).append(partial(self._one_there, batch, unit))
        return self._fill_fetches(np.array(new, np.int64), batch.step)

    def _one_there(self, batch: ClusterBatch, unit: int) -> None:
        batch.content[unit] = unit
        batch.num_waiting -= 1
        self._give()

    def _steps_from(self, step: int) -> Iterator[int]:
        """Yield steps from one on, until every sample has come once."""
        return iter(range(step, min(step + self._job.steps, self._job.num_steps)))

    def _fill_ahead(self) -> None:
        self._look_around()
        if self._course.has_moved(self.holders.version, self._planned, self._planned):
            self._progress = FillProgress()
        width = self._job.num_ranks * self._job.batch
        found = self._course.next(lambda step: width, for_others=self.holders.fills_for_others)
        if not found:
            self._progress.end()
            self.node.look_at_parked()
            return
        begun: list[int] = []
        fetches: list[Fetch] = []
        for _, step in found:
            units = self._job.units_of_step(step)
            mine = self.holders.is_mine(units, of_others=self._course.is_for_others)
            absent = [u for u in units[mine & self._has_place(units)].tolist() if not self._has(u)]
            begun += absent
            new = [unit for unit in absent if unit not in self._fills]
            for unit in new:
                self._fills[unit] = []
            fetches += self._fill_fetches(np.array(new, np.int64), step)
        epoch, inside = divmod(found[-1][1], self._job.steps)
        self._progress.began(begun, epoch, (inside + 1) * width)
        self._want(fetches)

    def _has(self, unit: int) -> bool:
        return unit in self.node.present

    def _fill_fetches(self, units: Ints, step: int) -> list[Fetch]:
        """Return fetches of units into the tier: from their homes, or from the store."""
        fetches: list[Fetch] = []
        for sources, numbers in self.holders.by_home(units, STORE) if len(units) else ():
            for unit in units[numbers].tolist():
                why = "copy" if sources.home else "home"
                filled = partial(self._filled, unit)
                read = ClusterRead((unit,), sources, why, filled, staged=False)
                fetches.append(self.reads.fetch_of(read, step))
        return fetches

    def _filled(self, unit: int) -> None:
        self._progress.done(unit)
        if self._progress.is_over:
            self.node.look_at_parked()  # Filling has ended; units still missing will not arrive.
        for call in self._fills.pop(unit):
            call()

    # -- other nodes ---------------------------------------------------------------------------

    def say(self) -> bytes:
        """Return the message for other nodes."""
        return self.members.say()

    def hear(self, peer: str, data: bytes, at_s: float) -> None:
        """Handle the message of another node."""
        self.members.hear(peer, data, at_s)
        self._mind()

    def _heard(self, peer: str, data: bytes) -> None:
        self.hear(peer, data, self._now_s)

    def heard(self, peer: str, at_s: float) -> None:
        """Record that a peer has replied."""
        self.members.heard(peer, at_s)

    def silent(self, peer: str, kind: str, at_s: float) -> None:
        """Record that a peer has failed, and how."""
        self.members.silent(peer, kind, at_s)
        self._mind()

    def _mind(self) -> None:
        """Start to greet suspects again, beside the steps, until none is left."""
        if self.members.suspects and not self._is_tending:
            self._is_tending = True
            self.node.after(_TEND_S, self._tend)

    def _tend(self) -> None:
        self._is_tending = False
        for name in self.members.due(self._now_s):
            self.greet(int(name.rsplit("-", 1)[1]))
        self._mind()

    def greet(self, node: int) -> None:
        """Ask a node whether it is alive."""
        link = self.links[node]
        if link.outstanding:
            return
        hear = partial(self._greeted, self._job.name_of(node))
        link.ask((), may_wait=False, parked=lambda: None, answered=hear, failed=lambda kind: None)

    def _greeted(self, peer: str, answer: UnitReply) -> None:
        self._heard(peer, answer.gossip)
        self.look()
