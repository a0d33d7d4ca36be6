"""The tier of a node to which each unit belongs.

On a single node, each tier takes the next part of the layout. If several nodes share a data set,
each node has some *spans* of the layout: equal pieces of a power of two of bytes. A unit belongs to
the span in which it begins. The units of a node's spans fill its fastest tier first, in the order
of the layout, each tier up to its capacity.

Places are only added: a node that takes over spans of a lost node keeps its own units where they
are. All ranks of a node that add the same spans in the same order agree without communication.

This takes one byte per unit. Computed columns (`tier_shape`) take only one byte per span; there a
span is placed as a whole or not at all, and counts with all bytes of the layout that it covers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.storage.tier_shape import Bools, Ints, TierShape

NOWHERE = -1
TIERS_MAX = 100

Numbers = npt.NDArray[np.int8]


class TierPlacement(ABC):
    """Which tier each unit belongs to, by number."""

    placed_bytes: list[int]
    """By tier: bytes of the units that belong there."""

    @abstractmethod
    def tier_of(self, units: Ints) -> Ints:
        """Return the number of each unit's tier; `NOWHERE` if it has none."""

    def tier_of_one(self, unit: int) -> int:
        """Return the number of one unit's tier; `NOWHERE` if it has none."""
        return int(self.tier_of(np.array([unit], np.int64))[0])


def places_of(shape: TierShape, parts: Sequence[tuple[int, int]]) -> TierPlacement:
    """Return the places on a single node: each tier has its part of the layout."""
    assert len(parts) <= TIERS_MAX
    if shape.is_computed:
        return PartPlaces(shape, parts)
    numbers = np.full(shape.num_units, NOWHERE, np.int8)
    placed_bytes = [0] * len(parts)
    for units in shape.chunks():
        offsets, lengths = shape.offsets[units], shape.lengths[units]
        for number in reversed(range(len(parts))):
            first, last = parts[number]
            numbers[units[(offsets >= first) & (offsets + lengths <= last)]] = number
        for number in range(len(parts)):
            placed_bytes[number] += int(lengths[numbers[units] == number].sum())
    return UnitPlaces(numbers, placed_bytes)


class UnitPlaces(TierPlacement):
    """Places that are known unit by unit."""

    def __init__(self, numbers: Numbers, placed_bytes: list[int]) -> None:
        self._numbers = numbers
        self.placed_bytes = placed_bytes

    @classmethod
    def nowhere(cls, shape: TierShape, num_tiers: int) -> UnitPlaces:
        """Return no places yet."""
        return cls(np.full(shape.num_units, NOWHERE, np.int8), [0] * num_tiers)

    def tier_of(self, units: Ints) -> Ints:
        """Return the number of each unit's tier."""
        found: Ints = self._numbers[units].astype(np.int64)
        return found

    def tier_of_one(self, unit: int) -> int:
        """Return the number of a unit's tier."""
        return int(self._numbers[unit])

    def put(self, units: Ints, number: int) -> None:
        """Let units belong to a tier, or to none.

        Needs no lock: a thread that reads meanwhile sees each unit in its old or its new place.
        """
        self._numbers[units] = number

    def with_spans(
        self, shape: TierShape, span_bytes: int, spans: Bools, capacities: Sequence[int]
    ) -> UnitPlaces:
        """Return these places and those of the units of some spans."""
        new = [units[self._are_new(shape, units, span_bytes, spans)] for units in shape.chunks()]
        units = np.concatenate([np.empty(0, np.int64), *new])
        units = units[np.argsort(shape.offsets[units], kind="stable")]
        ends = np.cumsum(shape.lengths[units])
        numbers, placed_bytes = self._numbers.copy(), list(self.placed_bytes)
        numbers[units] = dealt(ends, capacities, placed_bytes)
        return UnitPlaces(numbers, placed_bytes)

    def _are_new(self, shape: TierShape, units: Ints, span_bytes: int, spans: Bools) -> Bools:
        number = np.minimum(shape.offsets[units] // span_bytes, len(spans) - 1)
        are_new: Bools = spans[number] & (self._numbers[units] == NOWHERE)
        return are_new


class PartPlaces(TierPlacement):
    """Places on a single node, computed from where the parts begin and end."""

    def __init__(self, shape: TierShape, parts: Sequence[tuple[int, int]]) -> None:
        self._shape, self._parts = shape, parts
        self.placed_bytes = [last - first for first, last in parts]

    def tier_of(self, units: Ints) -> Ints:
        """Return the number of each unit's tier."""
        offsets = self._shape.offsets[units]
        ends = offsets + self._shape.lengths[units]
        found = np.full(len(units), NOWHERE, np.int64)
        for number in reversed(range(len(self._parts))):
            first, last = self._parts[number]
            found[(offsets >= first) & (ends <= last)] = number
        return found


class SpanPlaces(TierPlacement):
    """Places that are known span by span."""

    def __init__(
        self, shape: TierShape, span_bytes: int, numbers: Numbers, placed_bytes: list[int]
    ) -> None:
        self._shape, self._span_bytes, self._numbers = shape, span_bytes, numbers
        self.placed_bytes = placed_bytes

    @classmethod
    def nowhere(cls, shape: TierShape, num_tiers: int) -> SpanPlaces:
        """Return no places yet."""
        return cls(shape, max(1, shape.size_bytes), np.full(1, NOWHERE, np.int8), [0] * num_tiers)

    def tier_of(self, units: Ints) -> Ints:
        """Return the number of each unit's tier."""
        spans = np.minimum(self._shape.offsets[units] // self._span_bytes, len(self._numbers) - 1)
        found: Ints = self._numbers[spans].astype(np.int64)
        return found

    def with_spans(
        self, shape: TierShape, span_bytes: int, spans: Bools, capacities: Sequence[int]
    ) -> SpanPlaces:
        """Return these places and those of some spans."""
        if (self._numbers == NOWHERE).all():
            numbers = np.full(len(spans), NOWHERE, np.int8)
        else:
            assert (span_bytes, len(spans)) == (self._span_bytes, len(self._numbers))
            numbers = self._numbers.copy()
        new = np.flatnonzero(spans & (numbers == NOWHERE))
        begins = np.arange(len(spans)) * span_bytes
        covered = np.clip(shape.size_bytes - begins, 0, span_bytes)
        placed_bytes = list(self.placed_bytes)
        numbers[new] = dealt(np.cumsum(covered[new]), capacities, placed_bytes)
        return SpanPlaces(shape, span_bytes, numbers, placed_bytes)


def dealt(ends: Ints, capacities: Sequence[int], placed_bytes: list[int]) -> Numbers:
    """Return a tier for each of some adjacent items, given where they end; count their bytes."""
    numbers = np.full(len(ends), NOWHERE, np.int8)
    at, before_bytes = 0, 0
    for number, capacity_bytes in enumerate(capacities):
        left_bytes = max(0, capacity_bytes - placed_bytes[number])
        stop = int(np.searchsorted(ends, before_bytes + left_bytes, "right"))
        numbers[at:stop] = number
        if stop > at:
            placed_bytes[number] += int(ends[stop - 1]) - before_bytes
            at, before_bytes = stop, int(ends[stop - 1])
    return numbers
