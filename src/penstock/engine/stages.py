"""Where the bytes of a group's samples are when a worker needs them: four kinds of stage.

* `RangesStage`: in one buffer, which merged ranges of the store were read into for this batch
  alone.
* `BlocksStage`: in blocks or runs that several batches share.
* `TierStage`: in the tiers of this node, read from their files on the spot.
* `SpreadStage`: in what other nodes have sent for this batch alone, and partly in the tiers here.

Groups without a stage lie in local files and are read on the spot as well.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from penstock.dataset.formats.base import Sample
from penstock.dataset.formats.checked import PlacedBlock
from penstock.dataset.part import Ints
from penstock.engine.buffers import Bytes
from penstock.engine.fills import Fill
from penstock.engine.job import GroupPiece, SampleGroup
from penstock.engine.local_tiers import LocalTiers, SamplePlaces, count_tier_read
from penstock.engine.stats import Counters

Raw = memoryview | Bytes


class GroupStage(Protocol):
    """The bytes of one group's samples."""

    def raw(self, table: int, j: int) -> Raw:
        """Return the bytes of sample j of the group."""
        ...

    def copy_into(
        self, table: int, piece: GroupPiece, target: Bytes, starts: Sequence[int]
    ) -> None:
        """Copy the samples of a piece into `target`, each to its start."""
        ...

    def copy_rows(self, table: int, piece: GroupPiece, target: Bytes, where: Ints) -> None:
        """Copy the samples of a piece, all of one length, into the rows `where` of `target`."""
        ...

    def samples(self, piece: GroupPiece) -> Iterator[Sample]:
        """Yield the samples of a piece, where they lie in blocks."""
        ...

    def blocks(self, piece: GroupPiece) -> Iterator[tuple[PlacedBlock, Ints]]:
        """Yield the blocks that the samples of a piece lie in, each with its samples."""
        ...


class BlockSource(Protocol):
    """Whoever reads, unpacks and keeps blocks and runs."""

    def pinned(self, names: list[Any]) -> AbstractContextManager[None]:
        """Keep some blocks while they are in use."""
        ...

    def block(
        self, group: SampleGroup, j: int, name: Any, raw: Callable[[], Raw] | None = None
    ) -> Any:
        """Return the unpacked block of a sample; its bytes come from `raw`, if that is given."""
        ...

    def run(self, group: SampleGroup, table: int, j: int, name: Any) -> tuple[int, memoryview]:
        """Return offset and bytes of the run of samples that a sample lies in."""
        ...


class UnitSource(Protocol):
    """Whoever brings what a tier should have had."""

    def fetched_again(self, unit: int) -> memoryview | None:
        """Fetch a unit that is damaged in its tier; None where another thread is doing so."""
        ...

    def read_sample(self, group: SampleGroup, table: int, j: int) -> memoryview:
        """Return the extent of a sample from its store."""
        ...


class _ByOne(ABC):
    """Copies sample by sample, from wherever `raw` finds it."""

    @abstractmethod
    def raw(self, table: int, j: int) -> Raw:
        """Return the bytes of sample j of the group."""

    def copy_into(
        self, table: int, piece: GroupPiece, target: Bytes, starts: Sequence[int]
    ) -> None:
        """Copy the samples of a piece into `target`, each to its start."""
        for j, start in zip(range(piece.start, piece.stop), starts, strict=True):
            raw = self.raw(table, j)
            target[start : start + len(raw)] = raw

    def copy_rows(self, table: int, piece: GroupPiece, target: Bytes, where: Ints) -> None:
        """Copy the samples of a piece into rows of `target`."""
        for j, row in zip(range(piece.start, piece.stop), where.tolist(), strict=True):
            target[row] = np.frombuffer(self.raw(table, j), np.uint8)


class RangesStage(_ByOne):
    """Samples inside one buffer that merged ranges were read into, one for each table."""

    def __init__(self) -> None:
        self.buffers: list[memoryview] = []
        self.starts: list[list[int]] = []
        self.lengths: list[list[int]] = []

    def raw(self, table: int, j: int) -> memoryview:
        """Return the bytes of sample j of the group."""
        start = self.starts[table][j]
        return self.buffers[table][start : start + self.lengths[table][j]]

    def samples(self, piece: GroupPiece) -> Iterator[Sample]:
        """Fail: these samples are addressed alone."""
        raise AssertionError(f"{piece} does not lie in blocks")

    def blocks(self, piece: GroupPiece) -> Iterator[tuple[PlacedBlock, Ints]]:
        """Fail: these samples are addressed alone."""
        raise AssertionError(f"{piece} does not lie in blocks")


class BlocksStage(_ByOne):
    """Samples inside blocks or runs that several batches share."""

    def __init__(self, source: BlockSource, group: SampleGroup, names: list[list[Any]]) -> None:
        self._source = source
        self._group = group
        self.names = names
        """Names of the blocks by table and sample."""

    def raw(self, table: int, j: int) -> memoryview:
        """Return the bytes of sample j of the group."""
        start, data = self._source.run(self._group, table, j, self.names[table][j])
        extents = self._group.extents[table]
        at = int(extents.offset[j]) - start
        return data[at : at + int(extents.length[j])]

    def samples(self, piece: GroupPiece) -> Iterator[Sample]:
        """Yield the samples of a piece."""
        return block_samples(self._source, self._group, self.names[0], piece, None)

    def blocks(self, piece: GroupPiece) -> Iterator[tuple[PlacedBlock, Ints]]:
        """Yield the blocks of a piece."""
        return blocks_of(self._source, self._group, self.names[0], piece, None)


class TierStage:
    """Samples in the tiers of this node."""

    def __init__(
        self,
        local_tiers: LocalTiers,
        group: SampleGroup,
        places: list[SamplePlaces],
        counters: Counters,
        *,
        blocks: BlockSource,
        source: UnitSource,
    ) -> None:
        self._local_tiers = local_tiers
        self._group = group
        self._places = places
        self._counters = counters
        self._blocks = blocks
        self._source = source
        self.fills: dict[int, Fill] = {}
        """Units that were not there when the batch was planned."""

    def raw(self, table: int, j: int) -> Raw:
        """Return the bytes of sample j of the group."""
        places = self._places[table]
        unit, inside = int(places.units[j]), int(places.inside[j])
        length = int(self._group.extents[table].length[j])
        begin_s = time.perf_counter()
        near = self._local_tiers.read(unit, inside, length)
        if near is not None:
            count_tier_read(self._local_tiers.tier(unit), begin_s, length, 1, self._counters)
            return near
        fill = self.fills.get(unit)
        if fill is not None and fill.data is not None:
            return fill.data[inside : inside + length]
        # It was found to be damaged, or the tier is lost.
        again = self._source.fetched_again(unit)
        if again is None:
            return self._source.read_sample(self._group, table, j)
        return again[inside : inside + length]

    def copy_into(
        self, table: int, piece: GroupPiece, target: Bytes, starts: Sequence[int]
    ) -> None:
        """Copy the samples of a piece into `target`, each to its start."""
        lengths = self._group.extents[table].length[piece.start : piece.stop]
        places = self._places[table].part(piece)
        at = np.asarray(starts, np.int64)
        absent = self._local_tiers.copy_into(places, lengths, target, at, self._counters)
        for i in absent.tolist():
            raw = self.raw(table, piece.start + i)
            target[starts[i] : starts[i] + len(raw)] = raw

    def copy_rows(self, table: int, piece: GroupPiece, target: Bytes, where: Ints) -> None:
        """Copy the samples of a piece into rows of `target`."""
        assert target.flags.c_contiguous
        starts = where * target.shape[1]
        self.copy_into(table, piece, target.reshape(-1), starts)

    def count(self, piece: GroupPiece) -> None:
        """Count the samples of a piece as read, by others than us."""
        for table, extents in enumerate(self._group.extents):
            lengths = extents.length[piece.start : piece.stop]
            self._local_tiers.count(self._places[table].part(piece), lengths, self._counters)

    def samples(self, piece: GroupPiece) -> Iterator[Sample]:
        """Yield the samples of a piece, where they lie in blocks."""
        names = self._places[0].units.tolist()
        return block_samples(self._blocks, self._group, names, piece, self._block_raw)

    def blocks(self, piece: GroupPiece) -> Iterator[tuple[PlacedBlock, Ints]]:
        """Yield the blocks of a piece."""
        names = self._places[0].units.tolist()
        return blocks_of(self._blocks, self._group, names, piece, self._block_raw)

    def _block_raw(self, j: int) -> Raw:
        # Copied, because a block may point into its bytes for as long as it is kept, and others can
        # write to a mapped tier: offsets that were checked would be others then.
        return np.array(self.raw(0, j))


class PeerStage(Protocol):
    """What another node is to send."""

    parts: list[memoryview | None]
    """The bytes of each range, once they are there."""


class SpreadStage(_ByOne):
    """Samples that other nodes have; of several tables, some units may lie here."""

    def __init__(
        self,
        near: TierStage,
        group: SampleGroup,
        places: list[SamplePlaces],
        *,
        blocks: BlockSource,
    ) -> None:
        self._near = near
        self._group = group
        self._places = places
        self._blocks = blocks
        self._sent: list[dict[int, tuple[PeerStage, int]]] = [{} for _ in places]
        """By table and sample: what brings its bytes, and which of its ranges they are."""

    def expect(self, table: int, samples: list[Ints], read: PeerStage) -> None:
        """Take note that the ranges of a read are some samples of the group."""
        for number, several in enumerate(samples):
            for j in several.tolist():
                self._sent[table][j] = read, number

    def raw(self, table: int, j: int) -> Raw:
        """Return the bytes of sample j of the group."""
        found = self._sent[table].get(j)
        if found is None:
            return self._near.raw(table, j)
        part = found[0].parts[found[1]]
        assert part is not None
        return part

    def samples(self, piece: GroupPiece) -> Iterator[Sample]:
        """Yield the samples of a piece, where they lie in blocks."""
        names = self._places[0].units.tolist()
        return block_samples(self._blocks, self._group, names, piece, lambda j: self.raw(0, j))

    def blocks(self, piece: GroupPiece) -> Iterator[tuple[PlacedBlock, Ints]]:
        """Yield the blocks of a piece."""
        names = self._places[0].units.tolist()
        return blocks_of(self._blocks, self._group, names, piece, lambda j: self.raw(0, j))


def block_samples(
    source: BlockSource,
    group: SampleGroup,
    all_names: list[Any],
    piece: GroupPiece,
    raw: Callable[[int], Raw] | None,
) -> Iterator[Sample]:
    """Yield the samples of a piece out of unpacked blocks, which stay while they are in use."""
    rows = group.extents[0].row[piece.start : piece.stop].tolist()
    names = all_names[piece.start : piece.stop]
    with source.pinned(names):
        for j, row, name in zip(range(piece.start, piece.stop), rows, names, strict=True):
            read = None if raw is None else (lambda j=j: raw(j))
            yield source.block(group, j, name, read).sample(row)


def blocks_of(
    source: BlockSource,
    group: SampleGroup,
    all_names: list[Any],
    piece: GroupPiece,
    raw: Callable[[int], Raw] | None,
) -> Iterator[tuple[PlacedBlock, Ints]]:
    """Yield the blocks of a piece, which stay while they are in use, with their samples."""
    numbers = group.extents[0].block[piece.start : piece.stop]
    order = np.argsort(numbers, kind="stable")
    edges = np.flatnonzero(np.diff(numbers[order])) + 1
    with source.pinned(all_names[piece.start : piece.stop]):
        for chosen in np.split(order + piece.start, edges):
            j = int(chosen[0])
            read = None if raw is None else (lambda j=j: raw(j))
            yield source.block(group, j, all_names[j], read), chosen
