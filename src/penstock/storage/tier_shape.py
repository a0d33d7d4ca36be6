"""What a tier is asked to keep: units of bytes, and where each lies in the layout.

The layout is one imaginary sequence of bytes with all units in it, worthiest first. Capacities
only cut it: the first tier owns the units that lie wholly in its first bytes, the next goes on
where that one ends, the rest is not placed. So sizes may change between runs and no byte moves.

Where each unit lies is a column: an array, or for very many units something that computes what it
is asked for. A shape with computed columns knows its size and its digest beforehand, and nothing
here or in the tiers ever takes memory or time for all of its units.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, overload

import numpy as np
import numpy.typing as npt
import xxhash

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

CHUNK_UNITS = 1 << 16
"""Units looked at together where all of them must be."""

PAGE_BYTES = 4096
"""What memory and disks give and take room by."""


class UnitColumn(Protocol):
    """Numbers of units, each made when it is asked for."""

    def __len__(self) -> int: ...

    @overload
    def __getitem__(self, units: Ints | slice, /) -> Ints: ...

    @overload
    def __getitem__(self, units: int, /) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedShape:
    """What is known of a shape whose columns are computed."""

    size_bytes: int
    """Where the layout ends."""
    digest: int
    """A hash of where all units lie, or of all that it follows from."""


@dataclass(frozen=True, kw_only=True)
class TierShape:
    """The units of a data set; every process that names it the same has the same ones."""

    name: str
    """The same on every machine; a folder's name."""
    offsets: Ints | UnitColumn
    """Where each unit lies in the layout, by unit number."""
    lengths: Ints | UnitColumn
    about: dict[str, str] = field(default_factory=dict)
    """For people: the data set's URI and what else helps to recognise it."""
    known: ComputedShape | None = None
    """Where the columns are computed; else None."""

    def __post_init__(self) -> None:
        assert re.fullmatch(r"[0-9A-Za-z_][0-9A-Za-z_.-]*", self.name), self.name
        assert len(self.offsets) == len(self.lengths)
        if self.known is None:
            assert isinstance(self.offsets, np.ndarray), "computed columns come with what is known"
            assert isinstance(self.lengths, np.ndarray), "computed columns come with what is known"
            assert self.offsets.dtype == self.lengths.dtype == np.int64
            assert self.offsets.shape == self.lengths.shape == (len(self.lengths),)
            assert self.num_units == 0 or min(self.offsets.min(), self.lengths.min()) >= 0

    @property
    def num_units(self) -> int:
        """Return how many units there are."""
        return len(self.lengths)

    @property
    def is_computed(self) -> bool:
        """Return whether what lies where is computed anew each time."""
        return self.known is not None

    def extent(self, unit: int) -> tuple[int, int]:
        """Return offset and length of one unit."""
        return int(self.offsets[unit]), int(self.lengths[unit])

    def ends(self, units: Ints) -> Ints:
        """Return where some units end in the layout."""
        return self.offsets[units] + self.lengths[units]

    def chunks(self) -> Iterator[Ints]:
        """Yield all units, some at a time."""
        for start in range(0, self.num_units, CHUNK_UNITS):
            yield np.arange(start, min(start + CHUNK_UNITS, self.num_units))

    @cached_property
    def size_bytes(self) -> int:
        """Return where the layout ends."""
        if self.known is not None:
            return self.known.size_bytes
        return max((int(self.ends(units).max()) for units in self.chunks()), default=0)

    @cached_property
    def length_max(self) -> int:
        """Return the bytes of the largest unit; 0 where that would take a look at each."""
        if self.known is not None or not self.num_units:
            return 0
        assert isinstance(self.lengths, np.ndarray)
        return int(self.lengths.max())

    @cached_property
    def digest(self) -> int:
        """Return a hash of where all units lie."""
        if self.known is not None:
            return self.known.digest
        hasher = xxhash.xxh3_64()
        for column in (self.offsets, self.lengths):
            hasher.update(np.ascontiguousarray(column, "<i8").data)
        return hasher.intdigest()

    def cut(self, first: int, capacity_bytes: int) -> int:
        """Return where a tier that begins at `first` ends: no unit is cut in two.

        But for computed columns, where that would take a look at each: then a unit that lies across
        an end belongs to nobody.
        """
        limit = first + capacity_bytes
        if self.known is not None:
            return max(first, min(limit, self.size_bytes))
        last = first
        for units in self.chunks():
            ends = self.ends(units)
            last = max(last, int(ends[ends <= limit].max(initial=first)))
        return last
