"""The nodes of a job as one cache: which node keeps what, which can be asked, which is lost.

The home of a unit is computed (`flow.layout.homes`) from the nodes that met when the job began.
Which nodes can be asked is learnt on the way (`engine.peers.members`). When a node is lost for the
whole job, its share moves to the others. No batch depends on any of this: a node that cannot be
asked is passed over, and the store has everything.
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
from penstock.engine.local_tiers import LocalTiers
from penstock.engine.peer_reads import AnswerDone, PeerQuestion, ask_in_pieces
from penstock.engine.peers.base import Answer, Ask
from penstock.engine.stats import Counters, PeerStats
from penstock.errors import PeerError
from penstock.flow.choice import peer_of
from penstock.flow.holders import Holders
from penstock.trace import Flag, Kind
from penstock.world import World

if TYPE_CHECKING:
    from penstock.engine.peers.client import PeerClient
    from penstock.engine.peers.status import RunStatus
    from penstock.engine.serving import HomeFill, TierServer
    from penstock.engine.shared_members import SharedMembers
    from penstock.flow.layout.homes import Homes

SOURCE = "peers"
"""The source under which bytes of other nodes are counted."""
_LOOK_S = 0.2
"""Between two looks which nodes can be asked again."""
_ANSWERS_BYTES = 64 << 20
"""Memory of answers that is kept for later answers."""
_EVENTS_MAX = 16
_CLOCK_S = 1.0
"""How long the first node may take to tell its clock."""

_log = logging.getLogger("penstock.loader")


@dataclass(frozen=True, kw_only=True)
class ClusterConnections:
    """The parts of a cluster that have threads and files, and how to close them."""

    client: PeerClient
    home_fill: HomeFill
    serving: TierServer | None
    """The server of the tiers here; None but in the first process of a node."""
    shelf: bytes
    """The name of the data set among the nodes of this run."""
    run_id: bytes
    node_of_rank: Ints
    closing: tuple[Callable[[], None], ...] = ()


class Cluster:
    """The other nodes of a job, as one rank sees them."""

    def __init__(
        self,
        local_tiers: LocalTiers,
        homes: Homes,
        shared_members: SharedMembers,
        connections: ClusterConnections,
        *,
        world: World,
        counters: Counters,
    ) -> None:
        self._local_tiers = local_tiers
        self.holders = Holders(
            homes,
            local_tiers.layout.offsets,
            node=world.node,
            local_rank=world.local_rank,
            num_local_ranks=world.num_local_ranks,
        )
        """Which node keeps what, as far as this rank knows."""
        self._shared_members = shared_members
        self._connections = connections
        self.shelf = connections.shelf
        self.home_fill = connections.home_fill
        self.run_id = connections.run_id
        self._counters = counters
        self._lock = threading.Lock()  # Held while homes move: only one thread may place units.
        self._pool = BufferPool(_ANSWERS_BYTES)
        self._fill_threads = ThreadPoolExecutor(2, thread_name_prefix="penstock-peer-fill")
        self._version = shared_members.version
        self.homes_version = 0
        """Grows when homes have moved, after units that came to this node have their place."""
        self._looked_s = 0.0
        self._place()
        self._update_usable()
        self.home_fill.are_at_home = self.holders.are_at_home
        self._tending = PeriodicThread(self._tend, _LOOK_S)

    # -- homes ---------------------------------------------------------------------------------

    @property
    def homes(self) -> Homes:
        """The homes that the nodes agreed on at the start; which rank uses what depends on them."""
        return self.holders.base

    @property
    def capacity_bytes(self) -> int:
        """Bytes that all nodes together may hold."""
        return sum(node.capacity_bytes for node in self.homes.nodes)

    @property
    def node_of_rank(self) -> Ints:
        """The node of each rank of the world."""
        return self._connections.node_of_rank

    def take_over_news(self) -> None:
        """Take over news of other nodes since the last call."""
        if self._version != self._shared_members.version:
            with self._lock:
                self._version = self._shared_members.version
                self.holders.set_lost(self._shared_members.lost)
                self._place()
                # Last, because a thread that sees the new version expects the units to have places.
                self.homes_version = self.holders.version
        if time.monotonic() - self._looked_s > _LOOK_S:
            self._update_usable()

    def _place(self) -> None:
        try:
            self._local_tiers.place(self.homes.spans.span_bytes, self.holders.kept_here())
        except OSError as error:
            _log.warning(
                "this node cannot keep what is at home here (%s); it is read from the store", error
            )

    def _update_usable(self) -> None:
        self._looked_s = time.monotonic()
        self.holders.set_usable(self._shared_members.usable())

    def stand_ins(self, units: Ints) -> Iterator[tuple[str, Ints]]:
        """Yield sources that have kept units in our place, each with the numbers of its units."""
        return self.holders.stand_ins(units, was_missed=self._shared_members.was_missed)

    # -- asking ----------------------------------------------------------------------------------

    def ask(
        self,
        source: str,
        ask: Ask,
        into: memoryview,
        *,
        parked: Callable[[], None],
        done: AnswerDone,
    ) -> None:
        """Ask a peer by the name of its source; `done` is called once, in any thread."""
        name = peer_of(source) or ""
        if not self._shared_members.is_usable(name):
            # It fell silent after this was planned; only one step shall wait for its timeout.
            done(PeerError(f"{source} cannot be asked now", peer=name, kind="lost"))
            return
        member, client = self._shared_members.member(name), self._connections.client

        def ask_one(ask: Ask, into: memoryview, done: AnswerDone) -> None:
            client.ask(member.name, member.addresses, ask, into, parked=parked, done=done)

        ask_in_pieces(ask, into, ask_one, done)

    def blame(self, source: str, what: str) -> None:
        """Record that a peer has sent wrong bytes."""
        _log.warning("%s sent %s; it is read from the store instead", source, what)
        self._shared_members.silent(peer_of(source) or "", "broken")

    def run_in_thread(self, work: Callable[[], None]) -> None:
        """Call a function in a thread that may wait for a disk."""
        self._fill_threads.submit(work)

    def buffer(self, size_bytes: int) -> memoryview:
        """Return memory for an answer."""
        return self._pool.view(size_bytes)

    def begun(self, source: str) -> PeerQuestion:
        """Return a question that begins now, to be given to `count` or `failed`."""
        recorder = self._counters.recorder
        if recorder is None:
            return PeerQuestion(source, 0)
        return PeerQuestion(source, time.perf_counter_ns(), *recorder.doing)

    def count(self, asked: PeerQuestion, size_bytes: int, num_ranges: int, answer: Answer) -> None:
        """Count the bytes of an answer."""
        self._counters.add_reads(SOURCE, size_bytes, num_ranges, answer.seconds)
        if self._counters.recorder is not None and asked.begin_ns:
            now_ns = time.perf_counter_ns()
            waited_ns = now_ns - asked.begin_ns - round(answer.seconds * 1e9)
            self._record(
                asked, now_ns, size_bytes, num_ranges, waited_ns if answer.was_parked else 0
            )

    def failed(self, asked: PeerQuestion) -> None:
        """Record that a peer did not answer a question."""
        if self._counters.recorder is not None and asked.begin_ns:
            asked = asked._replace(flags=asked.flags | Flag.ERROR)
            self._record(asked, time.perf_counter_ns(), 0, 0, 0)

    def _record(
        self, asked: PeerQuestion, now_ns: int, size_bytes: int, num_ranges: int, wait_ns: int
    ) -> None:
        recorder = self._counters.recorder
        assert recorder is not None
        node = self._shared_members.member(peer_of(asked.source) or "").node
        recorder.span(
            Kind.PEER_REQUEST,
            asked.begin_ns,
            now_ns,
            source_id=recorder.name(f"peer:{node}"),
            size_bytes=size_bytes,
            count=num_ranges,
            wait_ns=max(0, wait_ns),
            step=asked.step,
            epoch=asked.epoch,
            flags=asked.flags,
        )

    @property
    def clock_of_first(self) -> Callable[[], int] | None:
        """A function that asks the first node for its clock; None on that node itself."""
        name = next(
            (n for n in self._shared_members.names if self._shared_members.member(n).node == 0), ""
        )
        if not name or name == self._shared_members.me:
            return None
        member, client = self._shared_members.member(name), self._connections.client

        def ask() -> int:
            status = client.status(member.name, member.addresses, timeout_s=_CLOCK_S)
            return int(status.get("clock_ns", 0))

        return ask

    # -- at intervals ----------------------------------------------------------------------------

    def _tend(self) -> None:
        """Try nodes again that did not answer, outside of steps; exchange progress and gossip."""
        for member in self._shared_members.due():
            nothing = Ask(shelf=self.shelf, ranges=np.zeros((0, 5), np.int64))
            self._connections.client.ask(
                member.name,
                member.addresses,
                nothing,
                memoryview(bytearray()),
                parked=lambda: None,
                done=lambda answer: None,  # The client itself tells the members whom it reached.
            )
        if self._connections.serving is not None:
            self._connections.serving.tend()

    # -- for people ------------------------------------------------------------------------------

    def stats(self) -> tuple[PeerStats, ...]:
        """Return the states and counts of the other nodes."""
        counts = self._connections.client.counts()
        out = []
        for name in self._shared_members.names:
            if name == self._shared_members.me:
                continue
            member, count = self._shared_members.member(name), counts.get(name, {})
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
        if name in self._shared_members.lost:
            return "lost"
        return "suspect" if name in self._shared_members.suspects else "there"

    def status(self) -> RunStatus:
        """Return the state of this run on this node, for `penstock cluster`."""
        from penstock.engine.peers.status import LinkStatus, ReadCounts, RunStatus

        read = self._counters.counted()
        counts = self._connections.client.counts()
        return RunStatus(
            run=self._connections.run_id.hex(),
            dataset=self._local_tiers.uri,
            cursor=self.home_fill.progress_mark(),
            is_filling=self.home_fill.is_filling(),
            reads=ReadCounts(
                tier_bytes=read.tier_bytes,
                peer_bytes=read.peer_bytes,
                store_bytes=read.store_bytes,
                num_ranks=1,
            ),
            links=tuple(
                LinkStatus(peer=name, in_bytes=int(c["bytes"]), requests=int(c["requests"]))
                for name, c in counts.items()
            ),
            suspects=tuple(sorted(self._shared_members.suspects)),
            lost=tuple(sorted(self._shared_members.lost)),
            log=tuple(self.log[-_EVENTS_MAX:]),
        )

    @property
    def log(self) -> list[str]:
        """Losses and returns of nodes, in sentences."""
        return self._shared_members.log

    def close(self) -> None:
        """Stop asking other nodes, and stop serving once the others are quiet."""
        self._tending.stop()
        self._connections.client.stop()
        self._fill_threads.shutdown(wait=True)
        for close in self._connections.closing:
            close()


class PeriodicThread:
    """A thread that calls a function at intervals."""

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
            except Exception:  # Batches do not depend on it, so the run goes on.
                _log.exception("looking after other nodes failed; the run goes on")
                self._stopped.wait(1.0)

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)
