"""Rows of arrays: copied straight from the mapped file into the batch.

When every field has one type and one shape and lies at even distances, a batch is a gather: one
NumPy call for each array, no Python for each sample. Tiny batches are gathered several at a time
into one buffer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.dataset.bound import BoundPart
from penstock.dataset.checks import check_copies
from penstock.dataset.fields import VALUE, Field
from penstock.dataset.part import Table
from penstock.engine.buffers import BufferPool
from penstock.engine.job import Group, Job, Piece, cut
from penstock.engine.reads import SampleReader
from penstock.engine.stats import Counters

_PIECE_BYTES = 8 << 20


def can_gather(bounds: tuple[BoundPart, ...]) -> bool:
    """Return whether all samples are rows of arrays with the same fields."""
    first = bounds[0]
    return all(
        all(t.addressing == "even" for t in b.part.tables)
        and all(f.encoding == VALUE and f.is_fixed for f in b.part.fields)
        and not b.steps
        and len(_places(b)) == len(b.part.fields)
        and b.part.fields == first.part.fields
        and _places(b) == _places(first)
        and len(b.part.tables) == len(first.part.tables)
        for b in bounds
    )


class GatherMaker:
    """Makes batches of fixed rows."""

    def __init__(
        self,
        bounds: tuple[BoundPart, ...],
        pool: BufferPool,
        reader: SampleReader,
        counters: Counters,
    ) -> None:
        self._pool = pool
        self._reader = reader
        self._counters = counters
        self._fields = bounds[0].part.fields
        self._places = _places(bounds[0])
        self._widths = [int(t.even_layout()[2][0]) for t in bounds[0].part.tables]

    @property
    def row_bytes(self) -> int:
        """Bytes of one sample."""
        return sum(self._widths)

    def plan(self, job: Job) -> list[Piece]:
        """Lease one array of rows for each table."""
        job.state = [self._pool.array((job.num_samples, w), np.uint8) for w in self._widths]
        job.size_bytes = job.num_samples * sum(self._widths)
        return cut(job.groups, max(1, _PIECE_BYTES // max(1, sum(self._widths))))

    def work(self, job: Job, piece: Piece) -> None:
        """Copy the rows of a piece to their places."""
        group = job.groups[piece.group]
        stage = job.staged.get(piece.group)
        for table, target in enumerate(job.state):
            if stage is not None:
                stage.copy_rows(table, piece, target, group.where[piece.start : piece.stop])
            elif self._reader.can_map(group.bound, table):
                self._from_map(group, piece, table, target)
            else:
                starts = (group.where[piece.start : piece.stop] * target.shape[1]).tolist()
                self._reader.read_into(group, table, piece, target.reshape(-1), starts)

    def _from_map(
        self, group: Group, piece: Piece, table: int, target: npt.NDArray[np.uint8]
    ) -> None:
        begin = time.perf_counter()
        ids = group.local_ids[piece.start : piece.stop]
        where = group.where[piece.start : piece.stop]
        layout = group.bound.part.tables[table]
        first_sample = layout.first_sample
        numbers = None
        if len(first_sample) > 2:
            numbers = np.searchsorted(first_sample, ids, side="right") - 1
        for number in [0] if numbers is None else np.unique(numbers).tolist():
            chosen = slice(None) if numbers is None else np.flatnonzero(numbers == number)
            rows = ids[chosen] - first_sample[number]
            ranges = partial(_ranges, layout, number, rows)
            mapped = self._reader.mapped(group.bound, table, number)
            with self._reader.warmed(group.bound, table, ranges):
                copy_rows(_rows(layout, number, mapped.data), rows, target, where[chosen])
            mapped.check()
        check_copies(group.bound, ids, lambda j: target[where[j]].data)
        size_bytes = len(ids) * target.shape[1]
        seconds = time.perf_counter() - begin
        self._counters.add_reads("folder", size_bytes, len(ids), seconds)

    def finish(self, job: Job) -> list[Any]:
        """Return the rows as arrays of their own type, cut into the batches of the job."""
        fields = {
            f.name: _view(f, job.state[table], at)
            for f, (table, at) in zip(self._fields, self._places, strict=True)
        }
        out, start = [], 0
        for slot in job.slots:
            stop = start + len(slot.ids)
            out.append({name: array[start:stop] for name, array in fields.items()})
            start = stop
        return out


def _rows(layout: Table, number: int, whole: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return an object as an array with a row for each sample."""
    base, stride, width = (int(a[number]) for a in layout.even_layout())
    count = int(layout.first_sample[number + 1] - layout.first_sample[number])
    return np.ndarray((count, width), np.uint8, whole.data, base, (stride, 1))


def _ranges(
    layout: Table, number: int, rows: npt.NDArray[np.int64]
) -> Iterator[tuple[int, int, int]]:
    base, stride, width = (int(a[number]) for a in layout.even_layout())
    return ((number, base + stride * row, width) for row in rows.tolist())


def copy_rows(
    source: npt.NDArray[np.uint8],
    rows: npt.NDArray[np.int64],
    target: npt.NDArray[np.uint8],
    where: npt.NDArray[np.int64],
) -> None:
    """Copy some rows of one array to some places of another."""
    start, count = int(where[0]), len(where)
    in_a_row = count == 1 or int(where[-1]) - start == count - 1
    if in_a_row and source.flags.c_contiguous:
        # "clip" because "raise" would gather into a second buffer first; rows are in range.
        source.take(rows, axis=0, out=target[start : start + count], mode="clip")
    elif in_a_row:
        target[start : start + count] = source[rows]
    else:
        target[where] = source[rows]


def _places(bound: BoundPart) -> list[tuple[int, int]]:
    """Return the table of each field, and where in the table's rows it lies."""
    places = bound.part.options.get("places", [[0, 0]])
    return [(int(table), int(at)) for table, at in places]


def _view(f: Field, rows: npt.NDArray[np.uint8], at: int) -> npt.NDArray[Any]:
    assert f.dtype is not None
    assert f.shape is not None
    kind = np.dtype(f.dtype)
    size = kind.itemsize * math.prod(f.shape)
    part = rows if size == rows.shape[1] else np.ascontiguousarray(rows[:, at : at + size])
    return part.view(kind).reshape(len(rows), *f.shape)
