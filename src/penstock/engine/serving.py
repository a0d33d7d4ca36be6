"""Serving this node's tiers to the others: by the first rank itself, or by the node service.

Whoever serves has to know how far this node has filled what is at home on it. In the rank's own
process that is a look at a number; a service in another process is told it now and then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from penstock.dataset.part import Ints
from penstock.engine.holding import Holding
from penstock.engine.neighbours import Neighbours
from penstock.peers.addresses import addresses_here
from penstock.peers.base import Address, Shelves
from penstock.peers.join import Joined
from penstock.peers.local import LocalNode, Opened, RunMember
from penstock.peers.members import Member
from penstock.peers.shelf import TierShelf
from penstock.peers.status import NodeStatus, RunStatus, TierStatus, as_dict
from penstock.peers.transport import Transport

if TYPE_CHECKING:
    from penstock.engine.ahead import FillAhead

_LEAVE_S_MAX = 10.0
"""How long the others may still ask this node when it is done itself."""
_QUIET_S = 1.0
"""Who has not been asked for so long may go."""
_LOOK_S = 0.02


class Filling:
    """How far this node's part of the data set is filled."""

    def __init__(self, holding: Holding, num_samples: int) -> None:
        self._holding = holding
        self._num_samples = num_samples
        self._ahead: FillAhead | None = None
        self._is_closed = False
        self.are_at_home: Callable[[Ints], bool] = lambda units: True
        """Set once homes are known."""

    def may_be_home(self, units: Ints) -> bool:
        """Return whether units are at home here, as far as this node knows by now."""
        return self.are_at_home(units)

    def watch(self, ahead: FillAhead) -> None:
        """Go by what fills from now on."""
        self._ahead = ahead

    def close(self) -> None:
        """Take note that nothing more will come."""
        self._is_closed = True

    def cursor(self) -> int:
        """Return what grows as long as something moves."""
        if self._ahead is None:
            return 0
        return self._ahead.progress.cursor(self._num_samples, time.monotonic())

    def is_filling(self) -> bool:
        """Return whether what is not here yet may come."""
        if self._is_closed or any(tier.is_full for tier in self._holding.tiers.tiers):
            return False
        return self._ahead is None or not self._ahead.progress.is_over


def run_member(member: Member) -> RunMember:
    """Return a node for those who look at a run from outside."""
    addresses = tuple((address.host, address.port) for address in member.addresses)
    return RunMember(name=member.name, host=member.host, node=member.node, addresses=addresses)


class Serving(Protocol):
    """Whoever serves the tiers of this node."""

    name: str
    """The node's identity."""
    addresses: tuple[Address, ...]
    gossip: Later
    status: Callable[[], RunStatus]

    def begin(self, joined: Joined, shelf: bytes) -> None:
        """Serve the tiers to the members of a run, under the name of a shelf."""
        ...

    def tend(self) -> None:
        """Do what has to be done now and then."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class ServedHere:
    """A server in this process."""

    def __init__(
        self,
        holding: Holding,
        filling: Filling,
        name: str,
        transport: Transport,
    ) -> None:
        self.name = name
        self._secrets: dict[bytes, bytes] = {}
        self._filling = filling
        self._shelves = Shelves()
        self._holding = holding
        self.status: Callable[[], RunStatus] = RunStatus
        self._began_s = time.monotonic()
        self.gossip = Later()
        self._server = transport.server(
            name=name,
            shelves=self._shelves,
            secrets=self._secrets.get,
            bind=addresses_here(port=0),
            gossip=self.gossip,
            status=self._status,
        )
        self._server.start()
        self.addresses = self._server.addresses

    def begin(self, joined: Joined, shelf: bytes) -> None:
        """Serve the tiers to the members of a run."""
        tiers = self._holding.tiers
        self._secrets[joined.run_id] = joined.secret
        filling = self._filling
        self._shelves.add(
            TierShelf(
                shelf,
                tiers,
                filling.cursor,
                filling.is_filling,
                filling.may_be_home,
            )
        )

    def _status(self, run_id: bytes) -> dict[str, object]:
        del run_id  # there is one
        counts = self._server.counts()
        return as_dict(
            NodeStatus(
                name=self.name,
                uptime_s=time.monotonic() - self._began_s,
                tiers=tuple(
                    TierStatus(
                        kind="memory" if tier.kind == "memory" else "disk",
                        capacity_bytes=tier.capacity_bytes,
                        held_bytes=tier.fill_bytes,
                        path=str(tier.path),
                    )
                    for tier in self._holding.tiers.tiers
                ),
                served_bytes=int(counts["bytes"]),
                served_requests=int(counts["requests"]),
                num_parked=int(counts["parked"]),
                num_connections=int(counts["connections"]),
                num_refused=int(counts["refused"]),
                runs=(self.status(),),
            )
        )

    def tend(self) -> None:
        """Nothing to do: it is all in this process."""

    def close(self) -> None:
        """Stop when nobody is connected any more, or after a while."""
        self._filling.close()
        begin_s = asked_s = time.monotonic()
        num_asked = -1
        while time.monotonic() - begin_s < _LEAVE_S_MAX:
            counts = self._server.counts()
            if not counts["connections"]:
                break
            if counts["requests"] != num_asked:
                num_asked, asked_s = counts["requests"], time.monotonic()
            elif time.monotonic() - asked_s > _QUIET_S:
                break  # They are connected, but want nothing.
            time.sleep(_LOOK_S)
        self._server.stop()


class Later:
    """Gossip that is known only after the server has started."""

    def __init__(self) -> None:
        self.inner: Neighbours | None = None

    def say(self) -> bytes:
        """Return what others should know."""
        return self.inner.say() if self.inner is not None else b""

    def hear(self, peer: str, data: bytes) -> None:
        """Take what a peer tells."""
        if self.inner is not None:
            self.inner.hear(peer, data)

    def reached(self, peer: str) -> None:
        """Be told that a peer has answered."""
        if self.inner is not None:
            self.inner.reached(peer)

    def silent(self, peer: str, kind: str) -> None:
        """Be told that a peer failed."""
        if self.inner is not None:
            self.inner.silent(peer, kind)


class ServedByNode:
    """The node service of this host, which is told how far this node is."""

    def __init__(self, node: LocalNode, opened: Opened, dataset: str, filling: Filling) -> None:
        self._node = node
        self._dataset = dataset
        self._filling = filling
        self._run_id = b""
        self.name, self.addresses = opened.name, opened.addresses
        self.status: Callable[[], RunStatus] = RunStatus
        self.gossip = Later()

    def begin(self, joined: Joined, shelf: bytes) -> None:
        """Have the tiers served to the members of a run."""
        self._run_id = joined.run_id
        self._node.keep(self._dataset)
        self._node.register(
            run_id=joined.run_id,
            secret=joined.secret,
            dataset=self._dataset,
            shelf=shelf,
            members=[run_member(member) for member in joined.members],
        )

    def tend(self) -> None:
        """Tell the service, and hear what others have told it."""
        inner = self.gossip.inner
        said = inner.say() if inner is not None else b""
        for peer, heard in self._node.progress(self._run_id, self.status(), said):
            if inner is not None:
                inner.hear(peer, heard)

    def close(self) -> None:
        """Leave; the service goes on."""
        self._filling.close()
        self.tend()
        self._node.close()
