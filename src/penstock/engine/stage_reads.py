"""Reads from a store for planned batches: a range for one batch, or a block for several."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.dataset.bound import BoundPart
from penstock.dataset.part import Ints
from penstock.engine.fetcher import ReadOutcome
from penstock.engine.job import SampleGroup

if TYPE_CHECKING:
    from penstock.engine.staging import Stager


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRuns:
    """The runs of an order that goes block by block: the blocks as units of reading.

    In such an order all samples of a block are used within one window, so a block is worth one
    large read. On a node with several ranks, each rank uses only its share of a block. Whether it
    reads the whole block all the same depends on the cost of a request, which the flow measures.
    """

    starts: Ints
    """The first sample of each, and the number of samples at the end."""
    first_epoch_only: bool
    """Whether later epochs have another order."""
    read_whole: Callable[[], bool]
    """Whether one rank's share of a run is worth reading all of it."""

    def are_used_in(self, epoch: int) -> bool:
        """Return whether the order of an epoch goes by runs."""
        return epoch == 0 or not self.first_epoch_only

    def are_read_whole(self, epoch: int) -> bool:
        """Return whether runs are read whole in an epoch, where no tier keeps them."""
        return self.are_used_in(epoch) and self.read_whole()

    def numbers(self, ids: Ints) -> Ints:
        """Return the run that each sample lies in."""
        return np.searchsorted(self.starts, ids, side="right") - 1

    def ends(self, ids: Ints) -> tuple[Ints, Ints]:
        """Return the first sample of each run that some samples lie in, and where it ends."""
        numbers = np.unique(self.numbers(ids))
        return self.starts[numbers], self.starts[numbers + 1]


class StorePlace(NamedTuple):
    """A place in a store."""

    bound: BoundPart
    table: int
    object: int
    """Its number in the table."""
    offset: int


class RangeRead:
    """A range of one object, read into the stage of a batch."""

    __slots__ = ("_at", "_ids", "_lock", "_stager", "_view", "size_bytes")

    staged = True

    def __init__(self, stager: Stager, at: StorePlace, ids: Ints, view: memoryview) -> None:
        self._stager = stager
        self._at = at
        self._ids = ids
        self._view: memoryview | None = view
        self._lock = threading.Lock()  # Guards `_view`: only one attempt may write to it.
        self.size_bytes = len(view)

    @property
    def sources(self) -> tuple[str, ...]:
        """The store that has it."""
        return (self._at.bound.store.source,)

    def __call__(self, attempt: int) -> ReadOutcome:
        """Read it into its place, unless another attempt was first."""
        data, num_retries = self._stager.read(self._at, self._ids, self.size_bytes)
        with self._lock:
            view, self._view = self._view, None
        if view is not None:  # Else another attempt was first, and its bytes may be in use.
            view[:] = data
        return ReadOutcome(moved=True, num_retries=num_retries)


class BlockRead:
    """A block or a run that several batches share."""

    __slots__ = ("_group", "_j", "_name", "_stager", "_table", "size_bytes")

    staged = False

    def __init__(
        self, stager: Stager, group: SampleGroup, table: int, j: int, name: Hashable
    ) -> None:
        self._stager = stager
        self._group = group
        self._table = table
        self._j = j
        self._name = name
        if group.bound.by_block:
            self.size_bytes = int(group.extents[table].length[j])
        else:
            self.size_bytes = stager.run_extent(group, table, j)[2]

    @property
    def sources(self) -> tuple[str, ...]:
        """The store that has it."""
        return (self._group.bound.store.source,)

    def __call__(self, attempt: int) -> ReadOutcome:
        """Read it into the cache; a second attempt reads beside the first."""
        beside = attempt > 0
        if self._group.bound.by_block:
            self._stager.block(self._group, self._j, self._name, beside=beside)
        else:
            self._stager.run(self._group, self._table, self._j, self._name, beside=beside)
        return ReadOutcome(moved=True)
