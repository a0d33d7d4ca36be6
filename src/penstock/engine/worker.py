"""A worker process: decodes and transforms samples, one at a time, and writes them into batches.

The spawner forks it, after importing what the user's functions need; the spawner has no thread. A
worker knows nothing of orders, stores or tiers. Bytes that are not in local files come from the
engine, in shared memory.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.dataset.bound import BoundPart
from penstock.dataset.dataset import Dataset
from penstock.dataset.formats.base import Sample
from penstock.dataset.mixture import Mixture
from penstock.engine.buffers import BufferPool
from penstock.engine.channel import ChannelClosed, FrameChannel
from penstock.engine.convert import Special, array_of
from penstock.engine.decode import SampleMaker, SampleOptions, as_mapping, owned_lists
from penstock.engine.job import GroupPiece, SampleGroup
from penstock.engine.process_errors import packed_error
from penstock.engine.reads import SampleReader
from penstock.engine.shared import Inbox, Outbox, SharedParcel, SharedPool, SharedSegments, packed
from penstock.engine.sinks import FieldPiece, Pieces, Sinks
from penstock.engine.stats import Counters
from penstock.engine.work import (
    CopyRequest,
    RawBytes,
    RowTarget,
    SomeSamples,
    WorkReply,
    WorkRequest,
)
from penstock.trace import Flag, Kind, Recorder, recorder_of
from penstock.trace.loop import WorkTimes


@dataclass(frozen=True, kw_only=True)
class WorkerJob:
    """What all workers of a loader start with."""

    dataset: Dataset | Mixture
    sample_options: SampleOptions
    kept_bytes: int
    """Memory that a worker keeps for the bytes of samples; it keeps as much shared memory for
    values that the engine has provided no memory for."""
    at_random: bool
    trace: str | None = None
    """The folder that the run is recorded in."""


class WorkerProcess:
    """Answers requests until the engine is gone."""

    def __init__(self, channel: FrameChannel, job: WorkerJob) -> None:
        self._channel = channel
        self._job = job
        self._maker = SampleMaker(job.sample_options, seeds=True)
        # Two tables of segments: a parcel for the engine may refer to segments of this process
        # only, never to the engine's own, though both are mapped here.
        own = SharedSegments()
        self._pool = SharedPool(job.kept_bytes, own)
        self._outbox = Outbox(own)
        self._inbox = Inbox(SharedSegments())
        self._counters = Counters()
        self._private = BufferPool(job.kept_bytes, num_spare=1)
        self._reader = SampleReader(self._private, self._counters, at_random=job.at_random)
        self._times = WorkTimes()

    def run(self) -> None:
        """Answer requests until the engine has closed the channel."""
        while True:
            try:
                frame, files = self._channel.receive()
                request: WorkRequest | CopyRequest = pickle.loads(frame)
                self._inbox.add(request.fresh, files)
                self._inbox.forget(request.gone)
                for number, index in request.released:
                    self._outbox.release(number, index)
                self._answer(request)
            except ChannelClosed:
                return

    def _answer(self, request: WorkRequest | CopyRequest) -> None:
        begin = time.perf_counter()
        recorder = self._recorder_for(request)
        begun = None
        if recorder is not None and isinstance(request, WorkRequest):
            begun = time.perf_counter_ns(), self._times.begin()
        parcel, error, size_bytes = None, None, 0
        try:
            if isinstance(request, CopyRequest):
                self._copy(request)
            elif request.whole:
                result = self._whole(request)
                parcel = packed(result, self._pool)
                size_bytes = parcel.shared_bytes + len(parcel.data)
            else:
                parcel = packed(self._pieces(request), self._pool)
        except BaseException as caught:  # Raised again in the thread that asks for the batch.
            error = packed_error(caught)
        if begun is not None and recorder is not None and isinstance(request, WorkRequest):
            self._record(recorder, request, *begun, is_error=error is not None)
        references = [] if parcel is None else parcel.references
        fresh, files = self._outbox.new_files([n for n, _, _ in references])
        reply = WorkReply(
            parcel=None if parcel is None else SharedParcel(parcel.data, parcel.references),
            number=0 if parcel is None else self._outbox.keep(parcel),
            error=error,
            fresh=fresh,
            gone=self._outbox.stale(),
            reads=self._counters.taken_reads(),
            decode_s=time.perf_counter() - begin,
            size_bytes=size_bytes,
        )
        self._channel.send(pickle.dumps(reply, 5), files)

    def _recorder_for(self, request: WorkRequest | CopyRequest) -> Recorder | None:
        """Return the recorder of a request, set to the step that the request is for."""
        if request.work_for is None or self._job.trace is None:
            return None
        if self._counters.recorder is None:
            # Not in `__init__`: this process may start before a run begins and the rank is known.
            self._counters.recorder = self._maker.recorder = recorder_of(
                self._job.trace, role="worker", rank=request.work_for[0]
            )
        self._counters.recorder.working_on(*request.work_for[1:])
        return self._counters.recorder

    def _record(
        self,
        recorder: Recorder,
        request: WorkRequest,
        begin_ns: int,
        begun: tuple[int, int],
        *,
        is_error: bool,
    ) -> None:
        end_ns = time.perf_counter_ns()
        cpu_ns, wait_ns = self._times.end(begun, end_ns - begin_ns)
        recorder.span(
            Kind.DECODE,
            begin_ns,
            end_ns,
            count=sum(len(some.local_ids) for some in request.samples),
            size_bytes=sum(_stored_bytes(self._job.dataset, some) for some in request.samples),
            cpu_ns=cpu_ns,
            wait_ns=wait_ns,
            flags=Flag.ERROR if is_error else Flag.NONE,
        )

    def _copy(self, request: CopyRequest) -> None:
        memory, places, width = request.target
        target, ids = self._inbox.array(memory), request.local_ids
        where = np.arange(len(ids)) if places is None else places
        group = SampleGroup(bound=self._job.dataset.bound[request.part], where=where, local_ids=ids)
        piece = GroupPiece(group=0, start=0, stop=len(ids))
        if width:
            self._reader.rows_into(group, request.table, piece, target.reshape(-1, width))
        else:
            self._reader.read_into(group, request.table, piece, target, where.tolist())

    # -- samples -----------------------------------------------------------------------------

    def _made(self, some: SomeSamples) -> Iterator[Any]:
        bound = self._job.dataset.bound[some.part]
        return self._maker.made(bound, some.local_ids, self._encoded(bound, some), some.uses)

    def _encoded(self, bound: BoundPart, some: SomeSamples) -> Iterable[Sample]:
        if isinstance(some.source, SharedParcel):
            samples: list[Sample] = self._inbox.open(some.source)
            return samples
        if isinstance(some.source, RawBytes):
            return bound.split(some.local_ids, self._raws(some.source, len(some.local_ids)))
        where = np.zeros(len(some.local_ids), np.int64)
        group = SampleGroup(bound=bound, where=where, local_ids=some.local_ids)
        piece = GroupPiece(group=0, start=0, stop=len(where))
        return bound.split(some.local_ids, self._reader.raws(group, piece, None))

    def _raws(self, source: RawBytes, count: int) -> list[list[memoryview]]:
        out: list[list[memoryview]] = [[] for _ in range(count)]
        for reference, lengths in zip(source.references, source.lengths, strict=True):
            lent = self._inbox.array(reference)
            if not self._maker.only_copies:
                # A transform may keep its sample, and the engine uses this memory again.
                own = self._private.array(lent.shape, np.uint8)
                own[:] = lent
                lent = own
            data, start = lent.data, 0
            for raws, length in zip(out, lengths.tolist(), strict=True):
                raws.append(data[start : start + length])
                start += length
        return out

    # -- batches -----------------------------------------------------------------------------

    def _pieces(self, request: WorkRequest) -> Pieces:
        """Make some samples of a batch; other workers make the rest."""
        targets = {name: self._target(request, t) for name, t in request.targets.items()}
        columns = PieceColumns(targets)
        for some in request.samples:
            for place, sample in zip(some.places, self._made(some), strict=True):
                columns.put(place, as_mapping(sample))
        return columns.pieces()

    def _target(
        self, request: WorkRequest, target: RowTarget
    ) -> tuple[npt.NDArray[Any], Special | None]:
        data = self._inbox.array(target.reference)
        shape = (request.num_samples, *target.shape)
        return data.view(np.dtype(target.kind)).reshape(shape), target.special

    def _whole(self, request: WorkRequest) -> Any:
        """Make a whole batch, and join it with the user's collate or padding."""
        sample_options = self._job.sample_options
        if sample_options.collate is not None:
            samples: list[Any] = [None] * request.num_samples
            for some in request.samples:
                for place, sample in zip(some.places, self._made(some), strict=True):
                    samples[place] = sample
            return self._joined(partial(sample_options.collate, samples))
        sinks = Sinks(request.num_samples, self._pool)
        for some in request.samples:
            for place, sample in zip(some.places, self._made(some), strict=True):
                sinks.put(place, as_mapping(sample))
        fields = self._joined(partial(sinks.fields, sample_options.padding))
        if self._maker.only_copies:
            bounds = [self._job.dataset.bound[some.part] for some in request.samples]
            fields = owned_lists(fields, bounds)
        return fields

    def _joined(self, join: Callable[[], Any]) -> Any:
        """Call a function that joins samples, and record how long that took."""
        begin_ns = time.perf_counter_ns()
        joined = join()
        if self._counters.recorder is not None:
            self._counters.recorder.span(Kind.JOIN, begin_ns, time.perf_counter_ns(), count=1)
        return joined


def _stored_bytes(dataset: Dataset | Mixture, some: SomeSamples) -> int:
    """Return the bytes of samples as they are stored; of blocks, those of their fields."""
    if isinstance(some.source, RawBytes):
        return sum(int(lengths.sum()) for lengths in some.source.lengths)
    if isinstance(some.source, SharedParcel):
        return sum(size for _, _, size in some.source.references)
    tables = dataset.bound[some.part].part.tables
    return sum(int(table.extents(some.local_ids).length.sum()) for table in tables)


class PieceColumns:
    """The fields of some samples of a batch while they are made."""

    def __init__(self, targets: dict[str, tuple[npt.NDArray[Any], Special | None]]) -> None:
        self._targets = targets
        self._in_place: dict[str, bytearray] = {}
        self._values: dict[str, dict[int, Any]] = {}
        self._num_samples = 0

    def put(self, place: int, sample: Any) -> None:
        """Take the sample that belongs at a place of the batch."""
        j = self._num_samples
        self._num_samples += 1
        for name, value in sample.items():
            target = self._targets.get(name)
            if target is not None and self._is_written(target, place, value, name):
                mask = self._in_place.setdefault(name, bytearray())
                mask.extend(bytes(j - len(mask)) + b"\1")
            else:
                self._values.setdefault(name, {})[j] = value

    @staticmethod
    def _is_written(
        target: tuple[npt.NDArray[Any], Special | None], place: int, value: Any, name: str
    ) -> bool:
        found = array_of(value, name)
        if found is None:
            return False
        array, special = found
        rows, expected = target
        if array.shape != rows.shape[1:] or array.dtype != rows.dtype or special is not expected:
            return False
        rows[place] = array
        return True

    def pieces(self) -> Pieces:
        """Return the values of each field that are not in the batch's memory yet."""
        return {name: self._piece(name) for name in dict.fromkeys([*self._in_place, *self._values])}

    def _piece(self, name: str) -> FieldPiece:
        values = self._values.get(name, {})
        if len(values) == self._num_samples:
            stacked = _stacked(list(values.values()), name)
            if stacked is not None:
                return FieldPiece(stacked=stacked[0], special=stacked[1])
        return FieldPiece(in_place=bytes(self._in_place.get(name, b"")), values=values)


def _stacked(values: list[Any], name: str) -> tuple[npt.NDArray[Any], Special | None] | None:
    """Return values of one shape and type as one array."""
    found = [array_of(value, name) for value in values]
    arrays = [f[0] for f in found if f is not None]
    if len(arrays) < len(values):
        return None
    first, special = arrays[0], found[0][1] if found[0] is not None else None
    alike = all(a.shape == first.shape and a.dtype == first.dtype for a in arrays)
    if not alike or any(f is not None and f[1] is not special for f in found):
        return None
    return np.stack(arrays), special
