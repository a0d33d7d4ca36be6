"""What is read ahead of the workers: ranges of remote objects, and blocks.

Samples of local files are read on the spot, while their bytes are warm. Everything that takes a
round trip is asked for as soon as its batch is planned, near ranges together. Where samples come in
blocks, or the order itself goes block by block, a block is read once for all the batches that use
it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from penstock.dataset.bound import BoundPart, explained
from penstock.dataset.formats.base import Sample
from penstock.dataset.part import Ints
from penstock.errors import StoreError
from penstock.loader.block_stage import BlockStage
from penstock.loader.buffers import BufferPool
from penstock.loader.job import Group, Job, Piece
from penstock.loader.reads import is_local
from penstock.loader.stats import Counters
from penstock.storage.coalesce import merge_ranges
from penstock.trace import Kind, Recorder

_GAP_BYTES_MAX = 256 << 10
_RANGE_BYTES_MAX = 8 << 20
_OBJECT_SPACING = 1 << 42

Read = Callable[[], Any]


class GroupStage(Protocol):
    """The bytes of one group's samples, read ahead."""

    def raw(self, table: int, j: int) -> memoryview:
        """Return the bytes of sample j of the group."""
        ...

    def samples(self, piece: Piece) -> Iterator[Sample]:
        """Yield the samples of a piece, where they lie in blocks."""
        ...


@dataclass(frozen=True, slots=True)
class _Ranges:
    """Samples inside one buffer that merged ranges were read into."""

    buffers: list[memoryview]
    starts: list[list[int]]
    lengths: list[list[int]]

    def raw(self, table: int, j: int) -> memoryview:
        start = self.starts[table][j]
        return self.buffers[table][start : start + self.lengths[table][j]]

    def samples(self, piece: Piece) -> Iterator[Sample]:
        raise AssertionError(f"{piece} does not lie in blocks")


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Samples inside blocks that several batches share."""

    stager: Stager
    group: Group
    names: list[list[Hashable]]
    """Names of the blocks by table and sample."""

    def samples(self, piece: Piece) -> Iterator[Sample]:
        rows = self.group.extents[0].row[piece.start : piece.stop].tolist()
        names = self.names[0][piece.start : piece.stop]
        with self.stager.pinned(names):
            for j, row, name in zip(range(piece.start, piece.stop), rows, names, strict=True):
                yield self.stager.block(self.group, j, name).sample(row)

    def raw(self, table: int, j: int) -> memoryview:
        start, data = self.stager.run(self.group, table, j, self.names[table][j])
        extents = self.group.extents[table]
        at = int(extents.offset[j]) - start
        return data[at : at + int(extents.length[j])]


class Stager:
    """Plans and does the reads ahead of a run."""

    def __init__(
        self,
        pool: BufferPool,
        counters: Counters,
        *,
        stage_bytes: int,
        run_starts: Ints | None,
        reads_ahead: bool,
        recorder: Recorder | None,
    ) -> None:
        self._pool = pool
        self._counters = counters
        self._stage_bytes = stage_bytes
        self._reads_ahead = reads_ahead
        self._blocks = BlockStage(stage_bytes)
        self._run_starts = run_starts
        self._recorder = recorder

    def stage(self, job: Job) -> list[Read]:
        """Decide how each group of a job gets its bytes; return the reads to be done ahead."""
        reads: list[Read] = []
        if not self._reads_ahead:
            return reads  # Worker processes read for themselves.
        for number, group in enumerate(job.groups):
            local = is_local(group.bound)
            if group.bound.by_block or (self._run_starts is not None and not local):
                stage = self._stage_blocks(group)
                job.staged[number] = stage
                reads += [] if local else self._block_reads(group, stage)
            elif not local:
                ranges_stage, ranges = self._stage_ranges(group)
                job.staged[number] = ranges_stage
                job.staged_bytes += sum(len(b) for b in ranges_stage.buffers) - group.size_bytes
                reads += ranges
        return reads

    def _stage_blocks(self, group: Group) -> _Blocks:
        names: list[list[Hashable]] = []
        for table, extents in enumerate(group.extents):
            if group.bound.by_block:
                numbers = extents.block
            else:
                assert self._run_starts is not None
                ids = group.local_ids + group.bound.first
                numbers = np.searchsorted(self._run_starts, ids, side="right") - 1
            names.append([(id(group.bound), table, n) for n in numbers.tolist()])
        return _Blocks(self, group, names)

    def _block_reads(self, group: Group, stage: _Blocks) -> list[Read]:
        first_use: dict[Hashable, tuple[int, int]] = {}
        for table, names in enumerate(stage.names):
            for j, name in enumerate(names):
                first_use.setdefault(name, (table, j))
        # What would not stay until it is used is better read when it is.
        lengths = group.extents[0].length
        fits = max(1, self._stage_bytes // 2 // max(1, int(lengths.max())))
        chosen = list(first_use.items())[:fits]
        if group.bound.by_block:
            return [partial(self.block, group, j, n) for n, (_, j) in chosen]
        return [partial(self.run, group, t, j, n) for n, (t, j) in first_use.items()]

    @contextmanager
    def pinned(self, names: list[Hashable]) -> Iterator[None]:
        """Keep some blocks while they are in use."""
        distinct = list(dict.fromkeys(names))
        self._blocks.pin(distinct)
        try:
            yield
        finally:
            self._blocks.unpin(distinct)

    def block(self, group: Group, j: int, name: Hashable) -> Any:
        """Return the unpacked block of a sample, reading it if need be."""

        def load() -> tuple[Any, int]:
            e = group.extents[0]
            number, offset = int(e.object[j]), int(e.offset[j])
            raw = self._read(group.bound, 0, number, offset, int(e.length[j]))
            block = group.bound.unpack_raw(number, offset, raw)
            return block, block.size_bytes

        return self._blocks.get(name, load)

    def run(self, group: Group, table: int, j: int, name: Hashable) -> tuple[int, memoryview]:
        """Return offset and bytes of the run of samples that a sample lies in."""

        def load() -> tuple[tuple[int, memoryview], int]:
            bound = group.bound
            assert self._run_starts is not None
            i = int(group.local_ids[j]) + bound.first
            number = int(np.searchsorted(self._run_starts, i, side="right")) - 1
            ends = self._run_starts[number : number + 2] - bound.first - np.array([0, 1])
            e = bound.part.tables[table].extents(ends)
            start, stop = int(e.offset[0]), int(e.offset[1] + e.length[1])
            data = self._read(bound, table, int(e.object[0]), start, stop - start)
            return (start, data), len(data)

        found: tuple[int, memoryview] = self._blocks.get(name, load)
        return found

    def _stage_ranges(self, group: Group) -> tuple[_Ranges, list[Read]]:
        stage = _Ranges([], [], [])
        reads: list[Read] = []
        for table, e in enumerate(group.extents):
            # All objects in one call, numbered anew and so far apart that no two are ever merged.
            objects, numbers = np.unique(e.object, return_inverse=True)
            assert int(e.offset.max()) < _OBJECT_SPACING
            assert len(objects) < 2**63 // _OBJECT_SPACING
            merged = merge_ranges(
                numbers * _OBJECT_SPACING + e.offset,
                e.length,
                gap_bytes_max=_GAP_BYTES_MAX,
                length_bytes_max=_RANGE_BYTES_MAX,
            )
            ends = np.cumsum(merged.lengths)
            buffer = self._pool.view(int(ends[-1]))
            places = (ends - merged.lengths).tolist()
            starts = (ends - merged.lengths)[merged.index] + merged.inside
            stage.buffers.append(buffer)
            stage.starts.append(starts.tolist())
            stage.lengths.append(e.length.tolist())
            for at, far, length in zip(
                places, merged.offsets.tolist(), merged.lengths.tolist(), strict=True
            ):
                place, offset = divmod(far, _OBJECT_SPACING)
                number = int(objects[place])
                view = buffer[at : at + length]
                reads.append(partial(self._read_into, group.bound, table, number, offset, view))
        return stage, reads

    def _read(
        self, bound: BoundPart, table: int, number: int, offset: int, length: int
    ) -> memoryview:
        view = self._pool.view(length)
        self._read_into(bound, table, number, offset, view)
        return view

    def _read_into(
        self, bound: BoundPart, table: int, number: int, offset: int, view: memoryview
    ) -> None:
        key = bound.part.tables[table].key(number)
        begin = time.perf_counter_ns()
        try:
            bound.store.read_into(key, offset, view)
        except StoreError as error:
            raise explained(error, bound, table, number) from error
        end = time.perf_counter_ns()
        self._counters.add_reads(bound.store.source, len(view), 1, (end - begin) / 1e9)
        if self._recorder is not None:
            self._recorder.span(Kind.FETCH, begin, end, key=key, offset=offset, bytes=len(view))
