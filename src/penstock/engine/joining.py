"""Joining the other nodes: tiers and server, then the meeting, then homes.

The order matters. First come the tiers, which say how much this node can keep, and the server,
which listens already: the node announces its capacity and its addresses in the meeting. The meeting
agrees on the run's secret, and only then can the server admit members. So all nodes wait for each
other once more (`wait_for_all`); else a fast node would ask a server that still refuses everybody,
and suspect its node for half a minute. Homes need no exchange: each rank computes them from the
announced capacities.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from penstock.engine.cluster import Cluster, ClusterConnections
from penstock.engine.local_tiers import LocalTiers
from penstock.engine.peers.client import PeerClient
from penstock.engine.peers.join import Joined, join, leave, wait_for_all
from penstock.engine.peers.local import LocalNode, shelf_name
from penstock.engine.peers.members import Member
from penstock.engine.peers.node_messages import TiersOpened, WishedTier
from penstock.engine.peers.rendezvous import Rendezvous
from penstock.engine.peers.run_files import remove_run_file, write_run_file
from penstock.engine.peers.tls import client_context
from penstock.engine.serving import (
    HomeFill,
    LocalTierServer,
    NodeTierServer,
    TierServer,
    run_member,
)
from penstock.engine.shared_members import SharedMembers
from penstock.engine.stats import Counters
from penstock.errors import OptionError, PeerError
from penstock.flow.layout.homes import HomeNode, cluster_homes
from penstock.flow.layout.spans import spans_of
from penstock.storage.tier_shape import TierShape
from penstock.storage.tier_sizes import Disk, Memory, Wish
from penstock.trace import Recorder
from penstock.units import bytes_of

if TYPE_CHECKING:
    from penstock.engine.opening import MeetingOptions

NO_TIERS = (
    "peers=True lets nodes use each other's tiers, and there are none: give "
    'tiers=[penstock.Disk("/scratch", "200GB")], or start `penstock node` on each host'
)

_log = logging.getLogger("penstock.loader")


class TierGrant:
    """The tiers that the node service of this host grants to this process, if there is one."""

    def __init__(self, wishes: tuple[Memory | Disk, ...]) -> None:
        self._wishes = wishes
        self.node = LocalNode.connect()
        self.opened: TiersOpened | None = None

    def __call__(self, shape: TierShape) -> list[Wish]:
        """Return the tiers to open: those of the service, or this process's own if it refuses."""
        if self.node is None:
            return list(self._wishes)
        wished = [
            WishedTier(kind=w.kind, size_bytes=_size_of(w, shape.size_bytes)) for w in self._wishes
        ]
        try:
            self.opened = self.node.open(
                dataset=shape.name,
                num_units=shape.num_units,
                size_bytes=shape.size_bytes,
                wishes=wished,
                about=shape.about,
            )
        except PeerError as error:
            _log.warning("%s; the job goes on with tiers of its own", error)
            self.close()
            return list(self._wishes)
        return self.opened.wishes

    def keep(self, dataset: str) -> None:
        """Ask the service to keep the tiers that are open."""
        if self.node is None:
            return
        try:
            self.node.keep(dataset)
        except PeerError as error:
            _log.warning("%s; what this job keeps may go when it ends", error)

    def close(self) -> None:
        """Leave the service."""
        if self.node is not None:
            self.node.close()
        self.node = None


def _size_of(wish: Wish, all_bytes: int) -> int:
    is_share = isinstance(wish.size, str) and "%" in wish.size
    return all_bytes if is_share else bytes_of(wish.size)


def join_cluster(
    meeting: MeetingOptions,
    rendezvous: Rendezvous,
    local_tiers: LocalTiers,
    grant: TierGrant,
    counters: Counters,
) -> Cluster:
    """Begin to serve, meet the other nodes, and compute homes."""
    world = meeting.world
    if not local_tiers.tiers.tiers and world.is_first_of_node:
        _log.warning("this node has no tier; it reads what the others keep, and keeps nothing")
    home_fill = HomeFill(local_tiers, meeting.num_samples)
    serving: TierServer | None = None
    if world.is_first_of_node:
        serving = _serving(local_tiers, grant, home_fill, counters.recorder)
    try:
        joined = join(
            rendezvous,
            world,
            key=f"meeting/{meeting.count_meeting(world)}",
            mine=None if serving is None else _member(world.node, local_tiers, serving),
            digest={
                "the data set": local_tiers.name,
                "its size in bytes": str(local_tiers.units.size_bytes),
                **meeting.must_match,
            },
        )
        if not any(member.capacity_bytes for member in joined.members):
            raise OptionError(NO_TIERS)  # On every node: all of them see the same members.
        shelf = shelf_name(joined.secret, local_tiers.name)
        if serving is not None:
            serving.begin(joined, shelf)
        wait_for_all(rendezvous, joined)
        return _cluster(
            rendezvous,
            joined,
            local_tiers,
            home_fill=home_fill,
            serving=serving,
            counters=counters,
        )
    except BaseException:
        if serving is not None:
            serving.close()
        raise


def _serving(
    local_tiers: LocalTiers, grant: TierGrant, home_fill: HomeFill, recorder: Recorder | None
) -> TierServer:
    """Return the server of this node: the node service, or one in this process."""
    if grant.node is not None and grant.opened is not None:
        return NodeTierServer(grant.node, grant.opened, local_tiers.name, home_fill)
    return LocalTierServer(local_tiers, home_fill, local_tiers.tiers.identity, recorder)


def _member(node: int, local_tiers: LocalTiers, serving: TierServer) -> Member:
    return Member(
        name=serving.name,
        node=node,
        addresses=serving.addresses,
        capacity_bytes=local_tiers.tiers.capacity_bytes,
        incarnation=time.time_ns() // 1_000_000,
        host=socket.gethostname(),
    )


def _cluster(
    rendezvous: Rendezvous,
    joined: Joined,
    local_tiers: LocalTiers,
    *,
    home_fill: HomeFill,
    serving: TierServer | None,
    counters: Counters,
) -> Cluster:
    voice = joined.world.local_rank
    shared_members = SharedMembers(joined.members, joined.mine.name, voice=voice)
    client = PeerClient(
        name=joined.mine.name,
        run_id=joined.run_id,
        secret=joined.secret,
        gossip=shared_members,
        tls=client_context(),
    )
    nodes = [HomeNode(name=m.name, capacity_bytes=m.capacity_bytes) for m in joined.members]
    closing: tuple[Callable[[], None], ...] = ()
    if serving is not None:
        serving.gossip.inner = shared_members
        closing = (
            serving.close,
            *_written(joined, local_tiers),
            partial(leave, rendezvous, joined),
        )
    connections = ClusterConnections(
        client=client,
        home_fill=home_fill,
        serving=serving,
        shelf=shelf_name(joined.secret, local_tiers.name),
        run_id=joined.run_id,
        node_of_rank=np.array(joined.node_of_rank, np.int64),
        closing=closing,
    )
    homes = cluster_homes(spans_of(local_tiers.layout), nodes)
    cluster = Cluster(
        local_tiers, homes, shared_members, connections, world=joined.world, counters=counters
    )
    if serving is not None:
        serving.status = cluster.status
    return cluster


def _written(joined: Joined, local_tiers: LocalTiers) -> list[Callable[[], None]]:
    """Write the file by which `penstock cluster` finds this run; return how to remove it."""
    members = [run_member(member) for member in joined.members]
    try:
        path = write_run_file(
            run_id=joined.run_id, secret=joined.secret, members=members, dataset=local_tiers.uri
        )
    except OSError as error:
        _log.info("`penstock cluster` will not find this run: %s", error)
        return []
    return [partial(remove_run_file, path)]
