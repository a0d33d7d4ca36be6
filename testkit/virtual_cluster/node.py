"""A node of a simulated cluster: a tier, a server that parks requests, and its ranks.

The first rank carries the server, so they live and die together. A frozen process does nothing, and
handles what has arrived meanwhile once it is thawed. A process that was killed and started again
has a new *life*: of the former one only the contents of the tier are left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from penstock.simulate.virtual import Call, SharedPipe, VirtualTime
from testkit.virtual_cluster.net import LATENCY_S, NodeReachability

if TYPE_CHECKING:
    from testkit.virtual_cluster.link import ClusterLink


class GossipSource(Protocol):
    """The membership messages of a server: `engine.peers.members.Members`."""

    def say(self) -> bytes:
        """Return the message for other nodes."""
        ...

    def hear(self, peer: str, data: bytes, at_s: float) -> None:
        """Handle the message of another node."""
        ...


@dataclass(slots=True, eq=False)
class UnitRequest:
    """A request of one rank to another node for units."""

    link: ClusterLink
    life: int
    """Life of the connection."""
    units: tuple[int, ...]
    may_wait: bool
    """Whether it may be parked; else the server replies at once with what it has."""
    gossip: bytes
    parked: Call
    answered: Callable[[UnitReply], None]
    failed: Callable[[str], None]
    parked_s: float | None = None
    is_over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitReply:
    """The reply of a server."""

    payload: dict[int, int]
    """Content by unit. The right content of a unit is its number; absent units are left out."""
    gossip: bytes


@dataclass(slots=True, eq=False)
class ClusterNode:
    """The process that ranks of a node share, its tier and its server."""

    number: int
    name: str
    time: VirtualTime
    reachability: NodeReachability
    lengths: list[int]
    """Bytes of each unit."""
    egress: SharedPipe
    life: int = 1
    is_up: bool = True
    is_corrupt: bool = False
    is_full: bool = False
    num_frozen: int = 0
    thawed_s: float = 0.0
    """When the process was thawed last."""
    present: set[int] = field(default_factory=set)
    gossip: GossipSource | None = None
    is_coming: Callable[[int], bool] = lambda unit: False
    """Whether an absent unit is at home here and in flight."""
    progress_mark: Callable[[], int] = lambda: 0
    """The progress that heartbeats report: it stands still only if nothing is tried any more."""
    _backlog: list[tuple[int, Call]] = field(default_factory=list)
    _claims: dict[int, list[Call]] = field(default_factory=dict)
    _parked: list[UnitRequest] = field(default_factory=list)

    # -- the process -------------------------------------------------------------------------

    def do(self, life: int, call: Call) -> None:
        """Call a function in this life of the process, as soon as it runs."""
        if life != self.life or not self.is_up:
            return
        if self.num_frozen:
            self._backlog.append((life, call))
        else:
            call()

    def after(self, seconds: float, call: Call) -> None:
        """Call a function in this life of the process, some seconds from now."""
        self.at(self.time.now_s + seconds, call)

    def at(self, at_s: float, call: Call) -> None:
        """Call a function in this life of the process, at a time."""
        life = self.life
        self.time.at(at_s, lambda: self.do(life, call))

    def freeze(self) -> None:
        """Stop the process; each stop needs a `thaw` of its own."""
        self.num_frozen += 1
        if self.num_frozen > 1:
            return
        # A frozen process sends no heartbeats, so for all others its paths are closed.
        for way in self.reachability.to_and_from(self.number):
            self.reachability.close(*way, self.time.now_s)

    def thaw(self) -> None:
        """Take back one stop; after the last one, handle what has arrived meanwhile."""
        self.num_frozen -= 1
        if self.num_frozen:
            return
        self.thawed_s = self.time.now_s
        # What arrived while it was frozen comes before messages that are held on its paths.
        backlog, self._backlog = self._backlog, []
        for life, call in backlog:
            self.do(life, call)
        for way in self.reachability.to_and_from(self.number):
            self.reachability.open(*way)

    def die(self, *, keeps_tier: bool) -> None:
        """End the process."""
        self.is_up = False
        self.life += 1
        self._claims.clear()
        self._parked.clear()
        self._backlog.clear()
        if not keeps_tier:
            self.present.clear()

    # -- the tier ----------------------------------------------------------------------------

    def claim(self, unit: int) -> bool:
        """Return whether the caller is to fetch a unit; else another rank is fetching it."""
        if unit in self._claims:
            return False
        self._claims[unit] = []
        return True

    def when_free(self, unit: int, call: Call) -> None:
        """Call back when a unit that another rank has claimed is present or free again."""
        self._claims[unit].append(call)

    def fill(self, unit: int) -> None:
        """Keep a unit that the caller has claimed; a full tier keeps nothing new."""
        # Free before the calls: one of them may claim the unit again, if the tier is full.
        calls = self._claims.pop(unit)
        if not self.is_full:
            self.present.add(unit)
        for call in calls:
            call()
        self.look_at_parked()

    # -- the server --------------------------------------------------------------------------

    def asked(self, asked: UnitRequest) -> None:
        """Reply with units that are present; park a request whose units will come."""
        assert self.gossip is not None
        if asked.gossip:
            self.gossip.hear(asked.link.asker_name, asked.gossip, self.time.now_s)
        if self._may_wait(asked):
            self._parked.append(asked)
            self._reply(asked, asked.parked)
        else:
            self._answer(asked)

    def look_at_parked(self) -> None:
        """Reply to parked requests that have nothing left to wait for."""
        # Taken out first: a reply may cause a request that is parked here again.
        waiting, self._parked = self._parked, []
        for asked in waiting:
            if asked.link.life != asked.life:
                continue
            if self._may_wait(asked):
                self._parked.append(asked)
            else:
                self._answer(asked)

    def _may_wait(self, asked: UnitRequest) -> bool:
        """Whether all missing units will come. If one will not, the reply has the others now."""
        missing = [unit for unit in asked.units if unit not in self.present]
        if not missing or self.is_full or not asked.may_wait:
            return False
        return all(map(self.is_coming, missing))

    def _answer(self, asked: UnitRequest) -> None:
        assert self.gossip is not None
        here = [unit for unit in asked.units if unit in self.present]
        wrong = -1 if self.is_corrupt else 0
        payload = {unit: unit ^ wrong for unit in here}
        answer = UnitReply(payload=payload, gossip=self.gossip.say())
        size_bytes = sum(self.lengths[unit] for unit in here)
        life = self.life

        def sent() -> None:
            if life == self.life:
                self._reply(asked, lambda: asked.answered(answer))

        self.egress.send(size_bytes, sent)

    def _reply(self, asked: UnitRequest, call: Call) -> None:
        """Send a message back on the connection of a request, if it still exists."""
        link, life = asked.link, self.life

        def arrive() -> None:
            if life == self.life and self.is_up and link.life == asked.life:
                link.do(lambda: link.take(asked, call))

        way = link.node.number, self.number
        self.time.after(LATENCY_S, lambda: self.reachability.pass_on(*way, arrive))
