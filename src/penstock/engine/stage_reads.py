"""Reads of a store for batches that are planned: a range for one batch, a block for several."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple

from penstock.dataset.bound import BoundPart
from penstock.dataset.part import Ints
from penstock.engine.fetcher import ReadOutcome
from penstock.engine.job import SampleGroup

if TYPE_CHECKING:
    from penstock.engine.staging import Stager


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
        self._lock = threading.Lock()
        self.size_bytes = len(view)

    @property
    def sources(self) -> tuple[str, ...]:
        """The store that has it."""
        return (self._at.bound.store.source,)

    def __call__(self, attempt: int) -> ReadOutcome:
        """Read it into its place, unless another copy was first."""
        data, num_retries = self._stager.read(self._at, self._ids, self.size_bytes)
        with self._lock:
            view, self._view = self._view, None
        if view is not None:  # Else another copy was first, and its bytes may be in use.
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
        """Read it and keep it; a second copy reads beside the first."""
        beside = attempt > 0
        if self._group.bound.by_block:
            self._stager.block(self._group, self._j, self._name, beside=beside)
        else:
            self._stager.run(self._group, self._table, self._j, self._name, beside=beside)
        return ReadOutcome(moved=True)
