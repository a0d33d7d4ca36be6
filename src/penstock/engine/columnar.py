"""Batches that are made a field at a time: no Python runs for a single sample.

Samples that are addressed alone are copied into one buffer; fields of plain bytes are cuts of it.
Samples in blocks are taken out of each block a column at a time. Small encoded values (labels,
JSON, texts, arrays) are decoded all at once. If a field of a batch has an odd value, such as one
that cannot be decoded, the field is made sample by sample with the functions of `DecodeMaker`; so
values, types and errors are the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.dataset.bound import BoundPart
from penstock.dataset.fields import COLUMN_DECODERS, VALUE, is_raw
from penstock.dataset.part import Ints
from penstock.dataset.ragged import FieldColumns
from penstock.engine.assemble import BatchFields, ColumnPart
from penstock.engine.buffers import BufferPool, Bytes
from penstock.engine.job import BatchJob, GroupPiece, SampleGroup, cut
from penstock.engine.reads import SampleReader
from penstock.engine.stats import Counters

_PIECE_BYTES = 16 << 20
_SAMPLES_A_PIECE_MIN = 16
"""Taking some rows of a column costs about as much as taking one."""


def can_make_columns(bounds: Sequence[BoundPart]) -> bool:
    """Return whether every field can be made for many samples at once."""
    decoders: dict[str, Any] = {}
    for bound in bounds:
        if len(bound.part.tables) != 1 or not bound.has_columns:
            return False
        if bound.by_block != bounds[0].by_block:
            return False
        for f in bound.part.fields:
            decoder = bound.steps[f.name][1] if f.name in bound.steps else None
            if decoder is not None and not (is_raw(decoder) or decoder in COLUMN_DECODERS):
                return False
            if f.name in bound.given or decoders.setdefault(f.name, decoder) is not decoder:
                return False
            if decoder is not None and f.encoding == VALUE:
                return False
    return True


def stays_bytes(bounds: Sequence[BoundPart]) -> bool:
    """Return whether batches are copies: besides, nothing is unpacked or decoded."""
    return can_make_columns(bounds) and not any(
        bound.by_block
        or any(f.encoding == VALUE or not is_raw(bound.steps[f.name][1]) for f in bound.part.fields)
        for bound in bounds
    )


class ColumnMaker:
    """Makes batches of columns."""

    decodes_here = True

    def __init__(
        self, pool: BufferPool, reader: SampleReader, counters: Counters, *, num_threads: int
    ) -> None:
        self._pool = pool
        self._reader = reader
        self._counters = counters
        self._num_threads = num_threads
        self.waits_here = reader.copies_in_workers

    def plan(self, job: BatchJob) -> list[GroupPiece]:
        """Give each sample its place in one buffer; samples in blocks need none."""
        if job.groups[0].bound.by_block:
            job.state = []
            share = -(-job.num_samples // self._num_threads)
            return cut(job.groups, max(_SAMPLES_A_PIECE_MIN, share))
        lengths = np.zeros(job.num_samples, np.int64)
        for group in job.groups:
            lengths[group.where] = group.extents[0].length
        ends = np.cumsum(lengths)
        job.size_bytes = int(ends[-1])
        job.state = self._pool.array((job.size_bytes,), np.uint8), ends - lengths
        mean = max(1, job.size_bytes // job.num_samples)
        return cut(job.groups, max(1, _PIECE_BYTES // mean))

    def work(self, job: BatchJob, piece: GroupPiece) -> None:
        """Copy the samples of a piece to their places, or take them out of their blocks."""
        group = job.groups[piece.group]
        stage = job.staged.get(piece.group)
        if group.bound.by_block:
            assert stage is not None
            begin = time.perf_counter()
            for block, chosen in stage.blocks(piece):
                job.state.append(_taken(group, block, chosen))
            self._counters.add_decode(time.perf_counter() - begin)
            return
        buffer, starts = job.state
        here = starts[group.where[piece.start : piece.stop]].tolist()
        if stage is None:
            self._reader.read_into(group, 0, piece, buffer, here)
        else:
            stage.copy_into(0, piece, buffer, here)

    def finish(self, job: BatchJob) -> list[Any]:
        """Return the fields of the batch."""
        begin = time.perf_counter()
        if job.groups[0].bound.by_block:
            parts, buffer = job.state, None
        else:
            buffer, starts = job.state
            parts = [_split(group, buffer, starts) for group in job.groups]
        fields = BatchFields(parts, job.num_samples, self._pool, buffer).made()
        self._counters.add_decode(time.perf_counter() - begin)
        return [fields]


def _split(group: SampleGroup, buffer: Bytes, starts: Ints) -> ColumnPart:
    """Return the fields of a group's samples, whose bytes lie in the batch's buffer."""
    bound, ids = group.bound, group.local_ids
    here, lengths = starts[group.where], group.extents[0].length
    columns = bound.columns(ids, buffer, here, lengths)
    if columns is None:
        ends = (here + lengths).tolist()
        raws = [(buffer.data[a:b],) for a, b in zip(here.tolist(), ends, strict=True)]
        columns = _by_field(bound, bound.split(ids, raws))
    return ColumnPart(bound, group.where, ids, columns)


def _taken(group: SampleGroup, block: Any, chosen: Ints) -> ColumnPart:
    """Return the fields of those samples of a group that lie in one block."""
    rows = group.extents[0].row[chosen]
    columns = block.columns(rows)
    if columns is None:
        columns = _by_field(group.bound, [block.sample(row) for row in rows.tolist()])
    return ColumnPart(group.bound, group.where[chosen], group.local_ids[chosen], columns)


def _by_field(bound: BoundPart, samples: Sequence[dict[str, Any]]) -> FieldColumns:
    return {f.name: [sample.get(f.name) for sample in samples] for f in bound.part.fields}
