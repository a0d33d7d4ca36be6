"""How a node joins the others: tiers, then the meeting, then homes, then serving.

The order matters. A node's capacity is known once its tiers are open. Homes are known once all
nodes have announced their capacities. A server must know the run's secret before its address is
announced.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from penstock.engine.cluster import Carried, Cluster
from penstock.engine.holding import Holding
from penstock.engine.neighbours import Neighbours
from penstock.engine.serving import Filling, ServedByNode, ServedHere, Serving, run_member
from penstock.engine.stats import Counters
from penstock.errors import OptionError, PeerError
from penstock.peers.join import Joined, join, leave, wait_for_all
from penstock.peers.local import (
    LocalNode,
    TiersOpened,
    WishedTier,
    remove_run_file,
    shelf_name,
    write_run_file,
)
from penstock.peers.members import Member
from penstock.peers.rendezvous import Rendezvous
from penstock.peers.tls import client_context, server_context
from penstock.peers.transport import TcpTransport, Transport
from penstock.plan.homes import Node, cluster_homes
from penstock.plan.spans import spans_of
from penstock.storage.tier_shape import TierShape
from penstock.storage.tier_sizes import Disk, Memory, Wish
from penstock.trace import Recorder
from penstock.units import bytes_of
from penstock.world import World

NO_TIERS = (
    "peers=True lets nodes use each other's tiers, and there are none: give "
    'tiers=[penstock.Disk("/scratch", "200GB")], or start `penstock node` on each host'
)

_log = logging.getLogger("penstock.loader")


class Grant:
    """What the node service of this host has granted to this process, if there is one."""

    def __init__(self, wishes: tuple[Memory | Disk, ...]) -> None:
        self._wishes = wishes
        self.node = LocalNode.connect()
        self.opened: TiersOpened | None = None

    def __call__(self, shape: TierShape) -> list[Wish]:
        """Return the tiers to open: the service's, or this process's own where it refuses."""
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


@dataclass(frozen=True, kw_only=True)
class Here:
    """What a process brings to the meeting."""

    rendezvous: Rendezvous
    holding: Holding
    grant: Grant
    world: World
    num_samples: int
    number: int
    """Number of this meeting among those of this process."""
    alike: Mapping[str, str]
    """Settings that must be equal on all ranks, beside the data set."""


def join_cluster(here: Here, counters: Counters) -> Cluster:
    """Meet the other nodes, compute homes, and begin to serve."""
    holding, world = here.holding, here.world
    if not holding.tiers.tiers and world.is_first_of_node:
        _log.warning("this node has no tier; it reads what the others keep, and keeps nothing")
    filling = Filling(holding, here.num_samples)
    recorder = counters.recorder
    serving = _serving(here, filling, recorder) if world.is_first_of_node else None
    try:
        joined = join(
            here.rendezvous,
            world,
            key=f"meeting/{here.number}",
            mine=None if serving is None else _member(here, serving),
            digest={
                "the data set": holding.name,
                "its size in bytes": str(holding.size_bytes),
                **here.alike,
            },
        )
        _refuse_no_room(joined)
        shelf = shelf_name(joined.secret, holding.name)
        if serving is not None:
            serving.begin(joined, shelf)
        wait_for_all(here.rendezvous, joined)
        return _cluster(here, joined, filling, serving, counters)
    except BaseException:
        if serving is not None:
            serving.close()
        raise


def _refuse_no_room(joined: Joined) -> None:
    """Raise on every node when none of them has a tier."""
    if not any(member.capacity_bytes for member in joined.members):
        raise OptionError(NO_TIERS)


def _serving(here: Here, filling: Filling, recorder: Recorder | None) -> Serving:
    """Return the server of this node: the node service, or one in this process."""
    holding, grant = here.holding, here.grant
    if grant.node is not None and grant.opened is not None:
        return ServedByNode(grant.node, grant.opened, holding.name, filling)
    return ServedHere(holding, filling, holding.tiers.identity, _transport(), recorder)


def _member(here: Here, serving: Serving) -> Member:
    return Member(
        name=serving.name,
        node=here.world.node,
        addresses=serving.addresses,
        capacity_bytes=here.holding.tiers.capacity_bytes,
        incarnation=time.time_ns() // 1_000_000,
        host=socket.gethostname(),
    )


def _cluster(
    here: Here,
    joined: Joined,
    filling: Filling,
    serving: Serving | None,
    counters: Counters,
) -> Cluster:
    holding = here.holding
    voice = joined.world.local_rank
    neighbours = Neighbours(joined.members, joined.mine.name, voice=voice)
    client = _transport().client(
        name=joined.mine.name, run_id=joined.run_id, secret=joined.secret, gossip=neighbours
    )
    nodes = [Node(name=m.name, capacity_bytes=m.capacity_bytes) for m in joined.members]
    closing: tuple[Callable[[], None], ...] = ()
    if serving is not None:
        serving.gossip.inner = neighbours
        closing = (
            serving.close,
            *_written(joined, holding),
            partial(leave, here.rendezvous, joined),
        )
    carried = Carried(
        client=client,
        filling=filling,
        serving=serving,
        shelf=shelf_name(joined.secret, holding.name),
        run_id=joined.run_id,
        node_of_rank=np.array(joined.node_of_rank, np.int64),
        closing=closing,
    )
    homes = cluster_homes(spans_of(holding.layout), nodes)
    cluster = Cluster(holding, homes, neighbours, carried, world=joined.world, counters=counters)
    if serving is not None:
        serving.status = cluster.status
    return cluster


def _written(joined: Joined, holding: Holding) -> list[Callable[[], None]]:
    """Write the file by which `penstock cluster` finds this run; return how to remove it."""
    members = [run_member(member) for member in joined.members]
    try:
        path = write_run_file(
            run_id=joined.run_id, secret=joined.secret, members=members, dataset=holding.uri
        )
    except OSError as error:
        _log.info("`penstock cluster` will not find this run: %s", error)
        return []
    return [partial(remove_run_file, path)]


def _transport() -> Transport:
    """Return the transport between nodes."""
    return TcpTransport(server_tls=server_context(), client_tls=client_context())
