"""From a loader's options to a run: the maker, the number of threads, the reads ahead.

Everything here is decided once, when an iteration begins, and is no state of the loader.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from penstock.dataset.dataset import Dataset
from penstock.dataset.mixture import Mixture, datasets_of
from penstock.engine.buffers import BufferPool
from penstock.engine.columnar import ColumnMaker
from penstock.engine.decode import DecodeMaker, SampleOptions
from penstock.engine.drawing import known_slots
from penstock.engine.fetcher import Fetcher
from penstock.engine.fill_planner import FillPlanner
from penstock.engine.gather import GatherMaker, can_gather
from penstock.engine.job import BatchMaker, BatchSlot
from penstock.engine.options import LoaderOptions
from penstock.engine.reads import SampleReader, is_local
from penstock.engine.run_context import RunContext
from penstock.engine.runner import Runner
from penstock.engine.stage_reads import BlockRuns
from penstock.engine.staging import Stager, Unpacked
from penstock.engine.stream import BatchStream, jobs_of
from penstock.engine.tier_residency import TierResidency
from penstock.engine.worker_maker import WorkerMaker
from penstock.engine.worker_reads import WorkerReader
from penstock.engine.workers import DEPTH
from penstock.flow import Flow, FlowBudget, SourcePrior
from penstock.flow.layout.rereads import FACTOR_MAX, block_set_of, refuse_rereads
from penstock.flow.planning import requests_max
from penstock.order import BlocksOrder, ColdOrder, SequentialOrder
from penstock.world import World

if TYPE_CHECKING:
    from penstock.engine.engine import EngineResources

_log = logging.getLogger("penstock.loader")
_THREADS_MAX = 32
_WORKERS_MAX = 64
_COPY_THREADS_MAX = 4
_COPY_WORKERS_MAX = 8
"""As many processes as it takes to copy as fast as memory allows."""
_COPIES_WAITING = 2
"""Copies that are prepared while all workers are busy."""
_TINY_JOB_BYTES = 8 << 20
_BATCHES_A_JOB_MAX = 32
_JOBS_AHEAD_MIN = 8
"""Jobs that the look-ahead must have room for; else a job is one batch."""


@dataclass(frozen=True, kw_only=True)
class StreamSpan:
    """Which part of the stream a run goes through."""

    start: tuple[int, int]
    """Epoch and position."""
    end_epoch: int | None
    part: tuple[int, int]
    """(k, n): every n-th batch from the k-th on."""
    skip: int = 0
    """Batches at the beginning that an engine before this one has delivered."""


def make_run(
    wanted: LoaderOptions,
    stream: BatchStream,
    span: StreamSpan,
    context: RunContext,
    resources: EngineResources | None,
) -> Runner:
    """Return the runner of a stream."""
    # Before anything is open: it may refuse the run.
    unpacked = _block_check(wanted, stream.world, context)
    pool = BufferPool(wanted.look_ahead_bytes) if resources is None else resources.pool
    maker, num_threads = _maker(wanted, stream.world, pool, context, resources)
    batches_a_job = _batches_a_job(maker, stream, wanted.look_ahead_bytes)
    residency, local_tiers = None, context.local_tiers
    if stream.course is not None and local_tiers is not None and local_tiers.is_moving:
        residency = TierResidency(stream, span.start, local_tiers, wanted.look_ahead_bytes)
        batches_a_job = 1  # Its decisions are made batch by batch.
    num_requests = requests_max(ranks_a_node(stream.world))
    budget = FlowBudget(stage_bytes_max=wanted.look_ahead_bytes, requests_max=num_requests)
    flow = Flow(budget=budget, prior=_priors(wanted, stream.world, context))
    fetcher = Fetcher(flow, requests_max=num_requests, live=context.live, recorder=context.recorder)
    stager = Stager(
        pool,
        context,
        stage_bytes=wanted.stage_bytes,
        runs=_runs(wanted, stream.world, fetcher),
        rates=fetcher,
        unpacked=unpacked,
        residency=residency,
    )
    slots = stream.slots(*span.start, span.end_epoch, span.part)
    if span.skip:
        slots = islice(slots, span.skip, None)
    return Runner(
        jobs_of(stream, slots, batches_a_job),
        maker,
        stager,
        fetcher=fetcher,
        fill_planner=_fill_planner_of(wanted, stream, span, stager, batches_a_job),
        num_threads=num_threads,
        stage_bytes_max=wanted.look_ahead_bytes,
        recorder=context.recorder,
    )


def sample_options_of(wanted: LoaderOptions) -> SampleOptions:
    """Return the options that concern single samples."""
    return SampleOptions(
        transform=wanted.transform,
        collate=wanted.collate,
        padding=wanted.padding,
        seed=wanted.seed,
        repeats=isinstance(wanted.dataset, Mixture) or wanted.order.mode == "importance",
    )


def _priors(wanted: LoaderOptions, world: World, context: RunContext) -> dict[str, SourcePrior]:
    """Return the store's rates in the machine's file, if there are a file and a single store."""
    sources = {bound.store.source for bound in wanted.dataset.bound}
    if context.live is None or len(sources) != 1:
        return {}
    dataset = wanted.dataset
    several = datasets_of(dataset)
    num_samples = sum(len(one) for one in several)
    sample_bytes = sum(one.size_bytes for one in several) / max(1, num_samples)
    store = context.live.machine().store
    prior = SourcePrior.of_store(store, sample_bytes, num_ranks=ranks_a_node(world))
    return dict.fromkeys(sources, prior)


def _maker(
    wanted: LoaderOptions,
    world: World,
    pool: BufferPool,
    context: RunContext,
    resources: EngineResources | None,
) -> tuple[BatchMaker, int]:
    """Return what makes the batches, and how many threads it is called by."""
    bounds, counters = wanted.dataset.bound, context.counters
    if resources is not None and wanted.needs_workers:
        maker = WorkerMaker(
            sample_options_of(wanted),
            bounds=bounds,
            pool=resources.pool,
            workers=resources.workers,
            counters=counters,
            look_ahead_bytes=wanted.look_ahead_bytes,
        )
        return maker, DEPTH * workers_max(world)  # Threads only wait for their workers.
    num_threads = wanted.threads or threads_for(world, wanted.copies_only)
    at_random = wanted.order.mode != "sequential"
    reader = SampleReader(pool, counters, at_random=at_random)
    if resources is not None:
        reader = WorkerReader(
            bounds, resources.pool, resources.workers, counters, at_random=at_random
        )
        if all(map(is_local, bounds)):
            num_threads = min(_COPY_WORKERS_MAX, workers_max(world)) + _COPIES_WAITING
    if wanted.copies_only and can_gather(bounds):
        return GatherMaker(bounds, pool, reader), num_threads
    if wanted.makes_columns:
        return ColumnMaker(pool, reader, counters, num_threads=num_threads), num_threads
    options = sample_options_of(wanted)
    decoder = DecodeMaker(
        options, pool=pool, reader=reader, counters=counters, num_threads=num_threads
    )
    return decoder, num_threads


def _batches_a_job(maker: BatchMaker, stream: BatchStream, look_ahead_bytes: int) -> int:
    if not isinstance(maker, GatherMaker):
        return 1
    batch_bytes = maker.row_bytes * -(-stream.global_batch_size // stream.world.num_ranks)
    job_bytes = min(_TINY_JOB_BYTES, look_ahead_bytes // _JOBS_AHEAD_MIN)
    return max(1, min(_BATCHES_A_JOB_MAX, job_bytes // max(1, batch_bytes)))


def _fill_planner_of(
    wanted: LoaderOptions, stream: BatchStream, span: StreamSpan, stager: Stager, batches_a_job: int
) -> FillPlanner | None:
    if stager.fills is None or stager.residency is not None:
        return None  # Where units come and go, each comes with the first batch that uses it.
    # All nodes use the units whose home is this node, so it goes by the batches of all ranks.
    source = stream.everybody() if stager.cluster is not None else stream
    a_whole_epoch = -(-stream.steps().steps_per_epoch // span.part[1]) + 1

    def slots_from(epoch: int, position: int) -> Iterator[BatchSlot]:
        # A whole epoch has every sample; the end of one and the beginning of the next have not.
        rest = -(-stream.steps(position).num_steps // span.part[1]) if position else 0
        slots = source.slots(epoch, position, span.end_epoch, span.part)
        return islice(slots, rest + a_whole_epoch)

    course = stream.course
    fill_planner = FillPlanner(
        slots_from if course is None else partial(known_slots, source),
        span.start,
        wanted.dataset,
        stager,
        slots_a_job=batches_a_job,
        num_known=lambda: 0 if course is None else course.window,
    )
    if stager.cluster is not None:
        stager.cluster.home_fill.watch(fill_planner)
    return fill_planner


def _runs(wanted: LoaderOptions, world: World, fetcher: Fetcher) -> BlockRuns | None:
    """Return the runs that the order goes by, where samples of a run are neighbours."""
    order = wanted.order.first if isinstance(wanted.order, ColdOrder) else wanted.order
    dataset = wanted.dataset
    if not isinstance(order, BlocksOrder) or not isinstance(dataset, Dataset):
        return None
    if dataset.selection is not None:
        return None
    share = world.num_nodes / world.num_ranks
    num_samples = max(1, len(dataset) // order.num_blocks)
    run_bytes = dataset.size_bytes // order.num_blocks
    return BlockRuns(
        starts=order.block_starts,
        first_epoch_only=order is not wanted.order,
        read_whole=lambda: fetcher.reads_whole(share, num_samples, run_bytes),
    )


def _block_check(wanted: LoaderOptions, world: World, context: RunContext) -> Unpacked | None:
    """Refuse or warn where a uniform shuffle would read blocks over and over.

    The index knows how long blocks are as they are stored. How much memory one takes is known when
    the first is unpacked, before the first batch is delivered: then the function that is returned
    looks again.
    """
    is_uniform = not isinstance(wanted.order, BlocksOrder | SequentialOrder)
    if not is_uniform or not any(b.by_block for b in wanted.dataset.bound):
        return None
    blocks, tier_bytes = block_set_of(wanted.dataset), context.capacity_bytes

    def check(unpacked: float) -> None:
        factor = blocks.factor(
            tier_bytes=tier_bytes,
            stage_bytes=wanted.stage_bytes,
            num_ranks=world.num_ranks,
            unpacked=unpacked,
        )
        if wanted.is_default_order:
            refuse_rereads(wanted.dataset, blocks, factor, wanted.stage_bytes)
        elif factor > FACTOR_MAX:
            _log.warning(
                "%r: shuffle=%r reads and unpacks blocks of about %d samples, about %d times the "
                "data set in each uniform epoch; shuffle='blocks' reads each block once",
                wanted.dataset,
                wanted.order.mode,
                round(blocks.samples_a_block),
                round(factor),
            )

    check(1.0)
    return check if wanted.is_default_order else None


def ranks_a_node(world: World) -> int:
    """Return how many ranks a node has, where they are spread evenly."""
    return -(-world.num_ranks // world.num_nodes)


def threads_for(world: World, copies_only: bool) -> int:
    """Return this rank's share of the cores, less one of many for the training loop itself.

    A few threads copy as fast as memory allows; more of them only wait for each other.
    """
    cores = len(os.sched_getaffinity(0)) // ranks_a_node(world)
    most = _COPY_THREADS_MAX if copies_only else _THREADS_MAX
    return max(1, min(most, cores - 1 if cores >= 4 else cores))


def workers_max(world: World) -> int:
    """Return the most worker processes of a rank: its share of the cores."""
    return max(1, min(_WORKERS_MAX, len(os.sched_getaffinity(0)) // ranks_a_node(world)))
