"""Cutting a table into units: the rule, and the ways to keep what came of it.

* Where samples are addressed by block, the block.
* A sample of `ALONE_BYTES` or more: the sample.
* Smaller samples: consecutive ones of one object that begin in the same `RUN_BYTES` of it, with the
  little that lies between them (headers of a tar file). Where a sample does not begin behind the
  one before it, or lies more than `GAP_BYTES` behind its end, the next unit begins.

Nothing is kept per sample but what a unit of its own costs, its length; and nothing as long as the
table is made on the way. Of more than `UNITS_MAX` units nothing is kept at all: `cuts_computed`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from penstock.dataset.part import Extents, Ints, Table

ALONE_BYTES = 64 << 10
"""Samples from this size on are units of their own."""
RUN_BYTES = 128 << 10
"""Smaller samples share a unit with those that begin in the same stretch of this many bytes."""
GAP_BYTES = 4 << 10
"""The most that a unit holds between two samples."""
UNITS_MAX = 1 << 24
"""More units than this are computed when they are asked for."""
SAMPLES_MAX = 1 << 27
"""More samples than this are not looked at one by one to find that out."""
_CHUNK_SAMPLES = 1 << 20
"""Samples looked at together while units are cut: bounds the memory that this takes."""

Flags = npt.NDArray[np.bool_]
Chosen = range | Ints
"""Samples of a part, in rising order: a range of step 1, or ids."""


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

    def wanted_bytes(self) -> Ints:
        """Return the bytes of each unit's samples: all of it."""
        return self.lengths


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

    def wanted_bytes(self) -> Ints:
        """Return the bytes of each unit's samples, without what lies between them."""
        if self._table.addressing == "even":
            width = self._table.extents(self._starts).length
            # Windows of a token stream overlap: together they are no more than the unit.
            even: Ints = np.minimum(self.lengths, width * (self._stops - self._starts))
            return even
        # Sums from each start to its stop; the sums from a stop to the next start are left out.
        edges = np.stack([self._starts, self._stops], axis=1).reshape(-1)
        lengths = np.append(self._table.sample_bytes(), 0)
        sums: Ints = np.add.reduceat(lengths, edges, dtype=np.int64)[::2]
        return sums


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

    def wanted_bytes(self) -> Ints:
        """Return the bytes of each block: its samples cannot be read without it."""
        return self.lengths


KeptCut = AloneCut | RunsCut | BlocksCut


def cut_table(table: Table, chosen: Chosen) -> KeptCut:
    """Return the units of the chosen samples of one table."""
    cut = cut_table_to(table, chosen, inf)
    assert cut is not None
    return cut


def cut_table_to(table: Table, chosen: Chosen, units_max: float) -> KeptCut | None:
    """Return the same; None where there are more units, or too many samples to find out."""
    if table.addressing == "blocks":
        if _num_blocks(table, chosen, units_max) > units_max:
            return None
        return BlocksCut(table, _kept_blocks(table, chosen))
    if table.addressing == "even" and isinstance(chosen, range):
        runs = EvenRuns.of(table, chosen)
        if int(runs.counts.sum()) > units_max:
            return None
        starts = runs.starts(table)
        last = np.append(starts[1:], chosen.stop) - 1
        lengths = _ends(table.extents(last)) - table.extents(starts).offset
    else:
        found = _cut_runs(table, chosen, units_max)
        if found is None:
            return None
        starts, lengths = found
    if isinstance(chosen, range):
        if len(starts) == len(chosen):
            return AloneCut(table, chosen, lengths)
        return RunsCut(table, starts, np.append(starts[1:], chosen.stop), lengths)
    after = np.searchsorted(chosen, starts[1:]) - 1
    stops = np.append(chosen[after], chosen[-1]) + 1
    return RunsCut(table, starts, stops, lengths)


def cut_alone(table: Table, chosen: Chosen) -> KeptCut:
    """Return units that are single samples; blocks stay blocks."""
    if table.addressing == "blocks":
        return BlocksCut(table, _kept_blocks(table, chosen))
    ids = np.arange(chosen.start, chosen.stop) if isinstance(chosen, range) else chosen
    lengths = table.extents(ids).length
    if isinstance(chosen, range):
        return AloneCut(table, chosen, lengths)
    return RunsCut(table, ids, ids + 1, lengths)


def _cut_runs(table: Table, chosen: Chosen, units_max: float = inf) -> tuple[Ints, Ints] | None:
    """Return the first sample and the length of each unit; None where there are more."""
    if units_max < inf and len(chosen) > SAMPLES_MAX:
        return None
    if _units_min(table, chosen, units_max) > units_max:
        return None
    pieces, count = [], 0
    for piece in runs_of(table, chosen):
        pieces.append(piece)
        count += len(piece[0])
        if count > units_max:
            return None
    starts, lengths = zip(*pieces, strict=True)
    return np.concatenate(starts), np.concatenate(lengths)


def _units_min(table: Table, chosen: Chosen, enough: float) -> int:
    """Return how many units there are at least, by the lengths of the samples alone."""
    if table.addressing != "extents" or len(chosen) <= enough:
        return 0
    lengths, alone, shared_bytes = table.sample_bytes(), 0, 0
    for at in range(0, len(chosen), _CHUNK_SAMPLES):
        piece = chosen[at : at + _CHUNK_SAMPLES]
        some = lengths[piece.start : piece.stop] if isinstance(piece, range) else lengths[piece]
        is_alone = some >= ALONE_BYTES
        alone += int(np.count_nonzero(is_alone))
        shared_bytes += int(some[~is_alone].sum(dtype=np.int64))
        if alone > enough:
            break
    return alone + shared_bytes // (RUN_BYTES + ALONE_BYTES)


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
    joined = are_joined(ids, extents.object, extents.offset, extents.length)
    return np.concatenate([[True], ~joined])


def are_joined(ids: Ints, objects: Ints, offsets: Ints, lengths: Ints) -> Flags:
    """Return which samples are in the unit of the one before; along the last axis, the first not
    asked about.
    """
    small = lengths < ALONE_BYTES
    joined: Flags = (
        (np.diff(ids) == 1)
        & (np.diff(objects) == 0)
        & (np.diff(offsets // RUN_BYTES) == 0)
        & (np.diff(offsets) > 0)
        & (offsets[..., 1:] - (offsets + lengths)[..., :-1] <= GAP_BYTES)
        & small[..., 1:]
        & small[..., :-1]
    )
    return joined


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
    stop: Ints
    """The row behind the last."""
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
            stop=stop,
            low=low,
            counts=np.where(stop > start, high - low + 1, 0),
        )

    def starts(self, table: Table) -> Ints:
        """Return the first sample of each run."""
        numbers = np.repeat(np.arange(len(self.counts)), self.counts)
        before = np.cumsum(self.counts) - self.counts
        buckets = self.low[numbers] + np.arange(len(numbers)) - before[numbers]
        out: Ints = self.first_rows(numbers, buckets) + table.first_sample[numbers]
        return out

    def first_rows(self, numbers: Ints, buckets: Ints) -> Ints:
        """Return the first chosen row of buckets of objects, or behind the last one's end."""
        edge = buckets * self.bucket_bytes[numbers] - self.base[numbers]
        rows = np.maximum(-(-edge // self.stride[numbers]), self.start[numbers])
        out: Ints = np.minimum(rows, self.stop[numbers])
        return out


def _num_blocks(table: Table, chosen: Chosen, enough: float) -> int:
    """Return how many blocks hold chosen samples, or more if there can be no more than enough."""
    if table.num_blocks <= enough:
        return table.num_blocks
    if not isinstance(chosen, range):
        return len(np.unique(table.extents(chosen).block))
    starts = table.block_starts()
    low = int(np.searchsorted(starts, chosen.start, side="right")) - 1
    high = int(np.searchsorted(starts, chosen.stop, side="left"))
    pieces = range(low, high, _CHUNK_SAMPLES)
    return sum(
        int(np.count_nonzero(np.diff(starts[at : min(at + _CHUNK_SAMPLES, high) + 1])))
        for at in pieces
    )


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
