"""A node of a simulated cluster: a tier, a server that parks what is not there yet, and its ranks.

The first rank carries the server, so they live and die together. A process that is frozen does
nothing, and all that came meanwhile afterwards; one that was killed and started again is another
*life*, to which nothing of the former one belongs but what lies in the tier.
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
    """What a server says and hears about other nodes: `peers.members.Members`."""

    def say(self) -> bytes:
        """Return what to tell others."""
        ...

    def hear(self, peer: str, data: bytes, at_s: float) -> None:
        """Take what another node says."""
        ...


@dataclass(slots=True, eq=False)
class UnitRequest:
    """Units that one rank wants from another node."""

    link: ClusterLink
    life: int
    """Of the connection."""
    units: tuple[int, ...]
    may_wait: bool
    """Whether it may be parked; else what is there is answered at once."""
    gossip: bytes
    parked: Call
    answered: Callable[[UnitReply], None]
    failed: Callable[[str], None]
    parked_s: float | None = None
    is_over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitReply:
    """What a server has sent."""

    payload: dict[int, int]
    """By unit: its content, which is its number; absent ones are missing."""
    gossip: bytes


@dataclass(slots=True, eq=False)
class ClusterNode:
    """What the ranks of a node share."""

    number: int
    name: str
    time: VirtualTime
    reachability: NodeReachability
    lengths: list[int]
    """Of all units, in bytes."""
    egress: SharedPipe
    life: int = 1
    is_up: bool = True
    is_corrupt: bool = False
    is_full: bool = False
    num_frozen: int = 0
    thawed_s: float = 0.0
    """When it went on last."""
    present: set[int] = field(default_factory=set)
    gossip: GossipSource | None = None
    is_coming: Callable[[int], bool] = lambda unit: False
    """Whether a unit that is not there is at home here, and on its way."""
    cursor: Callable[[], int] = lambda: 0
    """What beats carry: it stands still only where nothing is even tried (`flow.filling`)."""
    _backlog: list[tuple[int, Call]] = field(default_factory=list)
    _claims: dict[int, list[Call]] = field(default_factory=dict)
    _parked: list[UnitRequest] = field(default_factory=list)

    # -- the process -------------------------------------------------------------------------

    def do(self, life: int, call: Call) -> None:
        """Have this life of the process do something, as soon as it runs."""
        if life != self.life or not self.is_up:
            return
        if self.num_frozen:
            self._backlog.append((life, call))
        else:
            call()

    def after(self, seconds: float, call: Call) -> None:
        """Have it do something later."""
        self.at(self.time.now_s + seconds, call)

    def at(self, at_s: float, call: Call) -> None:
        """Have it do something at a time."""
        life = self.life
        self.time.at(at_s, lambda: self.do(life, call))

    def freeze(self) -> None:
        """Stop it; may be done several times."""
        self.num_frozen += 1
        if self.num_frozen > 1:
            return
        for way in self.reachability.to_and_from(self.number):
            self.reachability.close(*way, self.time.now_s)

    def thaw(self) -> None:
        """Let it go on."""
        self.num_frozen -= 1
        if self.num_frozen:
            return
        self.thawed_s = self.time.now_s
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
        """Return whether a unit is now the caller's to fetch; else another rank is at it."""
        if unit in self._claims:
            return False
        self._claims[unit] = []
        return True

    def when_free(self, unit: int, call: Call) -> None:
        """Be called when a unit that another rank has claimed is there, or free to be claimed."""
        self._claims[unit].append(call)

    def fill(self, unit: int) -> None:
        """Take in a unit that the caller has claimed; a tier that is full keeps nothing new."""
        calls = self._claims.pop(unit)
        if not self.is_full:
            self.present.add(unit)
        for call in calls:
            call()
        self.look_at_parked()

    # -- the server --------------------------------------------------------------------------

    def asked(self, asked: UnitRequest) -> None:
        """Answer what is there, park what is coming."""
        assert self.gossip is not None
        if asked.gossip:
            self.gossip.hear(asked.link.asker_name, asked.gossip, self.time.now_s)
        if self._may_wait(asked):
            self._parked.append(asked)
            self._reply(asked, asked.parked)
        else:
            self._answer(asked)

    def look_at_parked(self) -> None:
        """Answer what waits no more."""
        waiting, self._parked = self._parked, []
        for asked in waiting:
            if asked.link.life != asked.life:
                continue
            if self._may_wait(asked):
                self._parked.append(asked)
            else:
                self._answer(asked)

    def _may_wait(self, asked: UnitRequest) -> bool:
        """Whether all that is missing will come; else nobody waits for the rest of it."""
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
        """Send something back on the connection of an ask, if that is still the same."""
        link, life = asked.link, self.life

        def arrive() -> None:
            if life == self.life and self.is_up and link.life == asked.life:
                link.do(lambda: link.take(asked, call))

        way = link.node.number, self.number
        self.time.after(LATENCY_S, lambda: self.reachability.pass_on(*way, arrive))
