"""Whom a rank asks for what, while nodes are lost and come back."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from penstock.engine.cluster import Cluster
from penstock.engine.peers.members import Member
from penstock.engine.shared_members import SharedMembers
from penstock.flow.choice import peer_source
from penstock.flow.layout.homes import HomeNode, Homes, cluster_homes
from penstock.flow.layout.spans import Spans
from penstock.world import World

NUM_NODES, NUM_SPANS, SPAN_BYTES = 4, 400, 2**16
NAMES = [f"{node:032x}" for node in range(NUM_NODES)]
UNITS = np.arange(NUM_SPANS)
"""One a span."""


def homes_of_all() -> Homes:
    spans = Spans(span_bytes=SPAN_BYTES, lengths=np.full(NUM_SPANS, SPAN_BYTES))
    room = NUM_SPANS * SPAN_BYTES // 2
    return cluster_homes(spans, [HomeNode(name=name, capacity_bytes=room) for name in NAMES])


def views() -> list[SharedMembers]:
    members = [
        Member(name=name, node=node, addresses=(), capacity_bytes=1, incarnation=1, host=f"h{node}")
        for node, name in enumerate(NAMES)
    ]
    return [SharedMembers(members, name) for name in NAMES]


@contextmanager
def cluster_at(node: int, view: SharedMembers) -> Iterator[Cluster]:
    local_tiers: Any = SimpleNamespace(
        layout=SimpleNamespace(offsets=UNITS * SPAN_BYTES), place=lambda width, spans: None
    )
    connections: Any = SimpleNamespace(
        client=SimpleNamespace(stop=lambda: None, ask=lambda *args, **then: None),
        home_fill=SimpleNamespace(),
        serving=None,
        shelf=b"",
        run_id=b"",
        closing=(),
    )
    world = World(rank=node, num_ranks=NUM_NODES, num_nodes=NUM_NODES)
    counters: Any = None
    cluster = Cluster(
        local_tiers, homes_of_all(), view, connections, world=world, counters=counters
    )
    try:
        yield cluster
    finally:
        cluster.close()


def lose(lost: int, view: list[SharedMembers], by: tuple[int, int] = (0, 1)) -> None:
    """Two nodes miss a third and tell each other."""
    for node in by:
        view[node].silent(NAMES[lost], "lost")
    for speaker, listener in (by, by[::-1]):
        view[listener].hear(NAMES[speaker], view[speaker].say())


def find(lost: int, view: list[SharedMembers], by: tuple[int, int] = (0, 1)) -> None:
    for node in by:
        view[node].reached(NAMES[lost])
    for speaker, listener in (by, by[::-1]):
        view[listener].hear(NAMES[speaker], view[speaker].say())


def test_who_stood_in_for_a_node_that_is_back_is_asked_before_it() -> None:
    view, homes = views(), homes_of_all()
    share = UNITS[homes.holders[0] == 3]
    stood_in = homes.without([3]).holders[0, share]
    with cluster_at(0, view[0]) as cluster:
        assert (cluster.holders.peers_of(share)[0] == 3).all()
        lose(3, view)
        cluster.take_over_news()
        elsewhere = stood_in != 0
        assert elsewhere.any()
        assert (cluster.holders.peers_of(share)[0] == np.where(elsewhere, stood_in, -1)).all()
        find(3, view)
        cluster._update_usable()
        cluster.take_over_news()
        first, second = cluster.holders.peers_of(share)
        assert (first == np.where(elsewhere, stood_in, 3)).all()
        assert (second[elsewhere] == 3).all()
        others = UNITS[homes.holders[0] == 1]
        assert (cluster.holders.peers_of(others)[0] == 1).all()


def test_only_a_node_that_was_missed_asks_others_for_its_own_share() -> None:
    view, homes = views(), homes_of_all()
    with cluster_at(3, view[3]) as cluster:
        assert [source for source, _ in cluster.stand_ins(UNITS)] == [""]
        lose(3, view)
        view[3].hear(NAMES[0], view[0].say())
        found = dict(cluster.stand_ins(UNITS))
    away = homes.without([3]).holders[0]
    is_own = homes.holders[0] == 3
    assert sorted(found.pop("")) == UNITS[~is_own].tolist()
    for node in range(3):
        wanted = UNITS[is_own & (away == node)]
        assert found[peer_source(NAMES[node])].tolist() == wanted.tolist()
