"""Where the bytes of a group's samples are when a worker needs them: four kinds of stage.

* `RangesStage`: in one buffer, which merged ranges of the store were read into for this batch
  alone.
* `BlocksStage`: in blocks or runs that several batches share.
* `TierStage`: in the tiers of this node; their files are read when the samples are copied.
* `PeerStage`: in answers of other nodes for this batch alone, and partly in the tiers here.
  Blocks are whole units, which come into the tiers here, so their stage is a `TierStage`.

Groups without a stage lie in local files, which are also read when the samples are copied.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.dataset.formats.base import Sample
from penstock.dataset.formats.checked import PlacedBlock
from penstock.dataset.part import Ints
from penstock.engine.buffers import Bytes
from penstock.engine.fills import Fill
from penstock.engine.job import GroupPiece, SampleGroup
from penstock.engine.local_tiers import LocalTiers, SamplePlaces, count_tier_read
from penstock.engine.stats import Counters

if TYPE_CHECKING:
    from penstock.engine.peer_reads import RangesRead
    from penstock.engine.staging import Stager

Raw = memoryview | Bytes


class GroupStage(ABC):
    """The bytes of one group's samples; unless a stage knows better, copied one by one."""

    def __init__(self, stager: Stager, group: SampleGroup) -> None:
        self._stager = stager
        self._group = group

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
        """Copy the samples of a piece, all of one length, into the rows `where` of `target`."""
        for j, row in zip(range(piece.start, piece.stop), where.tolist(), strict=True):
            target[row] = np.frombuffer(self.raw(table, j), np.uint8)

    # -- samples in blocks -------------------------------------------------------------------

    def _block_names(self) -> list[Any]:
        """Return the name of each sample's block in the cache of blocks."""
        raise AssertionError(f"{self._group} does not lie in blocks")

    def _block(self, j: int, name: Any) -> PlacedBlock:
        """Return the unpacked block of sample j, read from its store if it is not in the cache."""
        block: PlacedBlock = self._stager.block(self._group, j, name)
        return block

    def samples(self, piece: GroupPiece) -> Iterator[Sample]:
        """Yield the samples of a piece; their blocks stay in the cache meanwhile."""
        names = self._block_names()
        rows = self._group.extents[0].row[piece.start : piece.stop].tolist()
        with self._stager.pinned(names[piece.start : piece.stop]):
            for j, row in zip(range(piece.start, piece.stop), rows, strict=True):
                yield self._block(j, names[j]).sample(row)

    def blocks(self, piece: GroupPiece) -> Iterator[tuple[PlacedBlock, Ints]]:
        """Yield each block that samples of a piece lie in, with the numbers of these samples."""
        names = self._block_names()
        numbers = self._group.extents[0].block[piece.start : piece.stop]
        order = np.argsort(numbers, kind="stable")
        edges = np.flatnonzero(np.diff(numbers[order])) + 1
        with self._stager.pinned(names[piece.start : piece.stop]):
            for chosen in np.split(order + piece.start, edges):
                j = int(chosen[0])
                yield self._block(j, names[j]), chosen


class RangesStage(GroupStage):
    """Samples inside one buffer that merged ranges were read into, one buffer a table."""

    def __init__(self, stager: Stager, group: SampleGroup) -> None:
        super().__init__(stager, group)
        self.buffers: list[memoryview] = []
        self.starts: list[list[int]] = []
        self.lengths: list[list[int]] = []

    def raw(self, table: int, j: int) -> memoryview:
        """Return the bytes of sample j of the group."""
        start = self.starts[table][j]
        return self.buffers[table][start : start + self.lengths[table][j]]


class BlocksStage(GroupStage):
    """Samples inside blocks or runs that several batches share."""

    def __init__(self, stager: Stager, group: SampleGroup, names: list[list[Any]]) -> None:
        super().__init__(stager, group)
        self.names = names
        """Names of the blocks by table and sample."""

    def raw(self, table: int, j: int) -> memoryview:
        """Return the bytes of sample j of the group."""
        start, data = self._stager.run(self._group, table, j, self.names[table][j])
        extents = self._group.extents[table]
        at = int(extents.offset[j]) - start
        return data[at : at + int(extents.length[j])]

    def _block_names(self) -> list[Any]:
        return self.names[0]


class TierStage(GroupStage):
    """Samples in the tiers of this node."""

    def __init__(
        self,
        stager: Stager,
        group: SampleGroup,
        local_tiers: LocalTiers,
        places: list[SamplePlaces],
        counters: Counters,
    ) -> None:
        super().__init__(stager, group)
        self._local_tiers = local_tiers
        self._places = places
        self._counters = counters
        self.fills: dict[int, Fill] = {}
        """Units that were not in the tiers when the batch was planned."""

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
        # The unit was found to be damaged, or the tier is lost.
        again = self._stager.fetched_again(unit)
        if again is None:
            return self._stager.read_sample(self._group, table, j)
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

    def _block_names(self) -> list[Any]:
        return list(self._places[0].units.tolist())

    def _block(self, j: int, name: Any) -> PlacedBlock:
        # Copied, because a block may point into its bytes for as long as it is cached, and other
        # processes can write to a tier's file: the block's offsets were checked only once.
        block: PlacedBlock = self._stager.block(
            self._group, j, name, lambda: np.array(self.raw(0, j))
        )
        return block


class PeerStage(GroupStage):
    """Samples that other nodes have; where a sample has several tables, some units may lie here."""

    def __init__(self, stager: Stager, group: SampleGroup, near: TierStage) -> None:
        super().__init__(stager, group)
        self._near = near
        self._sent: list[dict[int, tuple[RangesRead, int]]] = [{} for _ in group.extents]
        """By table and sample: the read that brings its bytes, and the number of its range."""

    def expect(self, table: int, samples: list[Ints], read: RangesRead) -> None:
        """Record which samples of the group the ranges of a read are."""
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
