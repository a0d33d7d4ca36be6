"""Reads of a simulated rank: from peers or the store, into a batch or the tier of its node.

It stands for `engine.fetcher`, `engine.fills` and `engine.peer_reads`, without threads and sockets.
The flow decides which request begins when; `flow.reading` decides how long a rank waits for a unit
that another rank of its node has claimed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from penstock.engine.peers.members import Members
from penstock.flow import Begin, Deferred, Fetch, Flow, FlowBudget
from penstock.flow.choice import peer_of
from penstock.flow.holders import Holders, Sources
from penstock.flow.reading import ClaimPatience, stores_of
from penstock.simulate.driver import FlowDriver
from penstock.simulate.virtual import Call
from testkit.virtual_cluster.job import STAGE_BYTES, ClusterJob
from testkit.virtual_cluster.link import ClusterLink
from testkit.virtual_cluster.net import SharedStore
from testkit.virtual_cluster.node import ClusterNode, UnitReply

STORE = "store"


class ClusterRead:
    """Units in flight: several into the stage of a batch, or one into the tier."""

    __slots__ = ("done", "got", "is_over", "num_open", "sources", "staged", "units", "why")

    def __init__(
        self, units: tuple[int, ...], sources: Sources, why: str, done: Call, *, staged: bool
    ) -> None:
        self.units, self.sources, self.why, self.done = units, sources, why, done
        self.staged = staged
        assert staged or len(units) == 1, "a tier takes one unit at a time"
        self.got: dict[int, int] = {}
        """Content by unit, as far as it has arrived."""
        self.num_open = 0
        """Requests in flight."""
        self.is_over = False

    @property
    def is_of_peer(self) -> bool:
        """Whether a peer is asked first."""
        return peer_of(self.sources.names[0]) is not None

    def missing(self) -> tuple[int, ...]:
        """Return the units that have not arrived."""
        return tuple(unit for unit in self.units if unit not in self.got)


class ClusterReads:
    """Carries out the reads of one rank."""

    def __init__(
        self,
        job: ClusterJob,
        node: ClusterNode,
        holders: Holders,
        members: Members,
        *,
        store: SharedStore,
        links: dict[int, ClusterLink],
        heard: Callable[[str, bytes], None],
        moved: Callable[[], None],
    ) -> None:
        """`heard` takes membership messages of peers; `moved` is called after each reply."""
        self._job, self._node, self._store = job, node, store
        self._holders, self._members, self._links = holders, members, links
        self._heard, self._moved = heard, moved
        flow = Flow(budget=FlowBudget(stage_bytes_max=STAGE_BYTES))
        self.driver = FlowDriver(flow, now_s=lambda: self._now_s, at=node.at, begin=self._begin)
        self._patience = ClaimPatience()
        self._reads: dict[int, ClusterRead] = {}
        self._num_fetches = 0
        self.num_waiting = 0
        """Reads from the store that are wanted and not done."""
        self.peer_bytes = 0

    @property
    def _now_s(self) -> float:
        return self._node.time.now_s

    def is_usable(self, name: str) -> bool:
        """Return whether a peer can be asked now."""
        return name != self._node.name and self._members.is_usable(name, self._now_s)

    def fetch_of(self, read: ClusterRead, step: int) -> Fetch:
        """Return a read as the flow knows it."""
        number = self._num_fetches
        self._num_fetches += 1
        self._reads[number] = read
        self.num_waiting += not read.is_of_peer
        return Fetch(
            number=number,
            step=step,
            size_bytes=self._size_bytes(read.units),
            sources=read.sources.names,
            staged=read.staged,
        )

    def _size_bytes(self, units: tuple[int, ...]) -> int:
        return sum(self._job.lengths[unit] for unit in units)

    def _begin(self, begin: Begin) -> None:
        read = self._reads[begin.number]
        peer = peer_of(begin.source)
        read.num_open += 1
        if peer is not None:
            self._ask(begin, read, peer)
        elif read.staged:
            self._read_store(begin, read, self._why(begin, read))
        elif begin.attempt == 0 or read.num_open == 1:
            give_up_s = self._now_s + self._patience.seconds(
                stores_of(self.driver.flow.rates()), self._now_s
            )
            self._fill(begin, read, give_up_s, has_waited=False)
        else:
            # A second attempt claims nothing and waits for no claim: the first one takes too long.
            self._read_store(begin, read, self._why(begin, read))

    def _over(
        self, begin: Begin, read: ClusterRead, *, moved: bool = True, num_retries: int = 0
    ) -> None:
        """Handle a request that has brought all missing units."""
        read.num_open -= 1
        self.driver.arrived(begin, moved=moved, num_retries=num_retries)
        if not read.is_over:
            read.is_over = True
            assert not read.missing(), "it is not all there"
            self.num_waiting -= not read.is_of_peer
            read.done()
        self._moved()

    def _failed(self, begin: Begin, read: ClusterRead, kind: str) -> None:
        read.num_open -= 1
        self.driver.failed(begin)
        self._moved()

    # -- the store -------------------------------------------------------------------------------

    def _why(self, begin: Begin, read: ClusterRead) -> str:
        """Return under which reason bytes of the store are counted."""
        if len(read.sources.names) > 1:
            is_late = read.num_open > 1 or begin.attempt == 0
            return "late" if is_late else "failed"
        return "again" if begin.attempt else read.why

    def _read_store(
        self,
        begin: Begin,
        read: ClusterRead,
        why: str,
        *,
        claimed: bool = False,
        moved: bool = True,
    ) -> None:
        units = read.missing()
        node, life = self._node, self._node.life

        def came(num_retries: int) -> None:
            for unit in units:
                read.got.setdefault(unit, unit)
            if claimed:
                node.fill(read.units[0])
            self._over(begin, read, moved=moved, num_retries=num_retries)

        self._store.read(
            self._size_bytes(units),
            node=node.number,
            why=why,
            done=lambda num_retries: node.do(life, lambda: came(num_retries)),
        )

    # -- the tier --------------------------------------------------------------------------------

    def _fill(self, begin: Begin, read: ClusterRead, give_up_s: float, *, has_waited: bool) -> None:
        """Fetch a unit that no other rank is fetching; else wait for that rank, up to a time."""
        unit, node = read.units[0], self._node
        if unit in node.present or unit in read.got:
            read.got[unit] = unit
            self._over(begin, read, moved=False)
        elif node.claim(unit):
            self._bring(begin, read, moved=not has_waited)
        elif self._now_s >= give_up_s:
            self._patience.gave_up(self._now_s)
            self._read_store(begin, read, "claimed", moved=False)
        else:
            is_waiting = True

            def look() -> None:
                nonlocal is_waiting
                if is_waiting:
                    is_waiting = False
                    self._fill(begin, read, give_up_s, has_waited=True)

            node.when_free(unit, look)
            node.at(give_up_s, look)

    def _bring(self, begin: Begin, read: ClusterRead, *, moved: bool) -> None:
        """Fetch a claimed unit: from the node that stood in for ours, else from the store."""
        why = self._why(begin, read)
        from_store = partial(self._read_store, begin, read, why, claimed=True, moved=moved)
        units = np.array(read.units)
        source, _ = next(self._holders.stand_ins(units, was_missed=self._members.was_missed))
        peer = peer_of(source)
        if peer is None or not self.is_usable(peer):
            from_store()
            return

        def answered(answer: UnitReply) -> None:
            self._take(read, peer, answer)
            if read.missing():
                from_store()
            else:
                self._node.fill(read.units[0])
                self._over(begin, read)

        self._links[self._number_of(peer)].ask(
            read.units,
            may_wait=False,
            parked=lambda: None,
            answered=answered,
            failed=lambda kind: from_store(),
        )

    # -- other nodes -----------------------------------------------------------------------------

    @staticmethod
    def _number_of(peer: str) -> int:
        return int(peer.rsplit("-", 1)[1])

    def _ask(self, begin: Begin, read: ClusterRead, peer: str) -> None:
        if not self.is_usable(peer):
            # It fell silent after this was planned. A step waits for a silence once, not twice.
            read.num_open -= 1
            self.driver.failed(begin)
            return
        missing = read.missing()
        self._links[self._number_of(peer)].ask(
            missing,
            may_wait=read.sources.may_wait_at(begin.source),
            parked=partial(self._parked, begin),
            answered=partial(self._answered, begin, read, peer),
            failed=partial(self._failed, begin, read),
        )

    def _parked(self, begin: Begin) -> None:
        self.driver.tell(Deferred(number=begin.number, attempt=begin.attempt, at_s=self._now_s))

    def _answered(self, begin: Begin, read: ClusterRead, peer: str, answer: UnitReply) -> None:
        self._take(read, peer, answer)
        if read.missing():
            self._failed(begin, read, "absent")
            return
        if not read.staged and self._node.claim(read.units[0]):
            self._node.fill(read.units[0])
        self._over(begin, read)

    def _take(self, read: ClusterRead, peer: str, answer: UnitReply) -> None:
        """Keep the good units of a reply, and report the peer if one is corrupt."""
        good = {unit: data for unit, data in answer.payload.items() if data == unit}
        for unit, data in good.items():
            read.got.setdefault(unit, data)
        self.peer_bytes += self._size_bytes(tuple(good))
        if len(good) < len(answer.payload):
            self._members.silent(peer, "broken", self._now_s)
        self._heard(peer, answer.gossip)
