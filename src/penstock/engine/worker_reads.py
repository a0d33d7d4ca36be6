"""Samples of local files that worker processes copy into the batch.

Threads of one interpreter that copy hundreds of samples a batch hold each other up: each takes the
interpreter's lock after every copy, and waits while another thread plans or joins a batch. Each
worker has an interpreter of its own. When a mapped file is cut off (SIGBUS), only a worker dies.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from penstock.dataset.bound import BoundPart
from penstock.dataset.part import Ints
from penstock.engine.buffers import Bytes
from penstock.engine.job import GroupPiece, SampleGroup
from penstock.engine.process_errors import unpacked_error
from penstock.engine.reads import SampleReader
from penstock.engine.shared import Reference, SharedPool
from penstock.engine.stats import Counters
from penstock.engine.work import CopyRequest, CopyTarget
from penstock.engine.workers import WorkerHandle, Workers

_HERE_BYTES = 1 << 20
"""A copy of this size takes about as long as a request to a worker."""
_HINT = "a file that is cut off while it is read does that"
_NUM_NAMED = 8
"""Samples that the error names when a worker dies."""


class WorkerReader(SampleReader):
    """Reads samples as `SampleReader` does; large pieces of local files are copied by workers."""

    copies_in_workers = True

    def __init__(
        self,
        bounds: Sequence[BoundPart],
        pool: SharedPool,
        workers: Workers,
        counters: Counters,
        *,
        at_random: bool,
    ) -> None:
        super().__init__(pool, counters, at_random=at_random)
        self._parts = {id(bound): n for n, bound in reversed(list(enumerate(bounds)))}
        self._shared = pool
        self._workers = workers

    def read_into(
        self,
        group: SampleGroup,
        table: int,
        piece: GroupPiece,
        target: Bytes,
        starts: Sequence[int],
    ) -> None:
        """Read the samples of a piece into `target`, each at its own start."""
        lengths = group.extents[table].length[piece.start : piece.stop]
        reference = self._reference(group, table, target, int(lengths.sum()))
        if reference is None:
            super().read_into(group, table, piece, target, starts)
        else:
            self._ask(group, table, piece, CopyTarget(reference, np.array(starts), 0))

    def rows_into(self, group: SampleGroup, table: int, piece: GroupPiece, target: Bytes) -> None:
        """Copy samples of one width, each to its row of `target`."""
        size_bytes = target.shape[1] * (piece.stop - piece.start)
        reference = self._reference(group, table, target, size_bytes)
        if reference is None:
            super().rows_into(group, table, piece, target)
        else:
            places = group.where[piece.start : piece.stop]
            width, first, count = target.shape[1], int(places[0]), len(places)
            where: Ints | None = places
            if int(places[-1]) - first == count - 1:  # Places rise, so they are neighbours.
                number, offset, _ = reference
                reference, where = (number, offset + first * width, count * width), None
            self._ask(group, table, piece, CopyTarget(reference, where, width))

    def _reference(
        self, group: SampleGroup, table: int, target: Bytes, size_bytes: int
    ) -> Reference | None:
        """Return the place of a target in shared memory; None if this process copies itself."""
        if size_bytes < _HERE_BYTES or not self.can_map(group.bound, table):
            return None
        return self._shared.reference(target)

    def _ask(self, group: SampleGroup, table: int, piece: GroupPiece, target: CopyTarget) -> None:
        local_ids = group.local_ids[piece.start : piece.stop]
        recorder = self._counters.recorder
        work_for = None if recorder is None else (recorder.rank, *recorder.doing[:2])
        request = CopyRequest(self._parts[id(group.bound)], table, local_ids, target, work_for)
        ids = (group.bound.first + local_ids[:_NUM_NAMED]).tolist()
        more = ", …" * (len(local_ids) > _NUM_NAMED)
        what = f"samples {', '.join(map(str, ids))}{more}"
        _, reply = self._workers.ask(partial(_for_worker, request), what, hint=_HINT)
        for read in reply.reads:
            self._counters.add_reads(*read)
        if reply.error is not None:
            raise unpacked_error(reply.error)


def _for_worker(request: CopyRequest, handle: WorkerHandle) -> tuple[CopyRequest, list[int]]:
    fresh, files = handle.outbox.new_files([request.target.memory[0]])
    return request._replace(fresh=fresh, gone=handle.outbox.stale()), files
