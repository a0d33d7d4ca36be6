"""What a tier is asked to keep: units of bytes, and where each lies in the layout.

The layout is one imaginary sequence of bytes with all units in it, worthiest first. Capacities
only cut it: the first tier owns the units that lie wholly in its first bytes, the next goes on
where that one ends, the rest is not placed. So sizes may change between runs and no byte moves.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import xxhash

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class TierShape:
    """The units of a data set; every process that names it the same has the same ones."""

    name: str
    """The same on every machine; a folder's name."""
    offsets: Ints
    """Where each unit lies in the layout, by unit number."""
    lengths: Ints
    about: dict[str, str] = field(default_factory=dict)
    """For people: the data set's URI and what else helps to recognise it."""

    def __post_init__(self) -> None:
        assert re.fullmatch(r"[0-9A-Za-z_][0-9A-Za-z_.-]*", self.name), self.name
        assert self.offsets.dtype == self.lengths.dtype == np.int64
        assert self.offsets.shape == self.lengths.shape == (len(self.lengths),)
        assert self.num_units == 0 or min(self.offsets.min(), self.lengths.min()) >= 0

    @property
    def num_units(self) -> int:
        """Return how many units there are."""
        return len(self.lengths)

    @cached_property
    def ends(self) -> Ints:
        """Return where each unit ends in the layout."""
        return self.offsets + self.lengths

    @cached_property
    def _ends_sorted(self) -> Ints:
        return np.sort(self.ends)

    @property
    def size_bytes(self) -> int:
        """Return where the layout ends."""
        return int(self._ends_sorted[-1]) if self.num_units else 0

    @cached_property
    def digest(self) -> int:
        """Return a hash of where all units lie."""
        hasher = xxhash.xxh3_64()
        for column in (self.offsets, self.lengths):
            hasher.update(np.ascontiguousarray(column, "<i8").data)
        return hasher.intdigest()

    def cut(self, first: int, capacity_bytes: int) -> int:
        """Return where a tier that begins at `first` ends: no unit is cut in two."""
        count = int(np.searchsorted(self._ends_sorted, first + capacity_bytes, "right"))
        return max(first, int(self._ends_sorted[count - 1])) if count else first
