"""Serving this node's tiers to the other nodes.

The first rank of a node runs the server itself, or asks the node service of its host to do so. The
server must know how far this node has filled the units whose home it is. A server in the rank's own
process reads that from a counter; the node service is sent it at intervals.

A server in the rank's own process ends with the engine, also when that dies: other nodes find it
silent, agree that the node is lost, and take over its share. The engine that replaces a dead one
does not serve; that of a later loader does. The node service goes on serving while any rank of the
run is connected, and a minute longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from penstock.dataset.part import Ints
from penstock.engine.local_tiers import LocalTiers
from penstock.engine.peers.addresses import addresses_here
from penstock.engine.peers.base import Address, Shelves
from penstock.engine.peers.join import Joined
from penstock.engine.peers.local import LocalNode
from penstock.engine.peers.members import Member
from penstock.engine.peers.node_messages import RunMember, TiersOpened
from penstock.engine.peers.server import PeerServer
from penstock.engine.peers.shelf import TierShelf
from penstock.engine.peers.status import NodeStatus, RunStatus, TierStatus, as_dict
from penstock.engine.peers.tls import server_context
from penstock.engine.shared_members import SharedMembers
from penstock.trace import Kind, Recorder

if TYPE_CHECKING:
    from penstock.engine.fill_planner import FillPlanner

_LEAVE_S_MAX = 10.0
"""How long a node that has finished goes on answering the others."""
_QUIET_S = 1.0
"""A node that has had no request for so long may leave."""
_LOOK_S = 0.02


class HomeFill:
    """How much of the data set that has its home on this node is in its tiers."""

    def __init__(self, local_tiers: LocalTiers, num_samples: int) -> None:
        self._local_tiers = local_tiers
        self._num_samples = num_samples
        self._fill_planner: FillPlanner | None = None
        self._is_closed = False
        self.are_at_home: Callable[[Ints], bool] = lambda units: True
        """Whether units have their home here; True for all until homes are known."""

    def may_be_home(self, units: Ints) -> bool:
        """Return whether units have their home here; looked up anew, since homes come later."""
        return self.are_at_home(units)

    def watch(self, fill_planner: FillPlanner) -> None:
        """Take progress from `fill_planner` from now on."""
        self._fill_planner = fill_planner

    def close(self) -> None:
        """Record that nothing more will be filled."""
        self._is_closed = True

    def progress_mark(self) -> int:
        """Return a number that changes while this node makes progress."""
        if self._fill_planner is None:
            return 0
        return self._fill_planner.progress.progress_mark(self._num_samples, time.monotonic())

    def is_filling(self) -> bool:
        """Return whether units that are not in the tiers yet may still arrive."""
        if self._is_closed or any(tier.is_full for tier in self._local_tiers.tiers.tiers):
            return False
        return self._fill_planner is None or not self._fill_planner.progress.is_over


def run_member(member: Member) -> RunMember:
    """Return a node as `penstock cluster` and the node service show it."""
    addresses = tuple((address.host, address.port) for address in member.addresses)
    return RunMember(name=member.name, host=member.host, node=member.node, addresses=addresses)


class TierServer(Protocol):
    """A server of this node's tiers."""

    name: str
    """The node's identity."""
    addresses: tuple[Address, ...]
    gossip: DeferredGossip
    status: Callable[[], RunStatus]

    def begin(self, joined: Joined, shelf: bytes) -> None:
        """Serve the tiers to the members of a run, under the name of a shelf."""
        ...

    def tend(self) -> None:
        """Exchange progress and gossip; called at intervals."""
        ...

    def close(self) -> None:
        """Stop serving."""
        ...


class LocalTierServer:
    """A server in the process of the rank."""

    def __init__(
        self,
        local_tiers: LocalTiers,
        home_fill: HomeFill,
        name: str,
        recorder: Recorder | None = None,
    ) -> None:
        self.name = name
        self._recorder = recorder
        self._nodes: dict[str, int] = {}
        """Numbers of the members' nodes."""
        self._secrets: dict[bytes, bytes] = {}
        self._home_fill = home_fill
        self._shelves = Shelves(None if recorder is None else self._served)
        self._local_tiers = local_tiers
        self.status: Callable[[], RunStatus] = RunStatus
        self._began_s = time.monotonic()
        self.gossip = DeferredGossip()
        self._server = PeerServer(
            name=name,
            shelves=self._shelves,
            secrets=self._secrets.get,
            bind=addresses_here(port=0),
            gossip=self.gossip,
            tls=server_context(),
            status=self._status,
        )
        self._server.start()
        self.addresses = self._server.addresses

    def begin(self, joined: Joined, shelf: bytes) -> None:
        """Serve the tiers to the members of a run."""
        tiers = self._local_tiers.tiers
        self._nodes = {member.name: member.node for member in joined.members}
        self._secrets[joined.run_id] = joined.secret
        home_fill = self._home_fill
        shelf_of_run = TierShelf(
            shelf,
            tiers,
            home_fill.progress_mark,
            home_fill.is_filling,
            home_fill.may_be_home,
        )
        self._shelves.add(shelf_of_run)

    def _served(self, peer: str, asked_ns: int, size_bytes: int, num_ranges: int) -> None:
        """Record an answer."""
        recorder = self._recorder
        if recorder is not None and num_ranges:  # One that asks for nothing only looks for us.
            recorder.span(
                Kind.PEER_SERVE,
                asked_ns,
                time.perf_counter_ns(),
                source_id=recorder.name(f"peer:{self._nodes.get(peer, -1)}"),
                size_bytes=size_bytes,
                count=num_ranges,
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
                    for tier in self._local_tiers.tiers.tiers
                ),
                served_bytes=int(counts["bytes"]),
                served_requests=int(counts["requests"]),
                num_parked=int(counts["parked"]),
                num_connections=int(counts["connections"]),
                num_refused=int(counts["refused"]),
                runs=(self.status(),),
                clock_ns=time.perf_counter_ns(),
            )
        )

    def tend(self) -> None:
        """Do nothing: the server shares this process's memory."""

    def close(self) -> None:
        """Stop when no peer is connected, when peers are quiet, or after `_LEAVE_S_MAX`."""
        self._home_fill.close()
        begin_s = asked_s = time.monotonic()
        num_asked = -1
        while time.monotonic() - begin_s < _LEAVE_S_MAX:
            counts = self._server.counts()
            if not counts["connections"]:
                break
            if counts["requests"] != num_asked:
                num_asked, asked_s = counts["requests"], time.monotonic()
            elif time.monotonic() - asked_s > _QUIET_S:
                break  # Peers are connected but send no requests.
            time.sleep(_LOOK_S)
        self._server.stop()


class DeferredGossip:
    """Gossip whose source is set after the server has started."""

    def __init__(self) -> None:
        self.inner: SharedMembers | None = None

    def say(self) -> bytes:
        """Return the gossip to send."""
        return self.inner.say() if self.inner is not None else b""

    def hear(self, peer: str, data: bytes) -> None:
        """Take gossip from a peer."""
        if self.inner is not None:
            self.inner.hear(peer, data)

    def reached(self, peer: str) -> None:
        """Record that a peer has answered."""
        if self.inner is not None:
            self.inner.reached(peer)

    def silent(self, peer: str, kind: str) -> None:
        """Record that a peer has failed."""
        if self.inner is not None:
            self.inner.silent(peer, kind)


class NodeTierServer:
    """The node service of this host as the server."""

    def __init__(
        self, node: LocalNode, opened: TiersOpened, dataset: str, home_fill: HomeFill
    ) -> None:
        self._node = node
        self._dataset = dataset
        self._home_fill = home_fill
        self._run_id = b""
        self.name, self.addresses = opened.name, opened.addresses
        self.status: Callable[[], RunStatus] = RunStatus
        self.gossip = DeferredGossip()

    def begin(self, joined: Joined, shelf: bytes) -> None:
        """Register the run and its members with the service."""
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
        """Send progress and gossip to the service, and take the gossip of the others from it."""
        inner = self.gossip.inner
        said = inner.say() if inner is not None else b""
        for peer, heard in self._node.progress(self._run_id, self.status(), said):
            if inner is not None:
                inner.hear(peer, heard)

    def close(self) -> None:
        """Leave the service, which goes on without this process."""
        self._home_fill.close()
        self.tend()
        self._node.close()
