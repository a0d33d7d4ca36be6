"""Batches whose samples are made one by one: split, decoded, transformed, put in their places.

This way serves every data set. It does to a sample exactly what `dataset[i]` does, then calls the
user's transform. The random generator of a transform is keyed by (seed, epoch, sample), so an
augmented sample does not depend on the thread, the rank or the world size.
"""

from __future__ import annotations

import inspect
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.dataset.bound import BoundPart
from penstock.dataset.formats.base import Sample
from penstock.dataset.ownership import owned, writable
from penstock.dataset.part import Ints
from penstock.engine.buffers import BufferPool
from penstock.engine.convert import seed_tensors
from penstock.engine.job import BatchJob, BatchSlot, GroupPiece, SampleGroup, cut
from penstock.engine.reads import SampleReader
from penstock.engine.sinks import Sinks
from penstock.engine.stats import Counters
from penstock.order import key_of
from penstock.trace import Kind, Recorder

_SAMPLES_A_PIECE_MIN = 4
"""A piece costs some microseconds to hand over; that is too much for each sample."""

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
class SampleOptions:
    """The options of a loader that concern single samples."""

    transform: Transform | None
    collate: Collate | None
    padding: Mapping[str, Any]
    seed: int
    repeats: bool
    """Whether a sample may come several times in one epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleUses:
    """Which use of which samples this is: the random numbers of transforms depend on it."""

    epoch: int
    ids: list[int]
    numbers: list[int]
    """Tell several uses of one sample in one epoch apart."""


def uses_of(
    slot: BatchSlot, group: SampleGroup, piece: GroupPiece, sample_options: SampleOptions
) -> SampleUses:
    """Return the uses of the samples of a piece; in a mixture, positions tell them apart."""
    where = group.where[piece.start : piece.stop]
    numbers = slot.positions[where].tolist() if sample_options.repeats else [0] * len(where)
    return SampleUses(epoch=slot.epoch, ids=slot.ids[where].tolist(), numbers=numbers)


class SampleMaker:
    """Decodes each sample, then calls the user's transform.

    With `seeds`, the generators of Python, NumPy and torch that all code of a process shares are
    seeded before each transform. That is for processes that make one sample at a time: there a
    transform that draws from them gives the same result on any number of workers and ranks. In the
    training process they belong to the user.
    """

    def __init__(self, sample_options: SampleOptions, *, seeds: bool) -> None:
        self.sample_options = sample_options
        self._seeds = seeds
        self.recorder: Recorder | None = None
        """What records how long transforms take."""
        self._with_generator = wants_generator(sample_options.transform)
        self.only_copies = sample_options.transform is None and sample_options.collate is None
        """Whether samples only ever go into the arrays of a batch, so that views will do."""

    def made(
        self, bound: BoundPart, local_ids: Ints, encoded: Iterable[Sample], uses: SampleUses
    ) -> Iterator[Any]:
        """Yield transformed samples, and record how long the transform took for all of them."""
        decode = bound.views if self.only_copies else bound.decoded
        recorder = None if self.sample_options.transform is None else self.recorder
        first_ns = begin_ns = taken_ns = count = 0
        for local, sample, i, number in zip(
            local_ids.tolist(), encoded, uses.ids, uses.numbers, strict=True
        ):
            decoded = decode(sample, local)
            if recorder is not None:
                begin_ns = time.perf_counter_ns()
            try:
                made = self._transformed(decoded, uses.epoch, i, number)
            except Exception as error:
                error.add_note(f"in the transform of {bound.where(local)}")
                raise
            if recorder is not None:
                taken_ns += time.perf_counter_ns() - begin_ns
                first_ns, count = first_ns or begin_ns, count + 1
            yield made
        if recorder is not None:
            recorder.span(Kind.TRANSFORM, first_ns, first_ns + taken_ns, count=count)

    def _transformed(self, sample: dict[str, Any], epoch: int, sample_id: int, use: int) -> Any:
        sample_options = self.sample_options
        if sample_options.transform is None:
            return sample
        if self._seeds:
            seed_generators(key_of(sample_options.seed, "transform", epoch, sample_id, use))
        if self._with_generator:
            return sample_options.transform(
                sample, generator_for(sample_options.seed, epoch, sample_id, use)
            )
        return sample_options.transform(sample)


def seed_generators(key: int) -> None:
    """Seed the generators that all code of this process shares, for one use of a sample."""
    random.seed(key)
    np.random.seed(key % 2**32)
    seed_tensors(key)


class DecodeMaker:
    """Makes batches of samples that are decoded one by one."""

    decodes_here = True
    waits_here = False

    def __init__(
        self,
        sample_options: SampleOptions,
        *,
        pool: BufferPool,
        reader: SampleReader,
        counters: Counters,
        num_threads: int,
    ) -> None:
        self._sample_options = sample_options
        self._maker = SampleMaker(sample_options, seeds=False)
        self._maker.recorder = counters.recorder
        self._pool = pool
        self._reader = reader
        self._counters = counters
        self._num_threads = num_threads

    def plan(self, job: BatchJob) -> list[GroupPiece]:
        """Cut a job so that all threads have something to do and none waits for the last."""
        job.size_bytes = sum(g.size_bytes for g in job.groups if not g.bound.by_block)
        if self._sample_options.collate is None:
            job.state = Sinks(job.num_samples, self._pool)
        else:
            job.state = [None] * job.num_samples
        return cut(job.groups, max(_SAMPLES_A_PIECE_MIN, -(-job.num_samples // self._num_threads)))

    def work(self, job: BatchJob, piece: GroupPiece) -> None:
        """Decode and transform the samples of a piece."""
        group = job.groups[piece.group]
        where = group.where[piece.start : piece.stop].tolist()
        samples = self._samples(job, group, piece)
        begin = time.perf_counter()
        for i, sample in zip(where, samples, strict=True):
            if self._sample_options.collate is None:
                job.state.put(i, as_mapping(sample))
            else:
                job.state[i] = sample
        self._counters.add_decode(time.perf_counter() - begin)

    def _samples(self, job: BatchJob, group: SampleGroup, piece: GroupPiece) -> Iterator[Any]:
        stage = job.staged.get(piece.group)
        local_ids = group.local_ids[piece.start : piece.stop]
        encoded: Iterable[Sample]
        if group.bound.by_block:
            assert stage is not None
            encoded = stage.samples(piece)
        else:
            encoded = group.bound.split(local_ids, self._reader.raws(group, piece, stage))
        uses = uses_of(job.slots[0], group, piece, self._sample_options)
        return self._maker.made(group.bound, local_ids, encoded, uses)

    def finish(self, job: BatchJob) -> list[Any]:
        """Return the batch."""
        begin = time.perf_counter()
        if self._sample_options.collate is None:
            result = job.state.fields(self._sample_options.padding)
            if self._maker.only_copies:
                result = owned_lists(result, [g.bound for g in job.groups])
        else:
            result = self._sample_options.collate(job.state)
        self._counters.add_decode(time.perf_counter() - begin)
        return [result]


def owned_lists(fields: dict[str, Any], bounds: list[BoundPart]) -> dict[str, Any]:
    """Return the fields of a batch with ragged values copied, which no array has taken in."""
    of_blocks = {
        f.name
        for bound in {id(bound): bound for bound in bounds}.values()
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


def as_mapping(sample: Any) -> Mapping[str, Any]:
    """Return the fields of a sample, whatever a transform has made of it."""
    if isinstance(sample, Mapping):
        return sample
    if isinstance(sample, tuple | list):
        return {str(i): value for i, value in enumerate(sample)}
    return {"data": sample}
