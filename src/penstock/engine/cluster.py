"""The nodes of a job as one cache: who keeps what, who can be asked, and who is gone.

Where a unit is at home is computed (`plan.homes`), from the nodes that were there when the job
began. Who can be asked is learnt on the way (`peers.members`). When a node is lost for all, its
share is at home with the others from then on. Nothing here is needed for a right batch: whoever
cannot be asked is passed over, and the store has everything.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.dataset.part import Ints
from penstock.engine.buffers import BufferPool
from penstock.engine.holding import Flags, Holding
from penstock.engine.peer_parts import ask_in_pieces
from penstock.engine.stats import Counters, PeerStats
from penstock.errors import PeerError
from penstock.flow.choice import PEERS_MAX, peer_of, peer_source, sources_for, taken_over
from penstock.peers.base import Answer, Ask
from penstock.plan.draws import NOBODY
from penstock.world import World

if TYPE_CHECKING:
    from penstock.engine.neighbours import Neighbours
    from penstock.engine.serving import Filling, Serving
    from penstock.peers.status import RunStatus
    from penstock.peers.transport import Asks
    from penstock.plan.homes import Homes

SOURCE = "peers"
"""What bytes of other nodes are counted as."""
_HOLDERS_MAX = 3
"""Of many copies of a unit, so many are thought of."""
_LOOK_S = 0.2
"""Between two looks whether somebody can be asked again."""
_ANSWERS_BYTES = 64 << 20
"""Memory for answers that is kept for the next ones."""
_EVENTS_MAX = 16

_log = logging.getLogger("penstock.loader")


@dataclass(frozen=True, kw_only=True)
class Carried:
    """What a cluster needs to be carried on: threads and files with an end."""

    client: Asks
    filling: Filling
    serving: Serving | None
    """Whoever serves the tiers here, in the first process of a node."""
    shelf: bytes
    """What the data set is called among the nodes of this run."""
    run_id: bytes
    node_of_rank: Ints
    closing: tuple[Callable[[], None], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where some units can come from."""

    names: tuple[str, ...]
    """Peers that can be asked, and last the store."""
    home: str
    """The one among them that will have the units if it does not yet; others may never."""


def _alike(rows: Ints) -> Iterator[tuple[list[int], Ints]]:
    """Yield the different columns of some rows, and the numbers of those columns."""
    kinds, back = np.unique(rows.T, axis=0, return_inverse=True)
    for number, kind in enumerate(kinds.tolist()):
        yield kind, np.flatnonzero(back.reshape(-1) == number)


class Cluster:
    """The other nodes of a job, as one rank sees them."""

    def __init__(
        self,
        holding: Holding,
        homes: Homes,
        neighbours: Neighbours,
        carried: Carried,
        *,
        world: World,
        counters: Counters,
    ) -> None:
        self._holding = holding
        self._homes = self._base = homes
        self._away = homes.without([world.node])
        """Where units are at home as long as others believe this node to be lost."""
        self._meanwhile: Homes | None = None
        """Where they were at home while a node was lost that is back."""
        self._neighbours = neighbours
        self._carried = carried
        self.shelf = carried.shelf
        self.filling = carried.filling
        self.run_id = carried.run_id
        self.me = world.node
        self._world = world
        self._counters = counters
        self._lock = threading.Lock()
        self._pool = BufferPool(_ANSWERS_BYTES)
        self._later = ThreadPoolExecutor(2, thread_name_prefix="penstock-peer-fill")
        self._version = neighbours.version
        self.homes_version = 0
        """Grows when homes have moved."""
        self._looked_s = 0.0
        self._usable = np.zeros(len(homes.nodes) + 1, bool)
        self._place()
        self._look()
        self.filling.are_at_home = self._are_at_home
        self._tending = Tending(self._tend, _LOOK_S)

    # -- who keeps what ------------------------------------------------------------------------

    @property
    def homes(self) -> Homes:
        """Where units are at home for the batches of this run: as it was agreed at its start."""
        return self._base

    @property
    def capacity_bytes(self) -> int:
        """What all nodes together may hold."""
        return sum(node.capacity_bytes for node in self._base.nodes)

    @property
    def node_of_rank(self) -> Ints:
        """The node of each rank of the world."""
        return self._carried.node_of_rank

    def follow(self) -> None:
        """Take over what has become known of other nodes since the last time."""
        if self._version != self._neighbours.version:
            with self._lock:
                self._version = self._neighbours.version
                names = self._neighbours.names
                lost = {names.index(name) for name in self._neighbours.lost} - {self.me}
                gone = taken_over(lost, len(names))
                if self._homes.lost - gone:
                    self._meanwhile = self._homes
                self._homes = self._base.without(gone)
                self._place()
                self.homes_version += 1
        if time.monotonic() - self._looked_s > _LOOK_S:
            self._look()

    def _place(self) -> None:
        try:
            self._holding.place(self._homes.spans.span_bytes, self._homes.holds(self.me))
        except OSError as error:
            _log.warning(
                "this node cannot keep what is at home here (%s); it is read from the store", error
            )

    def _look(self) -> None:
        self._looked_s = time.monotonic()
        self._usable[:-1] = self._neighbours.usable()  # The last one stands for nobody.

    def _holders(self, units: Ints) -> Ints:
        spans = self._homes.spans.number_of(self._holding.layout.offsets[units])
        return self._homes.holders[:_HOLDERS_MAX, spans]

    def is_mine(self, units: Ints, *, of_others: bool) -> Flags:
        """Return which units are at home here, and this rank's to fetch before they are needed.

        With `of_others` also those of the other ranks of this node, should they be late.
        """
        mine: Flags = self._holders(units)[0] == self.me
        if not of_others:
            mine = mine & (units % self._world.num_local_ranks == self._world.local_rank)
        return mine

    def _are_at_home(self, units: Ints) -> bool:
        return bool((self._holders(units)[0] == self.me).all())

    @property
    def fills_for_others(self) -> bool:
        """Whether this rank sees to it that all of the node's homes are filled: one of each."""
        return self._world.num_local_ranks > 1 and self._world.is_first_of_node

    def peers_of(self, units: Ints) -> Ints:
        """Return other nodes that can be asked for each unit, a row of the best; -1 for none.

        Whoever stood in for a node that is back has its share, at once; that node may be behind.
        """
        holders = self._holders(units)
        if self._meanwhile is not None:
            spans = self._homes.spans.number_of(self._holding.layout.offsets[units])
            stood_in = self._meanwhile.holders[0, spans]
            stood_in = np.where(stood_in == holders[0], NOBODY, stood_in)
            holders = np.vstack([stood_in, holders])
        can = self._usable[holders]
        out = np.full((PEERS_MAX, len(units)), -1, np.int64)
        every = np.arange(len(units))
        for row in out:
            first = can.argmax(0)
            found = can[first, every]
            row[found] = holders[first, every][found]
            can[first, every] = False
        return out

    def by_sources(self, units: Ints, store: str) -> Iterator[tuple[Sources, Ints]]:
        """Yield sources, and the numbers of those units that should come from them."""
        rows = np.vstack([self.peers_of(units), self._holders(units)[:1]])
        for row, numbers in _alike(rows):
            names = [self._neighbours.names[node] for node in row[:-1] if node >= 0]
            home = "" if row[-1] < 0 else peer_source(self._neighbours.names[row[-1]])
            yield Sources(names=sources_for(names, lambda _: True, store), home=home), numbers

    def by_home(self, units: Ints, store: str) -> Iterator[tuple[Sources, Ints]]:
        """Yield the homes of units that are to be copied from there, and their numbers.

        What is at home here, or with nobody who can be asked, has no source but the store. Copies
        are not made from copies: two nodes could wait for each other's.
        """
        homes = self._holders(units)[:1]
        for (node,), numbers in _alike(np.where(self._usable[homes], homes, -1)):
            names = [] if node < 0 else [self._neighbours.names[node]]
            home = "" if node < 0 else peer_source(names[0])
            yield Sources(names=sources_for(names, lambda _: True, store), home=home), numbers

    def stand_ins(self, units: Ints) -> Iterator[tuple[str, Ints]]:
        """Yield sources that have kept units in our place, and the numbers of those units.

        None but "" as long as nobody has missed this node, and for units of other homes.
        """
        if not self._neighbours.was_missed:
            yield "", np.arange(len(units))
            return
        spans = self._away.spans.number_of(self._holding.layout.offsets[units])
        is_ours = self._base.holders[0, spans] == self.me
        for (node,), numbers in _alike(np.where(is_ours, self._away.holders[:1, spans], -1)):
            yield "" if node < 0 else peer_source(self._neighbours.names[node]), numbers

    # -- asking ----------------------------------------------------------------------------------

    def ask(
        self,
        source: str,
        ask: Ask,
        into: memoryview,
        *,
        parked: Callable[[], None],
        done: Callable[[Answer | PeerError], None],
    ) -> None:
        """Ask a peer by the name of its source; `done` is called once, in any thread."""
        name = peer_of(source) or ""
        if not self._neighbours.is_usable(name):
            # It fell silent since this was planned: a step waits for that once, not twice.
            done(PeerError(f"{source} cannot be asked now", peer=name, kind="lost"))
            return
        member, client = self._neighbours.member(name), self._carried.client

        def ask_one(ask: Ask, into: memoryview, done: Callable[[Answer | PeerError], None]) -> None:
            client.ask(member.name, member.addresses, ask, into, parked=parked, done=done)

        ask_in_pieces(ask, into, ask_one, done)

    def blame(self, source: str, what: str) -> None:
        """Take note that a peer has sent something wrong."""
        _log.warning("%s sent %s; it is read from the store instead", source, what)
        self._neighbours.silent(peer_of(source) or "", "broken")

    def later(self, work: Callable[[], None]) -> None:
        """Have something done by a thread that may wait for a disk."""
        self._later.submit(work)

    def buffer(self, size_bytes: int) -> memoryview:
        """Return memory for an answer."""
        return self._pool.view(size_bytes)

    def count(self, size_bytes: int, num_ranges: int, seconds: float) -> None:
        """Count what came from a peer."""
        self._counters.add_reads(SOURCE, size_bytes, num_ranges, seconds)

    # -- now and then ----------------------------------------------------------------------------

    def _tend(self) -> None:
        """Try those again who did not answer, beside the steps; tell the service how far we are."""
        for member in self._neighbours.due():
            nothing = Ask(shelf=self.shelf, ranges=np.zeros((0, 5), np.int64))
            self._carried.client.ask(
                member.name,
                member.addresses,
                nothing,
                memoryview(bytearray()),
                parked=lambda: None,
                done=lambda answer: None,  # The client itself says whom it has reached.
            )
        if self._carried.serving is not None:
            self._carried.serving.tend()

    # -- for people ------------------------------------------------------------------------------

    def stats(self) -> tuple[PeerStats, ...]:
        """Return what is known of the other nodes."""
        counts = self._carried.client.counts()
        out = []
        for name in self._neighbours.names:
            if name == self._neighbours.me:
                continue
            member, count = self._neighbours.member(name), counts.get(name, {})
            out.append(
                PeerStats(
                    host=member.host,
                    node=member.node,
                    size_bytes=int(count.get("bytes", 0)),
                    requests=int(count.get("requests", 0)),
                    state=self._state(name),
                )
            )
        return tuple(out)

    def _state(self, name: str) -> str:
        if name in self._neighbours.lost:
            return "lost"
        return "suspect" if name in self._neighbours.suspects else "there"

    def status(self) -> RunStatus:
        """Return how this run does on this node, for `penstock cluster`."""
        from penstock.peers.status import LinkStatus, Reads, RunStatus

        read = self._counters.counted()
        counts = self._carried.client.counts()
        return RunStatus(
            run=self._carried.run_id.hex(),
            dataset=self._holding.uri,
            cursor=self.filling.cursor(),
            is_filling=self.filling.is_filling(),
            reads=Reads(
                tier_bytes=read.tier_bytes,
                peer_bytes=read.peer_bytes,
                store_bytes=read.store_bytes,
                num_ranks=1,
            ),
            links=tuple(
                LinkStatus(peer=name, in_bytes=int(c["bytes"]), requests=int(c["requests"]))
                for name, c in counts.items()
            ),
            suspects=tuple(sorted(self._neighbours.suspects)),
            lost=tuple(sorted(self._neighbours.lost)),
            log=tuple(self.log[-_EVENTS_MAX:]),
        )

    @property
    def log(self) -> list[str]:
        """What happened to other nodes, in sentences."""
        return self._neighbours.log

    def close(self) -> None:
        """Ask nobody any more, and stop serving once the others have what they want."""
        self._tending.stop()
        self._carried.client.stop()
        self._later.shutdown(wait=True)
        for close in self._carried.closing:
            close()


class Tending:
    """A thread that does something now and then."""

    def __init__(self, tend: Callable[[], None], every_s: float) -> None:
        self._tend = tend
        self._every_s = every_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="penstock-tend", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while not self._stopped.wait(self._every_s):
            try:
                self._tend()
            except Exception:  # Whatever it is, the job can do without.
                _log.exception("looking after other nodes failed; the run goes on")
                self._stopped.wait(1.0)

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)
