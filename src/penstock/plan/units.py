"""Units: what a tier keeps and what is fetched into it as one.

A tier must keep, mark and check something larger than a row of an array and smaller than a shard.
That is a *unit*: a block, a large sample, or a run of small ones that lie side by side. `cuts` has
the rule. It is one of the index alone: never of the machine, since jobs of different machines share
a tier, and never of the order.

A sample whose fields lie in several tables has a unit in each. A view has units of its own samples
only: a run ends where the view leaves a sample out. Units are numbered part by part, table by
table, sample by sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import xxhash

from penstock.dataset.dataset import Dataset
from penstock.dataset.mixture import Mixture
from penstock.dataset.part import Ints, Table
from penstock.plan.cuts import ALONE_BYTES, GAP_BYTES, RUN_BYTES, Chosen, Cut, cut_table

__all__ = ["ALONE_BYTES", "GAP_BYTES", "RUN_BYTES", "UnitExtent", "Units", "chosen_by_part"]

_RULE = f"units 1: alone {ALONE_BYTES}, run {RUN_BYTES}, gap {GAP_BYTES}"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitExtent:
    """Where the bytes of a unit lie."""

    bound_number: int
    """Which of `dataset.bound`."""
    table: int
    object: int
    offset: int
    length: int


class Units:
    """The units of a data set, by number."""

    def __init__(self, cuts: list[tuple[int, int, Cut]], fingerprint: str) -> None:
        self._cuts = cuts
        self._number = {(bound, table): n for n, (bound, table, _) in enumerate(cuts)}
        self._starts = np.cumsum([0] + [c.num_units for _, _, c in cuts]).astype(np.int64)
        self.name: str = xxhash.xxh3_128_hexdigest(f"{fingerprint} {_RULE}".encode())
        """A name for what the units hold; equal on every machine."""

    @classmethod
    def of(cls, dataset: Dataset | Mixture) -> Units:
        """Return the units of a data set, of a view, or of several data sets mixed."""
        cuts = []
        for bound_number, (table_set, chosen) in enumerate(chosen_by_part(dataset)):
            for number, table in enumerate(table_set):
                if len(chosen):
                    cuts.append((bound_number, number, cut_table(table, chosen)))
        return cls(cuts, dataset.fingerprint)

    @property
    def num_units(self) -> int:
        """Number of units."""
        return int(self._starts[-1])

    @cached_property
    def lengths(self) -> Ints:
        """Bytes of each unit, as it lies in its object."""
        parts = [cut.lengths for _, _, cut in self._cuts]
        if len(parts) == 1:
            return parts[0]  # The same array: for samples of their own it is all there is.
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of all units together."""
        return int(self.lengths.sum())

    def locate(self, bound_number: int, table: int, local_ids: Ints) -> tuple[Ints, Ints]:
        """Return the unit of each sample of a part, and where in the unit its extent begins.

        The samples must belong to the view that the units were cut from.
        """
        number = self._number[bound_number, table]
        units, inside = self._cuts[number][2].locate(local_ids)
        return units + self._starts[number], inside

    def extent(self, unit: int) -> UnitExtent:
        """Return where the bytes of a unit lie."""
        bound_number, table, cut, inside = self._cut_of(unit)
        extents = cut.extents(np.array([inside], np.int64))
        return UnitExtent(
            bound_number=bound_number,
            table=table,
            object=int(extents.object[0]),
            offset=int(extents.offset[0]),
            length=int(cut.lengths[inside]),
        )

    def extents(self, units: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Return of many units at once: place in `tables`, object, offset, length."""
        numbers = np.searchsorted(self._starts, units, side="right") - 1
        out = np.zeros((3, len(units)), np.int64)
        for number in np.unique(numbers).tolist():
            where = np.flatnonzero(numbers == number)
            cut, inside = self._cuts[number][2], units[where] - self._starts[number]
            extents = cut.extents(inside)
            out[:, where] = extents.object, extents.offset, cut.lengths[inside]
        return numbers, out[0], out[1], out[2]

    @property
    def tables(self) -> list[tuple[int, int]]:
        """The bound number and the table that each run of units belongs to, in their order."""
        return [(bound_number, table) for bound_number, table, _ in self._cuts]

    def samples_of(self, unit: int) -> tuple[int, int]:
        """Return the first sample (by its number in the part) and how many a unit holds."""
        _, _, cut, inside = self._cut_of(unit)
        return cut.samples_of(inside)

    def _cut_of(self, unit: int) -> tuple[int, int, Cut, int]:
        assert 0 <= unit < self.num_units, f"{unit=} {self.num_units=}"
        number = int(np.searchsorted(self._starts, unit, side="right")) - 1
        return *self._cuts[number], unit - int(self._starts[number])


def chosen_by_part(
    dataset: Dataset | Mixture,
) -> Iterator[tuple[tuple[Table, ...], Chosen]]:
    """Yield for every part its tables, and which of its samples the view holds."""
    if isinstance(dataset, Mixture):
        for one in dataset.datasets:
            yield from chosen_by_part(one)
        return
    chosen = _rising(dataset)
    for bound in dataset.bound:
        first, stop = bound.first, bound.first + bound.part.num_samples
        if isinstance(chosen, range):
            low, high = np.clip([chosen.start, chosen.stop], first, stop).tolist()
            yield bound.part.tables, range(low - first, high - first)
        else:
            low, high = np.searchsorted(chosen, [first, stop]).tolist()
            yield bound.part.tables, chosen[low:high] - first


def _rising(dataset: Dataset) -> Chosen:
    """Return the samples of a view, each once, in rising order."""
    selection = dataset.selection
    if selection is None:
        return range(int(dataset.starts[-1]))
    if not isinstance(selection, range):
        ids: Ints = np.unique(selection)
        if len(ids) and int(ids[-1]) - int(ids[0]) == len(ids) - 1:
            return range(int(ids[0]), int(ids[-1]) + 1)
        return ids
    rising = selection if selection.step > 0 else selection[::-1]
    if len(rising) <= 1 or rising.step == 1:
        return range(rising[0], rising[-1] + 1) if len(rising) else range(0)
    return np.arange(rising.start, rising.stop, rising.step, dtype=np.int64)
