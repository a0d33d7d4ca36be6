"""Units of very large data sets: numbered by arithmetic, and looked up when they are asked for.

A billion units take eight gigabytes for every number that is kept of each, in every process. So
beyond `cuts.UNITS_MAX` nothing is kept: the mapped index has all that it takes.

* Rows at even distances are numbered as in `cuts`, in closed form, with one entry for each object.
* Blocks have the numbers that they have in the index.
* Other samples: a unit has the number of its first sample, so the numbers of its other samples are
  not used and have length 0. Where a unit begins and ends is found by looking at its neighbours, a
  few at a time; the rule is that of `cuts`.

The sizes of objects say how much there is (`ObjectPlaces`); what lies between samples counts too.

Rows that overlap (a window that slides over tokens) cannot be done this way, since two units would
then share bytes of a tier. Such a set keeps its units in memory, however many there are. And a view
by ids has its ids in memory in any case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import overload

import numpy as np

from penstock.dataset.part import Extents, Ints, Table
from penstock.flow.layout.cuts import RUN_BYTES, Chosen, EvenRuns, Flags, are_joined

_WINDOW_MIN, _WINDOW_MAX = 8, RUN_BYTES
"""Neighbours looked at together. A run has no more samples than bytes."""
_OBJECTS_MAX = 1 << 20
"""Of more objects than this, one prefix sum is kept for many."""
_OBJECTS_A_SUM = 1 << 10
_CELLS_MAX = 1 << 18
"""Samples looked at together."""


class ComputedColumn:
    """A column of numbers that are made when they are asked for."""

    def __init__(self, length: int, of: Callable[[Ints], Ints]) -> None:
        self._length, self._of = length, of

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, units: Ints | slice, /) -> Ints: ...

    @overload
    def __getitem__(self, units: int, /) -> int: ...

    def __getitem__(self, units: Ints | slice | int, /) -> Ints | int:
        if isinstance(units, slice):
            return self._of(np.arange(*units.indices(self._length)))
        if isinstance(units, int | np.integer):
            return int(self._of(np.array([units], np.int64))[0])
        return self._of(units)


class ObjectPlaces:
    """Where each object lies when those that hold chosen samples stand in a row."""

    def __init__(self, table: Table, chosen: Chosen) -> None:
        first = table.first_sample
        low = int(np.searchsorted(first, chosen[0], side="right")) - 1
        high = int(np.searchsorted(first, chosen[-1], side="right"))
        self._first, self._sizes = low, table.sizes[low:high]
        self._step = 1 if high - low <= _OBJECTS_MAX else _OBJECTS_A_SUM
        sums = [np.zeros(1, np.int64)]
        for at in range(0, high - low, _OBJECTS_MAX):
            sizes = self._sizes[at : at + _OBJECTS_MAX]
            sums.append(np.add.reduceat(sizes, np.arange(0, len(sizes), self._step)))
        self._before = np.cumsum(np.concatenate(sums))
        self.size_bytes = int(self._before[-1])
        """Of all objects that count."""

    def begins(self, objects: Ints) -> Ints:
        """Return where objects begin; those that do not count, somewhere."""
        number = np.clip(objects - self._first, 0, len(self._sizes) - 1)
        group = number // self._step
        out: Ints = self._before[group]
        if self._step > 1:
            for each in np.unique(group).tolist():
                at = each * self._step
                inside = np.cumsum(self._sizes[at : at + self._step])
                where = np.flatnonzero((group == each) & (number > at))
                out[where] += inside[number[where] - at - 1]
        return out


class EvenCut:
    """Runs of rows at even distances."""

    def __init__(self, table: Table, chosen: range) -> None:
        self._table, self._runs = table, EvenRuns.of(table, chosen)
        self._ends = np.cumsum(self._runs.counts)
        self.places = ObjectPlaces(table, chosen)
        self.num_units = int(self._ends[-1])
        self.lengths = ComputedColumn(self.num_units, self._lengths_of)

    def locate(self, ids: Ints) -> tuple[Ints, Ints]:
        """Return the unit of each sample, and where in the unit its extent begins."""
        runs, extents = self._runs, self._table.extents(ids)
        numbers = extents.object
        rows = ids - self._table.first_sample[numbers]
        place = runs.base[numbers] + rows * runs.stride[numbers]
        buckets = place // runs.bucket_bytes[numbers]
        before = self._ends[numbers] - runs.counts[numbers]
        units = before + buckets - runs.low[numbers]
        first = runs.first_rows(numbers, buckets) + self._table.first_sample[numbers]
        return units, extents.offset - self._table.extents(first).offset

    def _samples(self, units: Ints) -> tuple[Ints, Ints]:
        """Return the first sample of units and the one behind their last."""
        runs = self._runs
        numbers = np.searchsorted(self._ends, units, side="right")
        buckets = runs.low[numbers] + units - self._ends[numbers] + runs.counts[numbers]
        first = self._table.first_sample[numbers]
        return (
            first + runs.first_rows(numbers, buckets),
            first + runs.first_rows(numbers, buckets + 1),
        )

    def _lengths_of(self, units: Ints) -> Ints:
        starts, stops = self._samples(units)
        last = self._table.extents(stops - 1)
        return last.offset + last.length - self._table.extents(starts).offset

    def extents(self, units: Ints) -> Extents:
        """Return where units lie."""
        return self._table.extents(self._samples(units)[0])

    def samples_of(self, unit: int) -> tuple[int, int]:
        """Return the first sample and the number of samples of a unit."""
        starts, stops = self._samples(np.array([unit], np.int64))
        return int(starts[0]), int(stops[0] - starts[0])


class AllBlocksCut:
    """Blocks by the number that they have in the index, in the view or not."""

    def __init__(self, table: Table, chosen: Chosen) -> None:
        self._table = table
        self.places = ObjectPlaces(table, chosen)
        self.num_units = table.num_blocks
        self.lengths = ComputedColumn(self.num_units, lambda units: self.extents(units).length)

    def locate(self, ids: Ints) -> tuple[Ints, Ints]:
        """Return the unit of each sample, and zeros: its extent is the block's."""
        return self._table.extents(ids).block, np.zeros(len(ids), np.int64)

    def extents(self, units: Ints) -> Extents:
        """Return where units lie."""
        return self._table.extents(self._table.block_starts()[units])

    def samples_of(self, unit: int) -> tuple[int, int]:
        """Return the first sample and the number of samples of a block."""
        first, stop = self._table.block_starts()[unit : unit + 2].tolist()
        return first, stop - first


class SamplesCut:
    """A unit has the number of its first sample, counted among the chosen ones."""

    def __init__(self, table: Table, chosen: Chosen) -> None:
        self._table, self._chosen = table, chosen
        self.places = ObjectPlaces(table, chosen)
        self.num_units = len(chosen)
        self.lengths = ComputedColumn(self.num_units, lambda units: self._reach(units)[1])
        samples_a_run = RUN_BYTES * len(chosen) // max(1, self.places.size_bytes)
        self._window = min(max(_WINDOW_MIN, samples_a_run), _WINDOW_MAX)

    def locate(self, ids: Ints) -> tuple[Ints, Ints]:
        """Return the unit of each sample, and where in the unit its extent begins."""
        chosen = self._chosen
        numbers = ids - chosen.start if isinstance(chosen, range) else np.searchsorted(chosen, ids)
        units = self._first(numbers)
        return units, self._table.extents(ids).offset - self.extents(units).offset

    def extents(self, units: Ints) -> Extents:
        """Return where units lie."""
        return self._table.extents(self._ids(units))

    def samples_of(self, unit: int) -> tuple[int, int]:
        """Return the first sample and the number of samples of a unit."""
        one = np.array([unit], np.int64)
        return int(self._ids(one)[0]), int(self._reach(one)[0][0])

    def _ids(self, numbers: Ints) -> Ints:
        chosen = self._chosen
        return numbers + chosen.start if isinstance(chosen, range) else chosen[numbers]

    def _first(self, numbers: Ints) -> Ints:
        """Return the first sample of the run of each."""
        first, left, window = numbers.copy(), np.arange(len(numbers)), 1
        while len(left):
            stay = []
            for piece in _pieces(left, window):
                joined, _ = self._joined(first[piece][:, None] + np.arange(-window, 1))
                # Backwards from the sample: how many are joined to the one before them.
                counts = _leading(joined[:, ::-1])
                first[piece] -= counts
                stay.append(piece[counts == window])
            left, window = np.concatenate(stay), max(self._window, 8 * window)
        return first

    def _reach(self, numbers: Ints) -> tuple[Ints, Ints]:
        """Return the samples and bytes of the units that begin at some numbers; 0 where none do."""
        samples, sizes = np.zeros((2, len(numbers)), np.int64)
        left, window = np.arange(len(numbers)), 1
        while len(left):
            stay = []
            for piece in _pieces(left, window):
                joined, extents = self._joined(numbers[piece][:, None] + np.arange(-1, window + 1))
                counts = _leading(joined[:, 1:]) + 1
                ends = (extents.offset + extents.length)[:, 1:]
                ends = np.where(np.arange(window + 1) < counts[:, None], ends, 0)
                begins = ~joined[:, 0]
                samples[piece] = counts * begins
                sizes[piece] = (ends.max(axis=1) - extents.offset[:, 1]) * begins
                stay.append(piece[begins & (counts > window)])
            left, window = np.concatenate(stay), max(self._window, 8 * window)
        return samples, sizes

    def _joined(self, grid: Ints) -> tuple[Flags, Extents]:
        """Return which of some rows of numbers are joined to the one before, and where all lie."""
        # A number twice, as behind the ends, is never joined.
        ids = self._ids(np.clip(grid, 0, self.num_units - 1))
        flat = self._table.extents(ids.reshape(-1))
        shaped = [c.reshape(ids.shape) for c in (flat.object, flat.offset, flat.length)]
        extents = Extents(
            object=shaped[0], offset=shaped[1], length=shaped[2], row=flat.row, block=flat.block
        )
        return are_joined(ids, *shaped), extents


def _pieces(rows: Ints, window: int) -> list[Ints]:
    """Cut rows so that no more is looked at together than fits in little memory."""
    step = max(1, _CELLS_MAX // (window + 2))
    return [rows[at : at + step] for at in range(0, len(rows), step)]


def _leading(flags: Flags) -> Ints:
    """Return how many are set at the beginning of each row."""
    out: Ints = np.argmin(np.pad(flags, ((0, 0), (0, 1))), axis=1)
    return out


def can_compute(table: Table) -> bool:
    """Return whether the units of a table need not be kept: whether none of them overlap."""
    if table.addressing != "even":
        return True
    _, stride, width = table.even_layout()
    return bool((stride >= width).all())


ComputedCut = EvenCut | AllBlocksCut | SamplesCut


def computed_cut(table: Table, chosen: Chosen) -> ComputedCut:
    """Return the units of the chosen samples of one table, none of them kept."""
    if table.addressing == "blocks":
        return AllBlocksCut(table, chosen)
    if table.addressing == "even" and isinstance(chosen, range):
        return EvenCut(table, chosen)
    return SamplesCut(table, chosen)
