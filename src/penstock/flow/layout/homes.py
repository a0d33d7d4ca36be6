"""Homes: which nodes keep a span of the layout. Computed by everybody, looked up nowhere.

The home of a span is the node with the best draw (`draws`), weighted by capacity. Chance gives some
nodes more than they hold, or clearly more than their part, which would make all others wait for
them. What is too much goes to its next best node that has room, the last of the layout first. Nodes
that together hold C bytes have homes for the first C bytes of the layout.

Where that is all of it, the rest of the room holds *copies*: every span gets a second holder, the
best node that has room and does not hold it yet, in the order of the layout; then a third, and so
on. So a lost node's spans are there once more before any is there three times. The table of holders
has `HOLDERS_MAX` rows. What a node has room for beyond them it keeps for itself, its best draws
first; no other node needs to know. A node leaves free 1/(N - 1) of the bytes that it is home to:
this is what it takes over when another node is lost. Bytes that lie in a tier by then cannot make
room, since they may be read at any time. A node that holds everything needs no such reserve.

A node that is lost costs what it held and moves nothing else. A span whose home it was goes to its
next holder; if there is none, to the best node left that has room. What comes out depends on who is
lost, not on the order in which they were.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from penstock.dataset.part import Ints
from penstock.errors import OptionError
from penstock.flow.layout.draws import NOBODY, best_draws, costs_of
from penstock.flow.layout.spans import Spans

__all__ = ["HOLDERS_MAX", "NOBODY", "Homes", "HomeNode", "cluster_homes"]

HOLDERS_MAX = 4
"""Holders of a span that everybody knows: its home and three copies."""
_RANKED = HOLDERS_MAX + 2
"""Draws remembered of each span; where they are all full it is drawn for again."""

_SLACK = 16
"""A node is home to at most its part and a sixteenth of it."""

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeNode:
    """A node as a home."""

    name: str
    """What its draws are made from; it keeps its spans as long as it keeps its name."""
    capacity_bytes: int
    """All its tiers together."""

    def __post_init__(self) -> None:
        if self.capacity_bytes < 0:
            raise OptionError(
                f"node {self.name!r} has {self.capacity_bytes} bytes; 0 or more make sense"
            )


def cluster_homes(spans: Spans, nodes: Sequence[HomeNode]) -> Homes:
    """Return the homes of spans on some nodes. They are computed when first asked for."""
    names = [node.name for node in nodes]
    if len(set(names)) < len(names):
        raise OptionError(f"homes need nodes with different names, got {sorted(names)}")
    return Homes(spans=spans, nodes=tuple(nodes))


@dataclass(frozen=True, kw_only=True, eq=False)
class Homes:
    """Who keeps what; nodes are named by their places in `nodes`."""

    spans: Spans
    nodes: tuple[HomeNode, ...]
    lost: frozenset[int] = frozenset()
    """Nodes that have left or died."""
    whole: Homes | None = None
    """The same before anybody was lost."""

    @cached_property
    def holders(self) -> Ints:
        """Who holds each span: a row of homes, then rows of copies; `NOBODY` where none does."""
        if self.whole is None:
            return _placed(self.spans, self.nodes)
        return _moved(self.whole, self.lost)

    def home_of(self, offsets: Ints) -> Ints:
        """Return the home of each unit, by where it begins in the layout."""
        out: Ints = self.holders[0][self.spans.number_of(offsets)]
        return out

    def holds(self, node: int) -> Bools:
        """Return by span whether a node keeps it: as its home, as a copy, or for itself."""
        held: Bools = (self.holders == node).any(axis=0)
        lengths, one = self.spans.lengths, self.nodes[node]
        if self.whole is not None:
            # A node keeps nothing new for itself now; it keeps what it had, where the spans that it
            # took over leave room.
            if node not in self.lost:
                own = np.flatnonzero(self.whole.holds(node) & ~held)
                room = one.capacity_bytes - int(lengths[held].sum())
                held[own[np.cumsum(lengths[own]) <= room]] = True
            return held
        home_bytes = int(lengths[self.holders[0] == node].sum())
        room = one.capacity_bytes - int(lengths[held].sum())
        room -= _reserve(home_bytes, one, len(self.nodes), self.spans.size_bytes)
        others = np.flatnonzero(~held & (self.holders[0] != NOBODY))
        shortest = int(lengths[others].min(initial=room + 1, where=lengths[others] > 0))
        if room < shortest:
            return held
        if int(lengths[others].sum()) > room:
            costs = costs_of(others, one.name, one.capacity_bytes)
            others = others[np.argsort(costs, kind="stable")]
            others = others[np.cumsum(lengths[others]) <= room]
        held[others] = True
        return held

    def without(self, lost: Collection[int]) -> Homes:
        """Return the homes when some nodes are lost, beside those that are lost already."""
        gone = self.lost | frozenset(lost)
        if gone == self.lost:
            return self
        whole = self if self.whole is None else self.whole
        return Homes(spans=self.spans, nodes=self.nodes, lost=gone, whole=whole)


def _placed(spans: Spans, nodes: Sequence[HomeNode]) -> Ints:
    """Return the holders on nodes that are all there."""
    free = np.array([node.capacity_bytes for node in nodes], np.int64)
    placed = np.flatnonzero(np.cumsum(spans.lengths) <= int(free.sum()))
    limits = np.array(_home_limits(spans.lengths[placed], _weights(spans, nodes)), np.int64)
    giving = _SpanGiver(spans, nodes, np.minimum(free, limits), placed)
    rows = [giving.row(placed, [])]
    held = np.flatnonzero(rows[0] != NOBODY)
    # A node that was closed because its part was full, not its room, has room for copies.
    has_room = giving.is_open[:-1] | (free > limits)
    home_bytes = _bytes_by_node(rows[0][held], spans.lengths[held], len(nodes))
    reserves = [
        _reserve(mine, node, len(nodes), spans.size_bytes)
        for mine, node in zip(home_bytes.tolist(), nodes, strict=True)
    ]
    free = np.maximum(0, free - home_bytes - np.array(reserves, np.int64))
    giving.reopen(np.where(has_room, free, 0))
    while len(rows) < min(HOLDERS_MAX, len(nodes)):
        row = giving.row(held, rows)
        held = np.flatnonzero(row != NOBODY)
        if not len(held):
            break
        rows.append(row)
    return np.stack(rows)


def _reserve(home_bytes: int, node: HomeNode, num_nodes: int, all_bytes: int) -> int:
    """Return what a node leaves free for the spans of one that is lost.

    Of two nodes each copy is of the other's spans, so there copies are the reserve.
    """
    if num_nodes <= 2 or node.capacity_bytes >= all_bytes:
        return 0
    return -(-home_bytes // (num_nodes - 1))


def _weights(spans: Spans, nodes: Sequence[HomeNode]) -> list[int]:
    # Beyond the whole set, room is worth nothing: nodes that hold all of it share evenly.
    size_bytes = spans.size_bytes
    return [min(node.capacity_bytes, size_bytes) for node in nodes]


def _home_limits(lengths: Ints, weights: Sequence[int]) -> list[int]:
    """Return how many bytes each node may be home to."""
    total, longest = int(lengths.sum()), int(lengths.max(initial=0))
    all_weights = max(1, sum(weights))
    # The longest span on top: a node that is closed has less than that left of its part.
    return [total * w * (_SLACK + 1) // (_SLACK * all_weights) + longest for w in weights]


def _moved(whole: Homes, lost: Collection[int]) -> Ints:
    """Return the holders when some nodes are lost."""
    spans, nodes, before = whole.spans, whole.nodes, whole.holders
    is_lost = np.zeros(len(nodes) + 1, np.bool_)  # One more for NOBODY.
    is_lost[list(lost)] = True
    holders = _closed_up(np.where(is_lost[before], NOBODY, before))
    free = np.array([node.capacity_bytes for node in nodes], np.int64)
    free[is_lost[:-1]] = 0
    for row in holders:
        held = np.flatnonzero(row != NOBODY)
        free -= _bytes_by_node(row[held], spans.lengths[held], len(nodes))
    orphans = np.flatnonzero((before[0] != NOBODY) & (holders[0] == NOBODY))
    adopted = _SpanGiver(spans, nodes, free, orphans).row(orphans, [])
    holders[0, orphans] = adopted[orphans]
    return holders


class _SpanGiver:
    """Spans being given to nodes; `free` is what these have left, and is counted down."""

    def __init__(self, spans: Spans, nodes: Sequence[HomeNode], free: Ints, wanted: Ints) -> None:
        self._spans = spans
        self._names = [node.name for node in nodes]
        self._weights = _weights(spans, nodes)
        self._best = np.full((_RANKED, spans.num_spans), NOBODY, np.int64)
        self.reopen(free)
        self._rank(wanted)

    def reopen(self, free: Ints) -> None:
        """Go on with other room."""
        self._free = free
        self.is_open = np.append(free > 0, False)  # One more for NOBODY.

    def row(self, wanted: Ints, rows: Sequence[Ints]) -> Ints:
        """Return a holder for each of some spans, one that is in none of the rows given before."""
        out = np.full(self._spans.num_spans, NOBODY, np.int64)
        while len(wanted):
            choice = self._choices(wanted, rows)
            some = choice != NOBODY
            wanted, choice = wanted[some], choice[some]
            taken = _taken(choice, self._spans.lengths[wanted], self._free)
            out[wanted[taken]] = choice[taken]
            # A node that had to refuse one is full for good, so this ends after `nodes` rounds.
            self.is_open[choice[~taken]] = False
            wanted = wanted[~taken]
        return out

    def _choices(self, wanted: Ints, rows: Sequence[Ints]) -> Ints:
        """Return the best open node for each span that does not hold it yet."""
        choice = self._first(wanted, rows)
        again = np.flatnonzero(choice == NOBODY)
        if len(again) and self.is_open.any():
            self._rank(wanted[again])
            choice[again] = self._first(wanted[again], rows)
        return choice

    def _first(self, wanted: Ints, rows: Sequence[Ints]) -> Ints:
        best = self._best[:, wanted]
        possible = self.is_open[best]
        for row in rows:
            possible &= best != row[wanted]
        first = possible.argmax(axis=0)[None]
        chosen = np.take_along_axis(best, first, axis=0)[0]
        return np.where(np.take_along_axis(possible, first, axis=0)[0], chosen, NOBODY)

    def _rank(self, wanted: Ints) -> None:
        """Draw for some spans among the nodes that are open now."""
        weights = [w if self.is_open[n] else 0 for n, w in enumerate(self._weights)]
        self._best[:, wanted] = best_draws(wanted, self._names, weights, _RANKED)


def _taken(nodes: Ints, lengths: Ints, free: Ints) -> Bools:
    """Return which spans their nodes take: each in order, up to the first that does not fit.

    What is taken goes off `free`.
    """
    order = np.argsort(nodes, kind="stable")
    node, length = nodes[order], lengths[order]
    total = np.cumsum(length)
    inside = total - (total - length)[np.searchsorted(node, node)]
    fits = inside <= free[node]
    free -= _bytes_by_node(node[fits], length[fits], len(free))
    out = np.empty(len(nodes), np.bool_)
    out[order] = fits
    return out


def _bytes_by_node(nodes: Ints, lengths: Ints, num_nodes: int) -> Ints:
    out = np.zeros(num_nodes, np.int64)
    np.add.at(out, nodes, lengths)
    return out


def _closed_up(holders: Ints) -> Ints:
    """Return the same with the holders of each span in the first rows."""
    order = np.argsort(holders == NOBODY, axis=0, kind="stable")
    out: Ints = np.take_along_axis(holders, order, axis=0)
    return out
