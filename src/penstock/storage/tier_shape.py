"""The units that a tier may keep, and the place of each in the layout.

The layout is an imaginary sequence of bytes with all units in it, the most useful first. Capacities
only cut it: the first tier owns the units that lie entirely in its first bytes, the next tier goes
on where that one ends, and the rest has no place. So sizes may change between runs, and no byte
moves.

The places of units form a column: an array, or for very many units an object that computes each
value when it is needed. A shape with computed columns has its size and digest from the start, and
no code here or in the tiers spends memory or time on all of its units.
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
"""Units processed at once in a loop over all units."""

PAGE_BYTES = 4096
"""The unit in which memory and disks are allocated."""


class UnitColumn(Protocol):
    """A column of numbers by unit, each computed when it is needed."""

    def __len__(self) -> int: ...

    @overload
    def __getitem__(self, units: Ints | slice, /) -> Ints: ...

    @overload
    def __getitem__(self, units: int, /) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedShape:
    """Size and digest of a shape whose columns are computed."""

    size_bytes: int
    """The length of the layout."""
    digest: int
    """A hash of the places of all units, or of the values they are computed from."""


@dataclass(frozen=True, kw_only=True)
class TierShape:
    """The units of a data set; processes that use the same name must have the same units."""

    name: str
    """The name of the tier's folder, the same on every machine."""
    offsets: Ints | UnitColumn
    """The position of each unit in the layout, by unit number."""
    lengths: Ints | UnitColumn
    about: dict[str, str] = field(default_factory=dict)
    """For people: the data set's URI and other hints."""
    known: ComputedShape | None = None
    """Set if the columns are computed."""

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
        """Return the number of units."""
        return len(self.lengths)

    @property
    def is_computed(self) -> bool:
        """Return whether the columns are computed."""
        return self.known is not None

    def extent(self, unit: int) -> tuple[int, int]:
        """Return the offset and length of one unit."""
        return int(self.offsets[unit]), int(self.lengths[unit])

    def ends(self, units: Ints) -> Ints:
        """Return the positions where some units end."""
        return self.offsets[units] + self.lengths[units]

    def chunks(self) -> Iterator[Ints]:
        """Yield the numbers of all units, `CHUNK_UNITS` at a time."""
        for start in range(0, self.num_units, CHUNK_UNITS):
            yield np.arange(start, min(start + CHUNK_UNITS, self.num_units))

    @cached_property
    def size_bytes(self) -> int:
        """Return the length of the layout."""
        if self.known is not None:
            return self.known.size_bytes
        return max((int(self.ends(units).max()) for units in self.chunks()), default=0)

    @cached_property
    def length_max(self) -> int:
        """Return the bytes of the largest unit; 0 for computed columns."""
        if self.known is not None or not self.num_units:
            return 0
        assert isinstance(self.lengths, np.ndarray)
        return int(self.lengths.max())

    @cached_property
    def digest(self) -> int:
        """Return a hash of the places of all units."""
        if self.known is not None:
            return self.known.digest
        hasher = xxhash.xxh3_64()
        for column in (self.offsets, self.lengths):
            hasher.update(np.ascontiguousarray(column, "<i8").data)
        return hasher.intdigest()

    def cut(self, first: int, capacity_bytes: int) -> int:
        """Return where a tier that begins at `first` ends; it does not cut a unit in two.

        Except for computed columns, since that would look at all units: there, a unit that lies
        across an end belongs to no tier.
        """
        limit = first + capacity_bytes
        if self.known is not None:
            return max(first, min(limit, self.size_bytes))
        last = first
        for units in self.chunks():
            ends = self.ends(units)
            last = max(last, int(ends[ends <= limit].max(initial=first)))
        return last
