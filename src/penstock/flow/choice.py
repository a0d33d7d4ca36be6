"""Which sources a fetch has: those that keep its bytes, nearest to hand first, then the store.

Where bytes lie is computed (`plan.homes`), who can be asked at the moment is a matter of opinion
(`peers.members`). This is where the two meet, and the only place: a loader and a simulation name
their sources by the same rule. A wrong opinion costs bytes and time, never a sample: the store is
always the last source.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

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


def sources_for(
    holders: Sequence[str], usable: Callable[[str], bool], store: str
) -> tuple[str, ...]:
    """Return the sources of bytes that some peers keep, best first.

    `holders` are the names of these peers, the home first and then the copies, without oneself. One
    that does not answer is passed over rather than tried: it is tried again off the step path.

    >>> sources_for(["a", "b", "c"], lambda name: name != "a", "store")
    ('peer:b', 'peer:c', 'store')
    >>> sources_for([], lambda name: True, "store")
    ('store',)
    """
    peers = [peer_source(name) for name in dict.fromkeys(holders) if usable(name)]
    return (*peers[:PEERS_MAX], store)


def taken_over(lost: Collection[int], num_nodes: int) -> frozenset[int]:
    """Return those of the lost nodes whose share the others keep from now on.

    Whoever has lost more than half of the nodes is more likely cut off itself: it reads from the
    store what it needs, and does not begin to keep everything.

    >>> sorted(taken_over({1, 3}, 4)), sorted(taken_over({1, 2, 3}, 4))
    ([1, 3], [])
    """
    return frozenset(lost if 2 * len(lost) <= num_nodes else ())
