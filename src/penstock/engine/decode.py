"""Samples that need work: split, decoded, transformed, and put in their places.

This is the general way; what it does to a sample is exactly what `dataset[i]` does, then the user's
transform. Randomness in a transform comes from a generator keyed by (seed, epoch, sample), so an
augmented sample does not depend on which thread, rank or world size made it.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.dataset.formats.base import Sample
from penstock.dataset.ownership import owned, writable
from penstock.dataset.part import Ints
from penstock.engine.buffers import BufferPool
from penstock.engine.job import Group, Job, Piece, Slot, cut
from penstock.engine.processes import ProcessPool
from penstock.engine.reads import SampleReader
from penstock.engine.sinks import Sinks
from penstock.engine.stages import Spread, Tiered, raws_of
from penstock.engine.stats import Counters

_SAMPLES_A_PIECE_MIN = 4
"""Handing over a piece costs some microseconds, so it should not be done for each sample."""

Transform = Callable[..., Any]
Collate = Callable[[list[Any]], Any]


def wants_generator(transform: Transform | None) -> bool:
    """Return whether a transform takes a random generator beside the sample."""
    if transform is None:
        return False
    try:
        parameters = inspect.signature(transform).parameters.values()
    except (TypeError, ValueError):
        return False
    needed = [
        p
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    ]
    return len(needed) == 2


def generator_for(seed: int, epoch: int, sample_id: int, use: int = 0) -> np.random.Generator:
    """Return the random numbers of one use of a sample in an epoch."""
    return np.random.Generator(np.random.PCG64([seed, epoch, sample_id, use]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the user wants done with samples."""

    transform: Transform | None
    collate: Collate | None
    padding: Mapping[str, Any]
    seed: int
    repeats: bool
    """Whether a sample may come several times in one epoch."""


class DecodeMaker:
    """Makes batches of samples that are decoded one by one."""

    def __init__(
        self,
        wishes: Wishes,
        *,
        pool: BufferPool,
        reader: SampleReader,
        counters: Counters,
        num_threads: int,
        processes: ProcessPool | None,
        sends_bytes: bool = False,
    ) -> None:
        self._wishes = wishes
        self._sends_bytes = sends_bytes
        """Whether worker processes cannot read from the tiers themselves."""
        self._with_generator = wants_generator(wishes.transform)
        self._copies = wishes.transform is None and wishes.collate is None
        """Whether samples only ever go into the arrays of a batch, so that views will do."""
        self._pool = pool
        self._reader = reader
        self._counters = counters
        self._num_threads = num_threads
        self._processes = processes

    def plan(self, job: Job) -> list[Piece]:
        """Cut a job so that all threads have something to do and none waits for the last."""
        job.size_bytes = sum(g.size_bytes for g in job.groups if not g.bound.by_block)
        if self._wishes.collate is None:
            job.state = Sinks(job.num_samples, self._pool)
        else:
            job.state = [None] * job.num_samples
        return cut(job.groups, max(_SAMPLES_A_PIECE_MIN, -(-job.num_samples // self._num_threads)))

    def work(self, job: Job, piece: Piece) -> None:
        """Decode and transform the samples of a piece."""
        group = job.groups[piece.group]
        where = group.where[piece.start : piece.stop].tolist()
        samples: Iterator[Any]
        if self._processes is not None:
            samples = self._from_processes(self._processes, job, group, piece)
        else:
            samples = self._samples(job, group, piece)
        begin = time.perf_counter()
        for i, sample in zip(where, samples, strict=True):
            if self._wishes.collate is None:
                job.state.put(i, _as_mapping(sample))
            else:
                job.state[i] = sample
        self._counters.add_decode(time.perf_counter() - begin)

    def _from_processes(
        self, processes: ProcessPool, job: Job, group: Group, piece: Piece
    ) -> Iterator[Any]:
        slot, where = job.slots[0], group.where[piece.start : piece.stop]
        stage = job.staged.get(piece.group)
        raws = None
        if isinstance(stage, Spread) or (self._sends_bytes and isinstance(stage, Tiered)):
            raws = raws_of(stage, len(group.extents), piece)
        samples = processes.samples(slot.epoch, slot.ids[where], self._uses(slot, where), raws)
        if raws is not None:
            return iter(samples)
        if stage is not None:
            stage.count(piece)
        else:
            sizes = [int(e.length[piece.start : piece.stop].sum()) for e in group.extents]
            self._counters.add_reads(group.bound.store.source, sum(sizes), len(where), 0.0)
        return iter(samples)

    def _uses(self, slot: Slot, where: Ints) -> Ints:
        """Return what tells the uses of a sample in one epoch apart: its position, in a mixture."""
        return slot.positions[where] if self._wishes.repeats else np.zeros(len(where), np.int64)

    def _samples(self, job: Job, group: Group, piece: Piece) -> Iterator[Any]:
        stage = job.staged.get(piece.group)
        bound, slot = group.bound, job.slots[0]
        where = group.where[piece.start : piece.stop]
        uses = iter(self._uses(slot, where).tolist())
        ids = slot.ids[where].tolist()
        local_ids = group.local_ids[piece.start : piece.stop]
        encoded: Iterator[Sample]
        if bound.by_block:
            assert stage is not None
            encoded = stage.samples(piece)
        else:
            raws = self._reader.raws(group, piece, stage)
            encoded = iter(bound.split(local_ids, raws))
        decode = bound.views if self._copies else bound.decoded
        for i, local, sample in zip(ids, local_ids.tolist(), encoded, strict=True):
            decoded = decode(sample, local)
            try:
                yield self._transformed(decoded, slot.epoch, i, next(uses))
            except Exception as error:
                error.add_note(f"in the transform of {bound.where(local)}")
                raise

    def _transformed(self, sample: dict[str, Any], epoch: int, sample_id: int, use: int) -> Any:
        if self._wishes.transform is None:
            return sample
        if self._with_generator:
            return self._wishes.transform(
                sample, generator_for(self._wishes.seed, epoch, sample_id, use)
            )
        return self._wishes.transform(sample)

    def finish(self, job: Job) -> list[Any]:
        """Return the batch."""
        begin = time.perf_counter()
        if self._wishes.collate is None:
            result = job.state.fields(self._wishes.padding)
            if self._copies:
                result = _owned_lists(result, job)
        else:
            result = self._wishes.collate(job.state)
        self._counters.add_decode(time.perf_counter() - begin)
        return [result]


def _owned_lists(fields: dict[str, Any], job: Job) -> dict[str, Any]:
    """Return the fields of a batch with ragged values copied, which no array has taken in."""
    of_blocks = {
        f.name
        for bound in {id(g.bound): g.bound for g in job.groups}.values()
        for f in bound.part.fields
        if bound.by_block and f.name not in bound.steps
    }
    return {
        name: values
        if not isinstance(values, list)
        else owned(values)
        if name in of_blocks
        else [writable(value) for value in values]
        for name, values in fields.items()
    }


def _as_mapping(sample: Any) -> Mapping[str, Any]:
    if isinstance(sample, Mapping):
        return sample
    if isinstance(sample, tuple | list):
        return {str(i): value for i, value in enumerate(sample)}
    return {"data": sample}
