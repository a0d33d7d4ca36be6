"""Batches whose samples are made by worker processes.

The engine names the samples, brings their bytes, and provides the memory for their values. Worker
processes decode and transform. With `collate=` or `pad=`, one worker makes the whole batch; else a
batch is cut into pieces, so that all workers have something to do
(`flow.planning.pieces_of_batch`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from penstock.dataset.bound import BoundPart
from penstock.engine.decode import SampleOptions, owned_lists, uses_of
from penstock.engine.job import BatchJob, GroupPiece, SampleGroup, cut
from penstock.engine.process_errors import unpacked_error
from penstock.engine.shared import SharedParcel, SharedPool, packed
from penstock.engine.sinks import Layout, Sinks
from penstock.engine.stages import GroupStage
from penstock.engine.stats import Counters
from penstock.engine.work import RawBytes, RowTarget, SomeSamples, WorkFor, WorkRequest
from penstock.engine.workers import DEPTH, MakeRequest, WorkerHandle, Workers
from penstock.flow.planning import pieces_of_batch

_SAMPLES_A_PIECE_MIN = 4


class WorkerMaker:
    """Makes batches with the help of worker processes."""

    decodes_here = False
    waits_here = True

    def __init__(
        self,
        sample_options: SampleOptions,
        *,
        bounds: tuple[BoundPart, ...],
        pool: SharedPool,
        workers: Workers,
        counters: Counters,
        look_ahead_bytes: int,
    ) -> None:
        self._sample_options = sample_options
        self._numbers = {id(bound): n for n, bound in reversed(list(enumerate(bounds)))}
        self._pool = pool
        self._workers = workers
        self._counters = counters
        self._look_ahead_bytes = look_ahead_bytes
        self._num_planned = 0
        self._is_whole = sample_options.collate is not None or bool(sample_options.padding)
        self._makes_views = sample_options.transform is None
        """Whether values may look into memory of the engine, which uses it again."""
        self._layout: Layout = {}
        """Shapes and types of the latest batch; the next one probably has the same."""

    def plan(self, job: BatchJob) -> list[GroupPiece]:
        """Prepare the places of a batch and cut it into pieces."""
        job.size_bytes = sum(g.size_bytes for g in job.groups if not g.bound.by_block)
        if self._is_whole:
            return [GroupPiece(group=0, start=0, stop=job.num_samples)]
        job.state = sinks = Sinks(job.num_samples, self._pool)
        sinks.expect(self._layout)
        arrays_bytes = sum(array.nbytes for array, _ in sinks.arrays().values())
        num_workers = self._workers.num_workers
        num_pieces = pieces_of_batch(
            number=self._num_planned,
            num_workers=num_workers,
            num_requests=DEPTH * num_workers,
            batch_bytes=max(job.size_bytes, arrays_bytes),
            look_ahead_bytes=self._look_ahead_bytes,
        )
        self._num_planned += 1
        return cut(job.groups, max(_SAMPLES_A_PIECE_MIN, -(-job.num_samples // num_pieces)))

    def work(self, job: BatchJob, piece: GroupPiece) -> None:
        """Have the samples of a piece made."""
        if self._is_whole:
            self._work_whole(job)
            return
        some, held = self._some(job, piece)
        targets = self._targets(job.state)
        make = partial(self._request, job, [some], targets, held)
        handle, parcel, releaser = self._asked(make, _named(job, piece))
        job.state.take(some.places, handle.inbox.open(parcel, releaser))

    def _work_whole(self, job: BatchJob) -> None:
        pieces = [
            GroupPiece(group=g, start=0, stop=len(gr.where)) for g, gr in enumerate(job.groups)
        ]
        found = [self._some(job, piece) for piece in pieces]
        held = [each for _, some in found for each in some]
        make = partial(self._request, job, [some for some, _ in found], {}, held)
        handle, parcel, releaser = self._asked(make, _named(job, None))
        job.state = handle.inbox.passed_on(parcel, releaser)

    def _asked(
        self, make: MakeRequest, what: str
    ) -> tuple[WorkerHandle, SharedParcel, Callable[[int], None]]:
        """Have a worker do a request; return it, its parcel, and how the parcel is released."""
        handle, reply = self._workers.ask(make, what)
        for read in reply.reads:
            self._counters.add_reads(*read)
        self._counters.add_decode(reply.decode_s)
        if reply.error is not None:
            raise unpacked_error(reply.error)
        assert reply.parcel is not None
        return handle, reply.parcel, handle.releaser(reply.number)

    def finish(self, job: BatchJob) -> list[Any]:
        """Return the batch."""
        if self._is_whole:
            return [job.state]
        self._layout = job.state.layout()
        fields = job.state.fields({})
        if self._makes_views:
            fields = owned_lists(fields, [g.bound for g in job.groups])
        return [fields]

    # -- requests ----------------------------------------------------------------------------

    def _request(
        self,
        job: BatchJob,
        samples: list[SomeSamples],
        targets: dict[str, RowTarget],
        held: list[Any],
        handle: WorkerHandle,
    ) -> tuple[WorkRequest, list[int]]:
        """Return the request for a worker, with the files of segments that it has not mapped.

        `held` is not used here: the partial function that calls this keeps the memory leased.
        """
        numbers = [t.reference[0] for t in targets.values()]
        for some in samples:
            numbers += [n for n, _, _ in getattr(some.source, "references", ())]
        fresh, files = handle.outbox.new_files(numbers)
        request = WorkRequest(
            samples=samples,
            num_samples=job.num_samples,
            targets=targets,
            whole=self._is_whole,
            work_for=self._work_for(job),
            fresh=fresh,
            gone=handle.outbox.stale(),
        )
        return request, files

    def _work_for(self, job: BatchJob) -> WorkFor | None:
        recorder, slot = self._counters.recorder, job.slots[0]
        return None if recorder is None else (recorder.rank, slot.step, slot.epoch)

    def _targets(self, sinks: Sinks) -> dict[str, RowTarget]:
        out = {}
        for name, (array, special) in sinks.arrays().items():
            reference = self._pool.reference(array)
            if reference is not None:
                out[name] = RowTarget(
                    reference=reference,
                    shape=array.shape[1:],
                    kind=array.dtype.str,
                    special=special,
                )
        return out

    def _some(self, job: BatchJob, piece: GroupPiece) -> tuple[SomeSamples, list[Any]]:
        """Return samples as a request describes them, and the memory that holds their bytes."""
        group = job.groups[piece.group]
        source, held = self._source(group, piece, job.staged.get(piece.group))
        some = SomeSamples(
            part=self._numbers[id(group.bound)],
            local_ids=group.local_ids[piece.start : piece.stop],
            places=group.where[piece.start : piece.stop].tolist(),
            uses=uses_of(job.slots[0], group, piece, self._sample_options),
            source=source,
        )
        return some, held

    def _source(
        self, group: SampleGroup, piece: GroupPiece, stage: GroupStage | None
    ) -> tuple[RawBytes | SharedParcel | None, list[Any]]:
        if stage is None:
            return None, []
        if group.bound.by_block:
            parcel = packed([_in_shared(sample) for sample in stage.samples(piece)], self._pool)
            return SharedParcel(parcel.data, parcel.references), parcel.held
        references, lengths, held = [], [], []
        for table, extents in enumerate(group.extents):
            sizes = extents.length[piece.start : piece.stop].astype(np.int64)
            ends = np.cumsum(sizes)
            target = self._pool.lease(max(1, int(ends[-1])))
            stage.copy_into(table, piece, target, (ends - sizes).tolist())
            reference = self._pool.reference(target)
            assert reference is not None
            references.append(reference)
            lengths.append(sizes)
            held.append(target)
        return RawBytes(references=references, lengths=lengths), held


class _InSharedMemory:
    """Bytes or a memoryview that travel in shared memory and arrive with their own type."""

    def __init__(self, value: bytes | memoryview) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Any, ...]:
        array = np.frombuffer(self._value, np.uint8)
        return (_bytes_of if isinstance(self._value, bytes) else _view_of), (array,)


def _bytes_of(array: Any) -> bytes:
    data: bytes = array.tobytes()
    return data


def _view_of(array: Any) -> memoryview:
    return memoryview(array)


def _in_shared(sample: Any) -> dict[str, Any]:
    return {
        name: _InSharedMemory(value)
        if isinstance(value, bytes | memoryview) and len(value)
        else value
        for name, value in sample.items()
    }


def _named(job: BatchJob, piece: GroupPiece | None) -> str:
    slot = job.slots[0]
    if piece is None:
        return f"the {job.num_samples} samples of step {slot.step}, epoch {slot.epoch}"
    where = job.groups[piece.group].where[piece.start : piece.stop]
    ids = slot.ids[where]
    return f"samples {', '.join(map(str, ids[:8].tolist()))}{', …' * (len(ids) > 8)}"
