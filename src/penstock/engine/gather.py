"""Rows of arrays: copied straight from the mapped file into the batch.

When every field has one type and shape and lies at even distances, a batch is a gather: one NumPy
call for each array, no Python for each sample. Several tiny batches are gathered into one buffer.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.dataset.bound import BoundPart
from penstock.dataset.fields import VALUE, Field
from penstock.engine.buffers import BufferPool
from penstock.engine.job import BatchJob, GroupPiece, cut
from penstock.engine.reads import SampleReader

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

    decodes_here = True

    def __init__(
        self, bounds: tuple[BoundPart, ...], pool: BufferPool, reader: SampleReader
    ) -> None:
        self._pool = pool
        self._reader = reader
        self._fields = bounds[0].part.fields
        self._places = _places(bounds[0])
        self.waits_here = reader.copies_in_workers
        self._widths = [int(t.even_layout()[2][0]) for t in bounds[0].part.tables]

    @property
    def row_bytes(self) -> int:
        """Bytes of one sample."""
        return sum(self._widths)

    def plan(self, job: BatchJob) -> list[GroupPiece]:
        """Lease one array of rows for each table."""
        job.state = [self._pool.array((job.num_samples, w), np.uint8) for w in self._widths]
        job.size_bytes = job.num_samples * sum(self._widths)
        return cut(job.groups, max(1, _PIECE_BYTES // max(1, sum(self._widths))))

    def work(self, job: BatchJob, piece: GroupPiece) -> None:
        """Copy the rows of a piece to their places."""
        group = job.groups[piece.group]
        stage = job.staged.get(piece.group)
        for table, target in enumerate(job.state):
            if stage is not None:
                stage.copy_rows(table, piece, target, group.where[piece.start : piece.stop])
            else:
                self._reader.rows_into(group, table, piece, target)

    def finish(self, job: BatchJob) -> list[Any]:
        """Return the rows of all batches of the job, as arrays of their own type."""
        return [
            {
                f.name: _view(f, job.state[table], at)
                for f, (table, at) in zip(self._fields, self._places, strict=True)
            }
        ]


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
