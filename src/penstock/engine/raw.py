"""Fields that stay bytes: read straight into the batch, handed out as views of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.dataset.bound import BoundPart
from penstock.dataset.fields import is_raw
from penstock.dataset.part import ABSENT, Ints
from penstock.engine.buffers import BufferPool, Bytes
from penstock.engine.cuts import Cuts
from penstock.engine.job import Group, Job, Piece, cut
from penstock.engine.reads import SampleReader

_PIECE_BYTES = 16 << 20


def can_stay_raw(bounds: tuple[BoundPart, ...]) -> bool:
    """Return whether no field of any sample needs work."""
    return all(
        len(b.part.tables) == 1
        and b.part.tables[0].addressing == "extents"
        and all(f.name in b.steps and is_raw(b.steps[f.name][1]) for f in b.part.fields)
        for b in bounds
    )


class RawMaker:
    """Makes batches whose fields are lists of byte arrays in one buffer."""

    def __init__(self, pool: BufferPool, reader: SampleReader) -> None:
        self._pool = pool
        self._reader = reader

    def plan(self, job: Job) -> list[Piece]:
        """Lease the buffer and decide where in it each sample goes."""
        lengths = np.zeros(job.num_samples, np.int64)
        for group in job.groups:
            lengths[group.where] = group.extents[0].length
        ends = np.cumsum(lengths)
        job.size_bytes = int(ends[-1])
        job.state = (self._pool.array((job.size_bytes,), np.uint8), (ends - lengths).tolist())
        mean = max(1, job.size_bytes // job.num_samples)
        return cut(job.groups, max(1, _PIECE_BYTES // mean))

    def work(self, job: Job, piece: Piece) -> None:
        """Read the samples of a piece into their places."""
        group = job.groups[piece.group]
        buffer, starts = job.state
        here = [starts[i] for i in group.where[piece.start : piece.stop].tolist()]
        stage = job.staged.get(piece.group)
        if stage is None:
            self._reader.read_into(group, 0, piece, buffer, here)
        else:
            stage.copy_into(0, piece, buffer, here)

    def finish(self, job: Job) -> list[Any]:
        """Return where in the one buffer the values of each field lie."""
        buffer, starts = job.state
        if len(job.groups) == 1 and "member.offset" in job.groups[0].bound.part.columns:
            return [_cuts(job.groups[0], buffer, np.array(starts))]
        columns: dict[str, list[Bytes | None]] = {}
        for group in job.groups:
            for name in (f.name for f in group.bound.part.fields):
                columns.setdefault(name, [None] * job.num_samples)
            _fill(columns, group, buffer, starts)
        return [columns]


def _cuts(group: Group, buffer: Bytes, starts: Ints) -> dict[str, Cuts]:
    part = group.bound.part
    offsets = part.columns["member.offset"][group.local_ids].astype(np.int64)
    lengths = part.columns["member.length"][group.local_ids].astype(np.int64)
    is_absent = lengths == int(ABSENT)
    offsets[is_absent], lengths[is_absent] = 0, -1
    return {
        f.name: Cuts(buffer, starts + offsets[:, i], lengths[:, i])
        for i, f in enumerate(part.fields)
    }


def _fill(
    columns: dict[str, list[Bytes | None]], group: Group, buffer: Bytes, starts: list[int]
) -> None:
    lengths = group.extents[0].length.tolist()
    whole = [
        (buffer[starts[i] : starts[i] + n].data,)
        for i, n in zip(group.where.tolist(), lengths, strict=True)
    ]
    split = group.bound.split(group.local_ids, whole)
    for i, sample in zip(group.where.tolist(), split, strict=True):
        for name, value in sample.items():
            columns[name][i] = np.frombuffer(value, np.uint8)
