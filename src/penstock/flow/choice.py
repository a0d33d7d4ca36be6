"""Which sources a fetch has: those that keep its bytes, nearest to hand first, then the store.

Where bytes lie is computed (`layout.homes`). Who can be asked at the moment is an opinion that each
rank forms for itself (`engine.peers.members`). The two meet only here, so a loader and a simulation
name their sources by the same rule. A wrong opinion costs bytes and time, never a sample: the store
is always the last source.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

PEERS_MAX = 2
"""Peers that are asked before the store. A third one would be asked after two have failed, at a
time when the training loop is already waiting."""
_PREFIX = "peer:"


def peer_source(name: str) -> str:
    """Return the source that a peer is, by its name.

    >>> peer_source("a")
    'peer:a'
    """
    return _PREFIX + name


def peer_of(source: str) -> str | None:
    """Return the name of the peer that a source is; None if it is none.

    >>> peer_of("peer:a"), peer_of("store")
    ('a', None)
    """
    return source[len(_PREFIX) :] if source.startswith(_PREFIX) else None


def sources_for(holders: Sequence[str], store: str) -> tuple[str, ...]:
    """Return the sources of bytes that some peers keep, best first.

    `holders` are the names of the peers that can be asked, the home first and then the copies. One
    that does not answer is not among them: it is tried again off the step path.

    >>> sources_for(["b", "c"], "store"), sources_for([], "store")
    (('peer:b', 'peer:c', 'store'), ('store',))
    """
    peers = [peer_source(name) for name in dict.fromkeys(holders)]
    return (*peers[:PEERS_MAX], store)


def taken_over(lost: Collection[int], num_nodes: int) -> frozenset[int]:
    """Return those of the lost nodes whose share the others keep from now on.

    A node that has lost more than half of the others is more likely cut off itself: it reads what
    it needs from the store, and does not begin to keep everything.

    >>> sorted(taken_over({1, 3}, 4)), sorted(taken_over({1, 2, 3}, 4))
    ([1, 3], [])
    """
    return frozenset(lost if 2 * len(lost) <= num_nodes else ())
