"""Fetches: what a node has to bring in for the steps to come, and by which step.

The order says which samples the next steps use, the world which of them this node's ranks compute,
the homes who keeps their units. From these three follow

* *fills*: units whose home is here and that are absent, whole, by the step that uses them first,
  whoever that is: the home fetches for all;
* *reads*: of samples without a home that ranks of this node use, the ranges to read from the store,
  near ones merged;
* *asks*: samples that ranks of this node use and another node keeps.

Steps are gone through in pieces, epoch after epoch, so looking a whole epoch ahead takes no more
memory than looking a batch ahead, but for one flag a unit: whether it was asked for before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import count
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.dataset.bound import BoundPart
from penstock.dataset.dataset import Dataset
from penstock.dataset.mixture import Mixture
from penstock.dataset.part import Ints
from penstock.errors import OptionError
from penstock.order import Order, Steps
from penstock.plan.homes import NOBODY
from penstock.plan.units import Units
from penstock.storage.coalesce import merge_ranges
from penstock.world import World

_POSITIONS_AT_ONCE = 1 << 16
_RANGE_BYTES_MAX = 8 << 20

Flags = npt.NDArray[np.bool_]
Homes = npt.NDArray[np.signedinteger[Any]]
"""The home of each unit, as `Homes.home_of` returns it, or in fewer bytes."""
_Rows = TypeVar("_Rows", "Fills", "Reads", "Asks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Which samples are used at which step, by whom."""

    dataset: Dataset | Mixture
    order: Order
    world: World
    global_batch_size: int
    drop_last: bool = False

    def steps(self, start: int = 0) -> Steps:
        """Return the steps of an epoch from a position on."""
        return Steps(
            num_samples=self.order.num_samples,
            global_batch_size=self.global_batch_size,
            num_ranks=self.world.num_ranks,
            drop_last=self.drop_last,
            start=start,
        )

    def share(self) -> tuple[int, int]:
        """Return the part of each global batch that the ranks of this node compute."""
        world, steps = self.world, self.steps()
        first = -(-world.node * world.num_ranks // world.num_nodes)
        last = -(-(world.node + 1) * world.num_ranks // world.num_nodes) - 1
        return steps.share(first)[0], steps.share(last)[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Uses:
    """What some steps in a row use."""

    ids: Ints
    """Samples, step by step; those that fill up the last batch of an epoch among them."""
    steps: Ints
    """The step of each, counted from where the looking began."""
    is_mine: Flags
    """Whether a rank of this node computes it."""


def uses(
    demand: Demand, *, epoch: int = 0, position: int = 0, end_epoch: int | None = None
) -> Iterator[Uses]:
    """Yield what is used from a place on, piece by piece, across the ends of epochs."""
    size = demand.global_batch_size
    low, high = demand.share()
    at_once = max(1, _POSITIONS_AT_ONCE // size)
    before = 0
    for e in count(epoch):
        if end_epoch is not None and e >= end_epoch:
            return
        start = position if e == epoch else 0
        num_steps = demand.steps(start).num_steps
        for first in range(0, num_steps, at_once):
            stop = min(first + at_once, num_steps)
            ids = _ids(demand.order, e, start + first * size, start + stop * size)
            place = np.arange(len(ids))
            inside = place % size
            yield Uses(
                ids=ids,
                steps=before + first + place // size,
                is_mine=(low <= inside) & (inside < high),
            )
        before += num_steps


def _ids(order: Order, epoch: int, start: int, stop: int) -> Ints:
    """Return samples by position; past its end an epoch is repeated from its beginning."""
    size = order.num_samples
    ids = order.ids(epoch, start, min(stop, size))
    if stop <= size:
        return ids
    missing = stop - size
    return np.concatenate([ids, np.resize(order.ids(epoch, 0, min(missing, size)), missing)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Fills:
    """Units to be fetched into this node's tiers, by step; parallel arrays."""

    units: Ints
    steps: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """Ranges to be read from the store for this node's ranks, by step; parallel arrays."""

    bound_numbers: Ints
    tables: Ints
    objects: Ints
    offsets: Ints
    lengths: Ints
    steps: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Asks:
    """Samples to be had from other nodes, by step; parallel arrays."""

    homes: Ints
    units: Ints
    inside: Ints
    """Where in its unit the sample begins."""
    lengths: Ints
    steps: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetches:
    """All that a node has to bring in for some steps in a row."""

    fills: Fills
    reads: Reads
    asks: Asks
    last_step: int
    """These are all fetches of the steps up to this one."""


class Fetching:
    """Goes through the steps to come and says what to fetch for them."""

    def __init__(
        self, demand: Demand, units: Units, homes: Homes, *, present: Flags, gap_bytes: int
    ) -> None:
        """Take the home of each unit, which units this node has, and the gap worth reading."""
        if not len(homes) == len(present) == units.num_units:
            raise OptionError(
                f"there are {units.num_units} units, but {len(homes)} homes and {len(present)} "
                "flags of what is present"
            )
        self._demand, self._units, self._homes = demand, units, homes
        self._gap_bytes = gap_bytes
        self._node = demand.world.node
        self._numbers = {id(bound): n for n, bound in enumerate(demand.dataset.bound)}
        self._wanted = (homes == self._node) & ~present
        """Units of this node that are absent and were not asked for yet."""

    def ahead(
        self, *, epoch: int = 0, position: int = 0, end_epoch: int | None = None
    ) -> Iterator[Fetches]:
        """Yield fetches from a place on, piece by piece; what was yielded once is not again."""
        for use in uses(self._demand, epoch=epoch, position=position, end_epoch=end_epoch):
            found = [self._of_table(*group) for group in self._tables(use)]
            yield Fetches(
                fills=_by_step(Fills, [fills for fills, _, _ in found]),
                reads=_by_step(Reads, [reads for _, reads, _ in found]),
                asks=_by_step(Asks, [asks for _, _, asks in found]),
                last_step=int(use.steps[-1]),
            )

    def _tables(self, use: Uses) -> Iterator[tuple[BoundPart, int, Ints, Ints, Flags]]:
        for bound, where, local_ids in self._demand.dataset.groups(use.ids):
            for table in range(len(bound.part.tables)):
                yield bound, table, local_ids, use.steps[where], use.is_mine[where]

    def _of_table(
        self, bound: BoundPart, table: int, local_ids: Ints, steps: Ints, is_mine: Flags
    ) -> tuple[Fills, Reads, Asks]:
        number = self._numbers[id(bound)]
        units, inside = self._units.locate(number, table, local_ids)
        homes = self._homes[units]
        fills = self._fills(units, steps)
        read = np.flatnonzero(is_mine & (homes == NOBODY))
        reads = self._reads(number, bound, table, local_ids[read], steps[read])
        ask = np.flatnonzero(is_mine & (homes != NOBODY) & (homes != self._node))
        asks = Asks(
            homes=homes[ask],
            units=units[ask],
            inside=inside[ask],
            lengths=bound.part.tables[table].extents(local_ids[ask]).length,
            steps=steps[ask],
        )
        return fills, reads, asks

    def _fills(self, units: Ints, steps: Ints) -> Fills:
        """Return the wanted ones of some units, each once, by its first use."""
        wanted = np.flatnonzero(self._wanted[units])
        # Uses come in the order of steps, so where a unit is met first it is needed first.
        chosen, first = np.unique(units[wanted], return_index=True)
        self._wanted[chosen] = False
        return Fills(units=chosen, steps=steps[wanted[first]])

    def _reads(
        self, number: int, bound: BoundPart, table: int, local_ids: Ints, steps: Ints
    ) -> Reads:
        """Return the ranges of some samples, near ones merged, each by its first use."""
        extents = bound.part.tables[table].extents(local_ids)
        objects, place = np.unique(extents.object, return_inverse=True)
        # The objects laid end to end, with gaps too wide to be read: merged all at once.
        room = bound.part.tables[table].sizes[objects] + self._gap_bytes + 1
        first = np.cumsum(room) - room
        merged = merge_ranges(
            first[place] + extents.offset,
            extents.length,
            gap_bytes_max=self._gap_bytes,
            length_bytes_max=_RANGE_BYTES_MAX,
        )
        by = np.full(len(merged.offsets), np.iinfo(np.int64).max)
        np.minimum.at(by, merged.index, steps)
        holder = np.searchsorted(first, merged.offsets, side="right") - 1
        return Reads(
            bound_numbers=np.full(len(by), number),
            tables=np.full(len(by), table),
            objects=objects[holder],
            offsets=merged.offsets - first[holder],
            lengths=merged.lengths,
            steps=by,
        )


def _by_step(kind: type[_Rows], several: list[_Rows]) -> _Rows:
    """Return the rows of several of one kind, by step."""
    names = [column.name for column in fields(kind)]
    columns = {name: np.concatenate([getattr(rows, name) for rows in several]) for name in names}
    order = np.argsort(columns["steps"], kind="stable")
    return kind(**{name: column[order] for name, column in columns.items()})
