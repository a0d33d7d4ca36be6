"""Who keeps what, as one rank sees it: homes, copies, and who can be asked at the moment.

The home of a unit is computed (`layout.homes`) from the nodes that were there when the job began.
Which nodes are lost, and which can be asked, this room is told (`set_lost`, `set_usable`). Both
together say where each unit should come from, and what this rank fetches before it is needed. An
engine asks for many units at once; a simulation asks the same questions.

When a node is lost for all, the others are home to its share from then on. When it comes back, the
nodes that stood in for it are asked first: they have its share at once, while it may be behind.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.dataset.part import Ints
from penstock.flow.choice import PEERS_MAX, peer_source, sources_for, taken_over
from penstock.flow.layout.homes import NOBODY, Homes
from penstock.storage.tier_shape import UnitColumn

Flags = npt.NDArray[np.bool_]

_HOLDERS_ASKED_MAX = 3
"""Holders of a unit that are considered: its home and the best copies. `PEERS_MAX` of them are
asked; one more, because this node may be one of them. `layout.homes` knows up to `HOLDERS_MAX`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where some units can come from."""

    names: tuple[str, ...]
    """Peers that can be asked, and last the store."""
    home: str
    """The one among them that will have the units if it does not yet; empty if none will."""

    def may_wait_at(self, source: str) -> bool:
        """Return whether a source may answer later: only a home is sure to get the units.

        Other holders have a copy by chance; to wait there could take an epoch.
        """
        return bool(self.home) and source == self.home


class Holders:
    """The homes of a job's units and the nodes that hold them, seen from one rank."""

    def __init__(
        self,
        homes: Homes,
        offsets: Ints | UnitColumn,
        *,
        node: int,
        local_rank: int = 0,
        num_local_ranks: int = 1,
    ) -> None:
        """`offsets` are the places of units in the layout; `node` is the one of this rank."""
        self.base = homes
        """The homes as they were agreed when the job began."""
        self._homes = homes
        self._homes_without_me = homes.without([node])
        """The homes as they are for others while these believe this node to be lost."""
        self._homes_meanwhile: Homes | None = None
        """The homes as they were while a node was lost that is back now."""
        self._kept: Flags | None = None
        self._offsets = offsets
        self._node = node
        self._local_rank, self._num_local_ranks = local_rank, num_local_ranks
        self._names = [each.name for each in homes.nodes]
        self._usable = np.zeros(len(self._names) + 1, bool)  # The last one stands for nobody.
        self.version = 0
        """Grows when homes may have moved."""

    # -- what is told --------------------------------------------------------------------------

    def set_lost(self, lost: Collection[str]) -> frozenset[int]:
        """Take over from lost nodes, and give back to those that returned; return the lost ones."""
        numbers = {self._names.index(name) for name in lost} - {self._node}
        gone = taken_over(numbers, len(self._names))
        if self._homes.lost - gone:
            self._homes_meanwhile = self._homes
        self._homes = self.base.without(gone)
        self._kept = None
        self.version += 1
        return gone

    def set_usable(self, usable: Sequence[bool]) -> None:
        """Take note of which nodes can be asked now; the own one cannot."""
        self._usable[:-1] = usable

    # -- what is where -------------------------------------------------------------------------

    def kept_here(self) -> Flags:
        """Return by span whether this node keeps it."""
        if self._kept is None:
            self._kept = self._homes.holds(self._node)
        return self._kept

    def are_at_home(self, units: Ints) -> bool:
        """Return whether all of some units are at home here."""
        return bool((self._holders(units)[0] == self._node).all())

    def is_mine(self, units: Ints, *, of_others: bool) -> Flags:
        """Return which units are at home here, and this rank's to fetch before they are needed.

        The ranks of a node deal out its homes. With `of_others` also those of the other ranks of
        this node, should they be late.
        """
        mine: Flags = self._holders(units)[0] == self._node
        if not of_others:
            mine = mine & (units % self._num_local_ranks == self._local_rank)
        return mine

    @property
    def fills_for_others(self) -> bool:
        """Whether this rank sees to it that all of the node's homes are filled: one of each."""
        return self._num_local_ranks > 1 and self._local_rank == 0

    def peers_of(self, units: Ints) -> Ints:
        """Return other nodes that can be asked for each unit, a row of the best; -1 for none."""
        holders = self._holders(units)
        if self._homes_meanwhile is not None:
            stood_in = self._homes_meanwhile.holders[0, self._spans(units)]
            stood_in = np.where(stood_in == holders[0], NOBODY, stood_in)
            holders = np.vstack([stood_in, holders])
        can = self._usable[holders]
        out = np.full((PEERS_MAX, len(units)), -1, np.int64)
        every = np.arange(len(units))
        for row in out:
            first = can.argmax(0)
            found = can[first, every]
            row[found] = holders[first, every][found]
            can[first, every] = False
        return out

    # -- where it should come from -------------------------------------------------------------

    def by_sources(self, units: Ints, store: str) -> Iterator[tuple[Sources, Ints]]:
        """Yield sources, and the numbers of those units that should come from them."""
        rows = np.vstack([self.peers_of(units), self._holders(units)[:1]])
        for row, numbers in _alike(rows):
            names = [self._names[node] for node in row[:-1] if node >= 0]
            home = "" if row[-1] < 0 else peer_source(self._names[row[-1]])
            yield Sources(names=sources_for(names, store), home=home), numbers

    def by_home(self, units: Ints, store: str) -> Iterator[tuple[Sources, Ints]]:
        """Yield the homes of units that are to be copied from there, and their numbers.

        Units whose home is this node, or one that cannot be asked, have no source but the store.
        Copies are not made from copies: two nodes could wait for each other's.
        """
        homes = self._holders(units)[:1]
        for (node,), numbers in _alike(np.where(self._usable[homes], homes, -1)):
            names = [] if node < 0 else [self._names[node]]
            home = "" if node < 0 else peer_source(names[0])
            yield Sources(names=sources_for(names, store), home=home), numbers

    def stand_ins(self, units: Ints, *, was_missed: bool) -> Iterator[tuple[str, Ints]]:
        """Yield sources that have kept units in our place, and the numbers of those units.

        The source is "" for all units while nobody has missed this node, and for units whose home
        is another node.
        """
        if not was_missed:
            yield "", np.arange(len(units))
            return
        spans = self._spans(units)
        is_ours = self.base.holders[0, spans] == self._node
        for (node,), numbers in _alike(
            np.where(is_ours, self._homes_without_me.holders[:1, spans], -1)
        ):
            yield "" if node < 0 else peer_source(self._names[node]), numbers

    def _spans(self, units: Ints) -> Ints:
        return self.base.spans.number_of(self._offsets[units])

    def _holders(self, units: Ints) -> Ints:
        return self._homes.holders[:_HOLDERS_ASKED_MAX, self._spans(units)]


def _alike(rows: Ints) -> Iterator[tuple[list[int], Ints]]:
    """Yield the different columns of some rows, and the numbers of those columns."""
    if (rows == rows[:, :1]).all():
        if rows.shape[1]:
            yield rows[:, 0].tolist(), np.arange(rows.shape[1])
        return
    kinds, back = np.unique(rows.T, axis=0, return_inverse=True)
    for number, kind in enumerate(kinds.tolist()):
        yield kind, np.flatnonzero(back.reshape(-1) == number)
