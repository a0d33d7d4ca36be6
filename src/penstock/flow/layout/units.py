"""Units: what a tier keeps and what is fetched into it as one.

A tier must keep, mark and check something larger than a row of an array and smaller than a shard.
That is a *unit*: a block, a large sample, or a run of small ones that lie side by side. `cuts` has
the rule. It is one of the index alone: never of the machine, since jobs of different machines share
a tier, and never of the order.

A sample whose fields lie in several tables has a unit in each. A view has units of its own samples
only: a run ends where the view leaves a sample out. Units are numbered part by part, table by
table, sample by sample.

Of a very large data set no unit is kept (`cuts_computed`). `lengths` is then computed for the units
that are asked for, and some numbers are not used; `between` leaves them out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np
import xxhash

from penstock.dataset.dataset import Dataset
from penstock.dataset.mixture import Mixture
from penstock.dataset.part import Ints, Table
from penstock.flow.layout.cuts import (
    ALONE_BYTES,
    GAP_BYTES,
    RUN_BYTES,
    UNITS_MAX,
    Chosen,
    KeptCut,
    cut_alone,
    cut_table_to,
)
from penstock.flow.layout.cuts_computed import (
    ComputedColumn,
    ComputedCut,
    can_compute,
    computed_cut,
)
from penstock.storage.tier_shape import UnitColumn

__all__ = ["ALONE_BYTES", "GAP_BYTES", "RUN_BYTES", "UnitExtent", "Units", "chosen_by_part"]

_RULE = f"units 1: alone {ALONE_BYTES}, run {RUN_BYTES}, gap {GAP_BYTES}"
_ALONE_RULE = "units 1: every sample alone"
_COMPUTED_RULE = f"computed units 1: alone {ALONE_BYTES}, run {RUN_BYTES}, gap {GAP_BYTES}"

UnitCut = KeptCut | ComputedCut
_Cuts = list[tuple[int, int, UnitCut]]


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

    def __init__(
        self, cuts: _Cuts, fingerprint: str, *, is_computed: bool = False, rule: str = _RULE
    ) -> None:
        self._cuts = cuts
        self._number = {(bound, table): n for n, (bound, table, _) in enumerate(cuts)}
        self._starts = np.cumsum([0] + [c.num_units for _, _, c in cuts]).astype(np.int64)
        self.is_computed = is_computed
        """Whether there are too many to keep."""
        rule = _COMPUTED_RULE if is_computed else rule
        self.name: str = xxhash.xxh3_128_hexdigest(f"{fingerprint} {rule}".encode())
        """A name for what the units hold; equal on every machine."""

    @classmethod
    def of(cls, dataset: Dataset | Mixture) -> Units:
        """Return the units of a data set, of a view, or of several data sets mixed."""
        parts = list(_tables_of(dataset))
        cuts: _Cuts | None = None
        if all(can_compute(table) for _, _, table, _ in parts):
            cuts = _cuts_to(parts, UNITS_MAX)
            if cuts is None:
                computed: _Cuts = [(b, n, computed_cut(t, chosen)) for b, n, t, chosen in parts]
                return cls(computed, dataset.fingerprint, is_computed=True)
        return cls(cuts or _cuts_to(parts, inf) or [], dataset.fingerprint)

    @classmethod
    def alone(cls, dataset: Dataset | Mixture) -> Units:
        """Return units that are single samples, or blocks where a format has them."""
        parts = list(_tables_of(dataset))
        cuts: _Cuts = [(b, n, cut_alone(table, chosen)) for b, n, table, chosen in parts]
        return cls(cuts, dataset.fingerprint, rule=_ALONE_RULE)

    @property
    def num_units(self) -> int:
        """Number of units."""
        return int(self._starts[-1])

    @cached_property
    def lengths(self) -> Ints | UnitColumn:
        """Bytes of each unit, as it lies in its object."""
        if self.is_computed:
            of = self._each(lambda cut, inside: cut.lengths[inside])
            return ComputedColumn(self.num_units, of)
        parts = [cut.lengths for _, _, cut in self._cuts]
        if len(parts) == 1:
            return parts[0]  # Not a copy: of billions of samples it would double the memory.
        return np.concatenate([np.asarray(p) for p in parts]) if parts else np.zeros(0, np.int64)

    def _each(self, of: Callable[[UnitCut, Ints], Ints]) -> Callable[[Ints], Ints]:
        """Return a function of units from one of a cut and the units' numbers in it."""

        def made(units: Ints) -> Ints:
            if len(self._cuts) == 1:
                return of(self._cuts[0][2], units)
            numbers = np.searchsorted(self._starts, units, side="right") - 1
            out = np.zeros(len(units), np.int64)
            for number in np.unique(numbers).tolist():
                where = np.flatnonzero(numbers == number)
                out[where] = of(self._cuts[number][2], units[where] - self._starts[number])
            return out

        return made

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of all units together; with what lies between them where they are computed."""
        if self.is_computed:
            return sum(self.table_bytes)
        assert isinstance(self.lengths, np.ndarray)
        return int(self.lengths.sum())

    @cached_property
    def wanted_bytes(self) -> Ints:
        """Bytes of each unit's samples, without what lies between them; not of computed units."""
        parts = []
        for _, _, cut in self._cuts:
            assert isinstance(cut, KeptCut), type(cut)
            parts.append(cut.wanted_bytes())
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    @property
    def table_bytes(self) -> list[int]:
        """Bytes of the objects behind each of `tables`, where units are computed."""
        return [_computed(cut).places.size_bytes for _, _, cut in self._cuts]

    def object_places(self, begins: Ints) -> UnitColumn:
        """Return where units lie when objects stand in a row, those of each table from `begins`."""
        firsts = {
            id(cut): int(begin) for (_, _, cut), begin in zip(self._cuts, begins, strict=True)
        }

        def place(cut: UnitCut, inside: Ints) -> Ints:
            extents = cut.extents(inside)
            objects: Ints = _computed(cut).places.begins(extents.object)
            return firsts[id(cut)] + objects + extents.offset

        return ComputedColumn(self.num_units, self._each(place))

    def between(self, first: int, last: int) -> Ints:
        """Return the units from one to another, both among them."""
        units = np.arange(first, last + 1)
        return units[self.lengths[units] > 0] if self.is_computed else units

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
            length=int(cut.lengths[np.array([inside], np.int64)][0]),
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

    def _cut_of(self, unit: int) -> tuple[int, int, UnitCut, int]:
        assert 0 <= unit < self.num_units, f"{unit=} {self.num_units=}"
        number = int(np.searchsorted(self._starts, unit, side="right")) - 1
        return *self._cuts[number], unit - int(self._starts[number])


def _computed(cut: UnitCut) -> ComputedCut:
    assert isinstance(cut, ComputedCut), type(cut)
    return cut


def _tables_of(dataset: Dataset | Mixture) -> Iterator[tuple[int, int, Table, Chosen]]:
    for bound_number, (tables, chosen) in enumerate(chosen_by_part(dataset)):
        for number, table in enumerate(tables):
            if len(chosen):
                yield bound_number, number, table, chosen


def _cuts_to(parts: list[tuple[int, int, Table, Chosen]], units_max: float) -> _Cuts | None:
    """Return the units of all tables; None where there are more."""
    cuts: _Cuts = []
    for bound_number, number, table, chosen in parts:
        cut = cut_table_to(table, chosen, units_max)
        if cut is None:
            return None
        cuts.append((bound_number, number, cut))
        units_max -= cut.num_units
    return cuts


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
