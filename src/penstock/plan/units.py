"""Units: what a tier keeps and what is fetched into it as one.

A tier must keep, mark and check something larger than a row of an array and smaller than a shard.
That is a *unit*, cut by a rule of the index alone: never of the machine, since jobs of different
machines share a tier, and never of the order.

* Where samples are addressed by block, the block.
* A sample of `ALONE_BYTES` or more: the sample.
* Smaller samples: consecutive ones of one object that begin in the same `RUN_BYTES` of it, with the
  little that lies between them (headers of a tar file). Where a sample does not begin behind the
  one before it, or lies more than `GAP_BYTES` behind its end, the next unit begins.

A sample whose fields lie in several tables has a unit in each. A view has units of its own samples
only: a run ends where the view leaves a sample out.

Units are numbered part by part, table by table, sample by sample. Nothing here is stored per sample
but what a unit of its own costs: its length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.dataset.dataset import Dataset
from penstock.dataset.mixture import Mixture
from penstock.dataset.part import Extents, Ints, Table

ALONE_BYTES = 64 << 10
"""Samples from this size on are units of their own."""
RUN_BYTES = 128 << 10
"""Smaller ones share a unit with those that begin in the same so many bytes of their object."""
GAP_BYTES = 4 << 10
"""The most that a unit holds between two samples."""
_RULE = f"units 1: alone {ALONE_BYTES}, run {RUN_BYTES}, gap {GAP_BYTES}"
_CHUNK_SAMPLES = 1 << 20
"""Samples looked at together while units are cut: bounds the memory that this takes."""

Flags = npt.NDArray[np.bool_]
Chosen = range | Ints
"""Samples of a part, in rising order: a range of step 1, or ids."""


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


class Cut(Protocol):
    """The units of one table, numbered from 0."""

    num_units: int
    lengths: Ints

    def locate(self, ids: Ints) -> tuple[Ints, Ints]:
        """Return the unit of each sample, and where in the unit its extent begins."""

    def extents(self, units: Ints) -> Extents:
        """Return object and offset of units; the length is in `lengths`."""

    def samples_of(self, unit: int) -> tuple[int, int]:
        """Return the first sample and the number of samples of a unit."""


class AloneCut:
    """Every sample of a range is a unit: nothing is kept but the lengths."""

    def __init__(self, table: Table, chosen: range, lengths: Ints) -> None:
        self._table, self._first = table, chosen.start
        self.num_units, self.lengths = len(chosen), lengths

    def locate(self, ids: Ints) -> tuple[Ints, Ints]:
        """Return the unit of each sample, and zeros."""
        return ids - self._first, np.zeros(len(ids), np.int64)

    def extents(self, units: Ints) -> Extents:
        """Return where units lie."""
        return self._table.extents(units + self._first)

    def samples_of(self, unit: int) -> tuple[int, int]:
        """Return the sample."""
        return unit + self._first, 1


class RunsCut:
    """Units are runs of samples."""

    def __init__(self, table: Table, starts: Ints, stops: Ints, lengths: Ints) -> None:
        self._table, self._starts, self._stops = table, starts, stops
        self._offsets = table.extents(starts).offset
        self.num_units, self.lengths = len(starts), lengths

    def locate(self, ids: Ints) -> tuple[Ints, Ints]:
        """Return the unit of each sample, and where in the unit its extent begins."""
        units = np.searchsorted(self._starts, ids, side="right") - 1
        return units, self._table.extents(ids).offset - self._offsets[units]

    def extents(self, units: Ints) -> Extents:
        """Return where units lie."""
        return self._table.extents(self._starts[units])

    def samples_of(self, unit: int) -> tuple[int, int]:
        """Return the first sample and the number of samples of a unit."""
        first = int(self._starts[unit])
        return first, int(self._stops[unit]) - first


class BlocksCut:
    """Units are blocks; `kept` are those that hold a sample of the view, or None for all."""

    def __init__(self, table: Table, kept: Ints | None) -> None:
        self._table, self._kept = table, kept
        first = table.block_starts()[:-1] if kept is None else table.block_starts()[kept]
        self.lengths: Ints = table.extents(first).length
        self.num_units = len(first)

    def locate(self, ids: Ints) -> tuple[Ints, Ints]:
        """Return the unit of each sample, and zeros: its extent is the block's."""
        blocks = np.searchsorted(self._table.block_starts(), ids, side="right") - 1
        units = blocks if self._kept is None else np.searchsorted(self._kept, blocks)
        return units, np.zeros(len(ids), np.int64)

    def _blocks(self, units: Ints) -> Ints:
        return units if self._kept is None else self._kept[units]

    def extents(self, units: Ints) -> Extents:
        """Return where units lie."""
        return self._table.extents(self._table.block_starts()[self._blocks(units)])

    def samples_of(self, unit: int) -> tuple[int, int]:
        """Return the first sample and the number of samples of a block."""
        block = int(self._blocks(np.array([unit], np.int64))[0])
        first, stop = self._table.block_starts()[block : block + 2].tolist()
        return first, stop - first


def cut_table(table: Table, chosen: Chosen) -> Cut:
    """Return the units of the chosen samples of one table."""
    if table.addressing == "blocks":
        return BlocksCut(table, _kept_blocks(table, chosen))
    if table.addressing == "even" and isinstance(chosen, range):
        starts = EvenRuns.of(table, chosen).starts(table)
        last = np.append(starts[1:], chosen.stop) - 1
        lengths = _ends(table.extents(last)) - table.extents(starts).offset
    else:
        starts, lengths = _cut_runs(table, chosen)
    if isinstance(chosen, range):
        if len(starts) == len(chosen):
            return AloneCut(table, chosen, lengths)
        return RunsCut(table, starts, np.append(starts[1:], chosen.stop), lengths)
    after = np.searchsorted(chosen, starts[1:]) - 1
    stops = np.append(chosen[after], chosen[-1]) + 1
    return RunsCut(table, starts, stops, lengths)


def _cut_runs(table: Table, chosen: Chosen) -> tuple[Ints, Ints]:
    """Return the first sample and the length of each unit."""
    starts, lengths = zip(*runs_of(table, chosen), strict=True)
    return np.concatenate(starts), np.concatenate(lengths)


def runs_of(table: Table, chosen: Chosen) -> Iterator[tuple[Ints, Ints]]:
    """Yield the first sample and the length of units, many at once, looking at each sample once."""
    for ids, extents in _chunks(table, chosen):
        first = np.flatnonzero(_begins(ids, extents))
        ends = np.maximum.reduceat(_ends(extents), first)
        yield ids[first], ends - extents.offset[first]


def _chunks(table: Table, chosen: Chosen) -> Iterator[tuple[Ints, Extents]]:
    """Yield the chosen samples piece by piece; a piece ends where a unit ends."""
    at = 0
    while at < len(chosen):
        piece = chosen[at : at + _CHUNK_SAMPLES]
        ids = np.arange(piece.start, piece.stop) if isinstance(piece, range) else piece
        extents = table.extents(ids)
        count = len(ids)
        if at + count < len(chosen):
            # The last unit of a piece may go on in the next: leave it to that one.
            last = int(np.flatnonzero(_begins(ids, extents))[-1])
            count = last or count
        yield ids[:count], _head(extents, count)
        at += count


def _head(extents: Extents, count: int) -> Extents:
    return Extents(
        object=extents.object[:count],
        offset=extents.offset[:count],
        length=extents.length[:count],
        row=extents.row[:count],
        block=extents.block[:count],
    )


def _begins(ids: Ints, extents: Extents) -> Flags:
    """Return which samples begin a unit, the first one among them."""
    offset, ends = extents.offset, _ends(extents)
    small = extents.length < ALONE_BYTES
    bucket = offset // RUN_BYTES
    joined = (
        (np.diff(ids) == 1)
        & (np.diff(extents.object) == 0)
        & (np.diff(bucket) == 0)
        & (np.diff(offset) > 0)
        & (offset[1:] - ends[:-1] <= GAP_BYTES)
        & small[1:]
        & small[:-1]
    )
    return np.concatenate([[True], ~joined])


def _ends(extents: Extents) -> Ints:
    return extents.offset + extents.length


@dataclass(frozen=True, slots=True, kw_only=True)
class EvenRuns:
    """The runs of samples that lie at even distances, in closed form; parallel arrays by object.

    The same rule as `_begins`, so that a billion rows need no look at each. Row i lies at
    base + i·stride: bucket b of its object begins with row ⌈(b·RUN_BYTES - base) / stride⌉. Rows of
    their own are a bucket each: base 0, stride 1, a bucket of 1.
    """

    base: Ints
    stride: Ints
    bucket_bytes: Ints
    start: Ints
    """The first chosen row of each object."""
    low: Ints
    """Its bucket."""
    counts: Ints
    """Buckets that hold chosen rows, each of them a unit."""

    @classmethod
    def of(cls, table: Table, chosen: range) -> EvenRuns:
        """Return the runs of the chosen samples of an even table."""
        base, stride, width = table.even_layout()
        first = table.first_sample
        start = np.clip(first[:-1], chosen.start, chosen.stop) - first[:-1]
        stop = np.clip(first[1:], chosen.start, chosen.stop) - first[:-1]
        alone = (width >= ALONE_BYTES) | (stride <= 0) | (stride - width > GAP_BYTES)
        stride, base = np.where(alone, 1, stride), np.where(alone, 0, base)
        bucket_bytes = np.where(alone, 1, RUN_BYTES)
        low = (base + start * stride) // bucket_bytes
        high = (base + (stop - 1) * stride) // bucket_bytes
        return cls(
            base=base,
            stride=stride,
            bucket_bytes=bucket_bytes,
            start=start,
            low=low,
            counts=np.where(stop > start, high - low + 1, 0),
        )

    def starts(self, table: Table) -> Ints:
        """Return the first sample of each run."""
        numbers = np.repeat(np.arange(len(self.counts)), self.counts)
        before = np.cumsum(self.counts) - self.counts
        buckets = self.low[numbers] + np.arange(len(numbers)) - before[numbers]
        edge = buckets * self.bucket_bytes[numbers] - self.base[numbers]
        rows = np.maximum(-(-edge // self.stride[numbers]), self.start[numbers])
        out: Ints = rows + table.first_sample[numbers]
        return out


def _kept_blocks(table: Table, chosen: Chosen) -> Ints | None:
    """Return the blocks that hold chosen samples; None where that is every block."""
    starts = table.block_starts()
    if isinstance(chosen, range):
        low = int(np.searchsorted(starts, chosen.start, side="right")) - 1
        high = int(np.searchsorted(starts, chosen.stop, side="left"))
        kept = low + np.flatnonzero(np.diff(starts[low : high + 1]))
    else:
        kept = np.unique(table.extents(chosen).block)
    return None if len(kept) == table.num_blocks else kept


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
