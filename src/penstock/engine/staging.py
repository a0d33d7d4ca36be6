"""Reads ahead of the workers: units for the tiers, ranges of remote objects, and blocks.

Samples of local files are read by the worker that needs them. Every read that takes a round trip is
wanted as soon as its batch is planned. Samples that belong in a tier are fetched into it, once.
Samples whose home is another node are asked of that node. Of all others, near ranges of one object
are read with one request. Where samples come in blocks, or the order itself goes block by block, a
block is read once for all the batches that use it.

What another node has comes in one of two ways. A unit that has a place in a tier here is copied
whole into the tier (`UnitsRead`); the batch then reads the tier. Of other units only the ranges of
the samples are asked for, into memory for this batch (`RangesRead`). Blocks always come as units,
because several batches use them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.dataset.checks import first_damaged, has_checksums, read_checked
from penstock.dataset.part import Ints
from penstock.engine.block_cache import BlockCache
from penstock.engine.buffers import BufferPool
from penstock.engine.fetcher import Fetcher, SourceRead
from penstock.engine.fills import Fill, FillRun, Fills
from penstock.engine.job import BatchJob, BatchSlot, SampleGroup
from penstock.engine.local_tiers import Flags, LocalTiers, SamplePlaces
from penstock.engine.reads import is_local
from penstock.engine.run_context import RunContext
from penstock.engine.stage_reads import BlockRead, BlockRuns, RangeRead, StorePlace
from penstock.engine.stages import BlocksStage, PeerStage, RangesStage, Raw, TierStage
from penstock.flow.layout.units import GAP_BYTES, RUN_BYTES
from penstock.flow.routes import Route, routes_of, store_route
from penstock.storage.base import ObjectInfo, Store
from penstock.storage.coalesce import merge_ranges
from penstock.storage.retry import RetryingStore, attempts_seen
from penstock.trace import Flag, Kind, Recorder

if TYPE_CHECKING:
    from penstock.engine.cluster import Cluster
    from penstock.engine.peer_reads import PeerFills, PeerRanges, RangesRead
    from penstock.engine.tier_residency import TierResidency

_RANGE_BYTES_MAX = 8 << 20
_OBJECT_SPACING = 1 << 42


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedReads:
    """The reads that a job waits for."""

    reads: list[SourceRead] = field(default_factory=list)
    """Reads for this job alone."""
    fills: list[Fill] = field(default_factory=list)
    """Units that it needs; other jobs may wait for them as well."""
    fill_reads: list[FillRun] = field(default_factory=list)
    """The reads of those units that nobody has begun."""


Unpacked = Callable[[float], None]
"""Is called with the memory of the first unpacked block, as a multiple of its stored length; may
raise to refuse the run."""


class Stager:
    """Plans the reads ahead of a run, and reads from stores."""

    def __init__(
        self,
        pool: BufferPool,
        context: RunContext,
        *,
        stage_bytes: int,
        runs: BlockRuns | None,
        rates: Fetcher,
        unpacked: Unpacked | None = None,
        residency: TierResidency | None = None,
    ) -> None:
        self._pool = pool
        self._unpacked = unpacked
        self._counters = context.counters
        self._stage_bytes = stage_bytes
        self._blocks = BlockCache(stage_bytes)
        self._runs = runs
        self._bare_runs: dict[int, bool] = {}
        """Whether no tier holds anything of a run, for the runs seen so far."""
        self._local_tiers = local_tiers = context.local_tiers
        self._rates = rates
        self.cluster = cluster = context.cluster
        self.latest: tuple[BatchSlot | None, int] = (None, 0)
        """The batch that was planned last, and the number of its job."""
        self._num_jobs = 0
        self.residency = residency
        """Decides which units the tiers keep, where units come and go."""
        self.fills = None
        if local_tiers is not None:
            self.fills = Fills(
                local_tiers,
                self.fetch_units,
                rates.stores,
                peer_source=None if cluster is None else _fills_of_peers(local_tiers, cluster),
                is_damaged=self._is_damaged,
                recorder=context.recorder,
            )
            if residency is not None:
                residency.is_coming = self.fills.is_pending

    # -- planning ----------------------------------------------------------------------------

    def split(self, job: BatchJob) -> None:
        """Split the groups of a job by the route of their bytes, and set `job.routes`.

        The routes are: a tier that holds the samples or will hold them, other nodes, a run that is
        read whole, or the store for each sample alone.
        """
        if self.cluster is not None:
            self.cluster.take_over_news()
        number = self._num_jobs
        self.latest = job.slots[-1], number
        self._num_jobs += 1
        if self.residency is not None:
            self.residency.begin(job.groups)
        self._split(job)
        if self.residency is not None:
            self.residency.end(number)

    def _split(self, job: BatchJob) -> None:
        runs = self._runs
        in_runs = runs is not None and runs.are_read_whole(job.slots[0].epoch)
        if self._local_tiers is None:
            job.routes = [store_route(in_runs=in_runs)] * len(job.groups)
            return
        groups: list[SampleGroup] = []
        for group in job.groups:
            routes = self._routes(self._local_tiers, group, in_runs)
            found = np.flatnonzero(np.bincount(routes)).tolist()
            for route in found:
                job.routes.append(Route(route))
                whole = len(found) == 1
                groups.append(group if whole else group.part(np.flatnonzero(routes == route)))
        job.groups = groups

    def _routes(self, local_tiers: LocalTiers, group: SampleGroup, in_runs: bool) -> Ints:
        return routes_of(
            local_tiers.is_placed(local_tiers.places(group)),
            in_runs=in_runs,
            is_run_bare=partial(self._is_run_bare, group),
            can_come_from_peers=None
            if self.cluster is None
            else partial(self._can_come_from_peers, group),
        )

    @property
    def fills_for_others(self) -> bool:
        """Whether this rank also fetches units that other ranks of its node should have fetched."""
        return self.cluster is not None and self.cluster.holders.fills_for_others

    @property
    def homes_version(self) -> int:
        """A number that grows when units have a new home on this node."""
        return self.cluster.homes_version if self.cluster is not None else 0

    def _can_come_from_peers(self, group: SampleGroup) -> Flags:
        """Return which samples have all their units here or on nodes that can be asked."""
        assert self._local_tiers is not None
        assert self.cluster is not None
        flags = np.ones(len(group.where), bool)
        for table in self._local_tiers.places(group):
            here = self._local_tiers.has_place(table.units)
            flags &= here | (self.cluster.holders.peers_of(table.units)[0] >= 0)
        return flags

    def _is_run_bare(self, group: SampleGroup) -> Flags:
        """Return which samples lie in a run of which no tier holds anything."""
        assert self._runs is not None
        assert self._local_tiers is not None
        numbers = self._runs.numbers(group.local_ids + group.bound.first)
        bare = {}
        for number in np.unique(numbers).tolist():
            if number not in self._bare_runs:
                first = self._runs.starts[number : number + 1] - group.bound.first
                units = self._units_around(group.at(first), placed_only=False)
                self._bare_runs[number] = not (self._local_tiers.tiers.tier_of(units) >= 0).any()
            bare[number] = self._bare_runs[number]
        return np.array([bare[number] for number in numbers.tolist()], bool)

    def stage(self, job: BatchJob) -> StagedReads:
        """Give each group of a job its stage; return the reads that the job waits for."""
        staged = StagedReads()
        for number, route in enumerate(job.routes):
            if route == Route.TIER:
                self._stage_tiered(job, number, staged)
            elif route == Route.PEER:
                self._stage_from_peers(job, number, staged)
            else:
                self._stage_store(job, number, staged)
        return staged

    def _stage_tiered(self, job: BatchJob, number: int, staged: StagedReads) -> None:
        assert self._local_tiers is not None
        group = job.groups[number]
        places = self._local_tiers.places(group)
        stage = TierStage(self, group, self._local_tiers, places, self._counters)
        job.staged[number] = stage
        fills = [self._fills_of(self._not_unpacked(group, table.units)) for table in places]
        for fill, _ in itertools.chain(*fills):
            stage.fills[fill.unit] = fill
            staged.fills.append(fill)
        if staged.fills:
            new = [fill for fill, is_new in itertools.chain(*fills) if is_new]
            staged.fill_reads.extend(self._fill_reads(group, new, job.slots[0].epoch))

    def _not_unpacked(self, group: SampleGroup, units: Ints) -> Ints:
        """Return the units of a group; among several nodes, without blocks in the cache."""
        if self.cluster is None or not group.bound.by_block:
            return units
        is_here = [self._blocks.has(unit) for unit in units.tolist()]
        wanted: Ints = units[~np.array(is_here, bool)]
        return wanted

    def _stage_from_peers(self, job: BatchJob, number: int, staged: StagedReads) -> None:
        """Ask other nodes for samples; units that belong here come into the tiers as usual."""
        local_tiers, group = self._local_tiers, job.groups[number]
        assert local_tiers is not None
        if group.bound.by_block:
            # Blocks are whole units that several batches use, so they come into the tiers.
            self._stage_tiered(job, number, staged)
            return
        places = local_tiers.places(group)
        near = TierStage(self, group, local_tiers, places, self._counters)
        stage = PeerStage(self, group, near)
        job.staged[number] = stage
        new: list[Fill] = []
        for number_of_table, table in enumerate(places):
            here = np.flatnonzero(local_tiers.has_place(table.units))
            for fill, is_new in self._fills_of(table.units[here]):
                near.fills[fill.unit] = fill
                staged.fills.append(fill)
                new += [fill] if is_new else []
            far = np.setdiff1d(np.arange(len(table.units)), here, assume_unique=True)
            for read, chosen in self._ranges_of_peers(group, number_of_table, table, far):
                stage.expect(number_of_table, chosen, read)
                job.staged_bytes += read.size_bytes
                staged.reads.append(read)
        staged.fill_reads.extend(self._fill_reads(group, new, job.slots[0].epoch))

    def _ranges_of_peers(
        self, group: SampleGroup, number: int, table: SamplePlaces, far: Ints
    ) -> Iterator[tuple[RangesRead, list[Ints]]]:
        """Yield a read for each peer, with the samples of the group in each of its ranges."""
        from penstock.engine.peer_reads import PeerRanges, RangesRead

        cluster, local_tiers = self.cluster, self._local_tiers
        assert cluster is not None
        assert local_tiers is not None
        units, inside = table.units[far], table.inside[far]
        lengths = group.extents[number].length[far]
        # Samples with the same bytes, such as those of one block, are asked for once.
        same = np.stack([units, inside, lengths], axis=1)
        _, first, back = np.unique(same, axis=0, return_index=True, return_inverse=True)
        back = back.reshape(-1)
        samples = np.split(far[np.argsort(back, kind="stable")], np.cumsum(np.bincount(back))[:-1])
        chosen = PeerRanges(
            ranges=local_tiers.ranges(units[first], inside[first], lengths[first]),
            bound=group.bound,
            table=number,
            ids=group.local_ids[far[first]],
        )
        for sources, numbers in cluster.holders.by_sources(units[first], group.bound.store.source):
            start = 0
            for part in chosen.at(numbers).cut():
                read = RangesRead(part, sources, cluster, self._read_range)
                stop = start + len(part.ids)
                yield read, [samples[n] for n in numbers[start:stop].tolist()]
                start = stop

    def _read_range(self, wanted: PeerRanges, number: int) -> tuple[memoryview, int]:
        """Return the bytes that a peer did not send from their store, and the number of retries."""
        ids = wanted.ids[number : number + 1]
        e = wanted.bound.part.tables[wanted.table].extents(ids)
        at = StorePlace(wanted.bound, wanted.table, int(e.object[0]), int(e.offset[0]))
        return self.read(at, ids, int(e.length[0]))

    def _is_damaged(self, unit: int, data: memoryview) -> bool:
        """Return whether the index knows checksums of a unit and bytes do not match them."""
        assert self._local_tiers is not None
        e = self._local_tiers.units.extent(unit)
        bound = self._local_tiers.bounds[e.bound_number]
        if not has_checksums(bound):
            return False
        first, count = self._local_tiers.units.samples_of(unit)
        return bool(first_damaged(bound, np.arange(first, first + count), e.offset, data))

    def _fills_of(self, units: Ints) -> list[tuple[Fill, bool]]:
        """Return the fills of the units that are absent, each with whether it is new."""
        assert self._local_tiers is not None
        assert self.fills is not None
        return [self.fills.of(unit) for unit in self._local_tiers.absent(units)]

    def _fill_reads(self, group: SampleGroup, new: list[Fill], epoch: int) -> list[FillRun]:
        """Return reads for fills; where the order goes by runs, for the whole runs around them."""
        assert self.fills is not None
        if new and self._runs is not None and self._runs.are_used_in(epoch):
            context = self._units_around(group)
            new = new + [fill for fill, is_new in self._fills_of(context) if is_new]
        # A unit may contain gaps of GAP_BYTES between samples, so a read may as well.
        return self.fills.reads(new, max(GAP_BYTES, self._rates.gap_bytes(RUN_BYTES)))

    def _units_around(self, group: SampleGroup, *, placed_only: bool = True) -> Ints:
        """Return the units of all runs that some samples of a group lie in."""
        assert self._local_tiers is not None
        assert self._runs is not None
        first, last = self._runs.ends(group.local_ids + group.bound.first)
        units = []
        for ends in self._local_tiers.places(
            group.at(np.stack([first, last - 1]) - group.bound.first)
        ):
            low, high = ends.units.reshape(2, -1)
            ranges = zip(low.tolist(), high.tolist(), strict=True)
            units += [self._local_tiers.units.between(a, b) for a, b in ranges]
        context = np.concatenate(units)
        return context[self._local_tiers.has_place(context)] if placed_only else context

    def fills_ahead(
        self, group: SampleGroup, jobs: Ints, epoch: int, *, of_others: bool = False
    ) -> tuple[list[tuple[int, FillRun]], list[Fill]]:
        """Return reads for those units of a group that nobody has begun, each with its job.

        With `of_others`, units are included that other ranks of this node should have begun. The
        second list holds the fills that batches of this rank have begun already.
        """
        assert self._local_tiers is not None
        places = self._local_tiers.places(group)
        out: list[tuple[int, FillRun]] = []
        under_way: list[Fill] = []
        for table in places:
            if self.cluster is None:
                placed = np.flatnonzero(self._local_tiers.is_placed(places))
            else:
                mine = self.cluster.holders.is_mine(table.units, of_others=of_others)
                placed = np.flatnonzero(self._local_tiers.has_place(table.units) & mine)
            units, first = np.unique(table.units[placed], return_index=True)
            job_of = dict(zip(units.tolist(), jobs[placed][first].tolist(), strict=True))
            found = self._fills_of(table.units[placed])
            new = [fill for fill, is_new in found if is_new]
            under_way += [fill for fill, is_new in found if not is_new]
            by_job: dict[int, list[Fill]] = {}
            for fill in new:
                by_job.setdefault(job_of[fill.unit], []).append(fill)
            for job, fills in by_job.items():
                chosen = group.part(placed[np.isin(table.units[placed], [f.unit for f in fills])])
                out += [(job, read) for read in self._fill_reads(chosen, fills, epoch)]
        return out, under_way

    def _stage_store(self, job: BatchJob, number: int, staged: StagedReads) -> None:
        group = job.groups[number]
        local = is_local(group.bound) and self._local_tiers is None
        if group.bound.by_block or (job.routes[number] == Route.RUN and not local):
            blocks = self._stage_blocks(group)
            job.staged[number] = blocks
            staged.reads.extend([] if local else self._block_reads(group, blocks))
        elif not local:
            ranges, reads = self._stage_ranges(group)
            job.staged[number] = ranges
            job.staged_bytes += sum(len(b) for b in ranges.buffers)
            staged.reads.extend(reads)

    def _stage_blocks(self, group: SampleGroup) -> BlocksStage:
        names: list[list[Hashable]] = []
        for table, extents in enumerate(group.extents):
            if group.bound.by_block:
                numbers = extents.block
            else:
                assert self._runs is not None
                numbers = self._runs.numbers(group.local_ids + group.bound.first)
            names.append([(id(group.bound), table, n) for n in numbers.tolist()])
        return BlocksStage(self, group, names)

    def _block_reads(self, group: SampleGroup, stage: BlocksStage) -> list[SourceRead]:
        first_use: dict[Hashable, tuple[int, int]] = {}
        for table, names in enumerate(stage.names):
            for j, name in enumerate(names):
                first_use.setdefault(name, (table, j))
        wanted = [(n, t, j) for n, (t, j) in first_use.items() if not self._blocks.has(n)]
        if group.bound.by_block:
            # A block that would be evicted before its use is read when it is used instead.
            lengths = group.extents[0].length
            wanted = wanted[: max(1, self._stage_bytes // 2 // max(1, int(lengths.max())))]
        return [BlockRead(self, group, table, j, name) for name, table, j in wanted]

    def _stage_ranges(self, group: SampleGroup) -> tuple[RangesStage, list[SourceRead]]:
        stage = RangesStage(self, group)
        reads: list[SourceRead] = []
        for table, e in enumerate(group.extents):
            # One call merges the ranges of all objects: each object gets an address space of its
            # own, so far from the next one that no range crosses.
            objects, numbers = np.unique(e.object, return_inverse=True)
            assert int(e.offset.max()) < _OBJECT_SPACING
            assert len(objects) < 2**63 // _OBJECT_SPACING
            merged = merge_ranges(
                numbers * _OBJECT_SPACING + e.offset,
                e.length,
                gap_bytes_max=self._rates.gap_bytes(int(e.length.mean())),
                length_bytes_max=_RANGE_BYTES_MAX,
            )
            ends = np.cumsum(merged.lengths)
            buffer = self._pool.view(int(ends[-1]))
            places = (ends - merged.lengths).tolist()
            starts = (ends - merged.lengths)[merged.index] + merged.inside
            stage.buffers.append(buffer)
            stage.starts.append(starts.tolist())
            stage.lengths.append(e.length.tolist())
            ids = _by_range(group.local_ids, merged.index)
            for at, far, length, inside in zip(
                places, merged.offsets.tolist(), merged.lengths.tolist(), ids, strict=True
            ):
                place, offset = divmod(far, _OBJECT_SPACING)
                where = StorePlace(group.bound, table, int(objects[place]), offset)
                reads.append(RangeRead(self, where, inside, buffer[at : at + length]))
        return stage, reads

    # -- blocks ------------------------------------------------------------------------------

    @contextmanager
    def pinned(self, names: list[Any]) -> Iterator[None]:
        """Keep some blocks in the cache while they are in use."""
        distinct = list(dict.fromkeys(names))
        self._blocks.pin(distinct)
        try:
            yield
        finally:
            self._blocks.unpin(distinct)

    def block(
        self,
        group: SampleGroup,
        j: int,
        name: Any,
        raw: Callable[[], Raw] | None = None,
        *,
        beside: bool = False,
    ) -> Any:
        """Return the unpacked block of a sample, reading it if need be.

        With `beside` it is read even if another thread is reading it: that thread is slow.
        """

        def load() -> tuple[Any, int]:
            e = group.extents[0]
            number, offset = int(e.object[j]), int(e.offset[j])
            data = self.read_sample(group, 0, j) if raw is None else np.asarray(raw()).data
            block = group.bound.unpack_raw(number, offset, data)
            if (unpacked := self._unpacked) is not None:
                unpacked(block.size_bytes / max(1, len(data)))
                self._unpacked = None  # Blocks of one data set are alike: the first one is enough.
            return block, block.size_bytes

        return self._blocks.get(name, load, beside=beside)

    def run(
        self, group: SampleGroup, table: int, j: int, name: Any, *, beside: bool = False
    ) -> tuple[int, memoryview]:
        """Return offset and bytes of the run of samples that a sample lies in."""

        def load() -> tuple[tuple[int, memoryview], int]:
            at, ids, length = self.run_extent(group, table, j)
            data, _ = self.read(at, ids, length)
            return (at.offset, data), length

        found: tuple[int, memoryview] = self._blocks.get(name, load, beside=beside)
        return found

    def run_extent(self, group: SampleGroup, table: int, j: int) -> tuple[StorePlace, Ints, int]:
        """Return the place, the samples and the length of the run that a sample lies in."""
        assert self._runs is not None
        bound = group.bound
        first, stop = self._runs.ends(group.local_ids[j : j + 1] + bound.first)
        e = bound.part.tables[table].extents(np.append(first, stop - 1) - bound.first)
        at = StorePlace(bound, table, int(e.object[0]), int(e.offset[0]))
        ids = np.arange(int(first[0]), int(stop[0])) - bound.first
        return at, ids, int(e.offset[1] + e.length[1]) - at.offset

    # -- reading -----------------------------------------------------------------------------

    def read_sample(self, group: SampleGroup, table: int, j: int) -> memoryview:
        """Return the extent of a sample from its store."""
        e = group.extents[table]
        at = StorePlace(group.bound, table, int(e.object[j]), int(e.offset[j]))
        return self.read(at, group.local_ids[j : j + 1], int(e.length[j]))[0]

    def fetched_again(self, unit: int) -> memoryview | None:
        """Fetch a unit that is damaged in its tier; None if another thread is fetching it.

        The thread that found the damage fetches it: its batch is already being made.
        """
        assert self.fills is not None
        return self.fills.fetched_now(unit)

    def fetch_units(self, unit: int, count: int) -> tuple[list[memoryview], int]:
        """Return the bytes of neighbouring units from their store, and the number of retries."""
        local_tiers = self._local_tiers
        assert local_tiers is not None
        extents = [local_tiers.units.extent(u) for u in range(unit, unit + count)]
        e, last = extents[0], extents[-1]
        place = (e.bound_number, e.table, e.object)
        assert all((x.bound_number, x.table, x.object) == place for x in extents), extents
        at = StorePlace(local_tiers.bounds[e.bound_number], e.table, e.object, e.offset)
        ids = np.zeros(0, np.int64)
        if has_checksums(at.bound):
            samples = [local_tiers.units.samples_of(u) for u in range(unit, unit + count)]
            ids = np.concatenate([np.arange(first, first + n) for first, n in samples])
        whole, num_retries = self.read(at, ids, last.offset + last.length - e.offset)
        return [whole[x.offset - e.offset :][: x.length] for x in extents], num_retries

    def read(self, at: StorePlace, ids: Ints, length: int) -> tuple[memoryview, int]:
        """Return bytes in which samples of a part lie, and the number of retries at the store.

        They are checked against the checksums of the index, if it has any, and not copied.
        """
        store = at.bound.store
        before = store.num_attempts_here if isinstance(store, RetryingStore) else 0
        data, num_again = read_checked(at.bound, ids, at.offset, lambda: self._timed(at, length))
        if isinstance(store, RetryingStore):
            # Every attempt but the first, those after a wrong checksum included.
            num_again = store.num_attempts_here - before - 1
        return data, num_again

    def _timed(self, at: StorePlace, length: int) -> memoryview:
        info, store = at.bound.part.tables[at.table].info(at.object), at.bound.store
        begin = time.perf_counter_ns()
        if self._counters.recorder is None:
            data = store.read_range(info, at.offset, length)
        else:
            data = _recorded(self._counters.recorder, store, info, at.offset, length)
        seconds = (time.perf_counter_ns() - begin) / 1e9
        self._counters.add_reads(store.source, length, 1, seconds)
        return data


def _recorded(
    recorder: Recorder, store: Store, info: ObjectInfo, offset: int, length: int
) -> memoryview:
    """Return bytes from a store; each attempt is a row of the trace, a failed one with 0 bytes."""

    def seen(attempt: int, begin_ns: int, error: BaseException | None) -> None:
        recorder.span(
            Kind.FETCH,
            begin_ns,
            time.perf_counter_ns(),
            object_id=recorder.name(info.key),
            source_id=recorder.name(store.source),
            offset=offset,
            size_bytes=length if error is None else 0,
            count=1,
            attempt=attempt,
            flags=Flag.NONE if error is None else Flag.ERROR,
        )

    if isinstance(store, RetryingStore):
        with attempts_seen(seen):
            return store.read_range(info, offset, length)
    begin_ns = time.perf_counter_ns()
    try:
        data = store.read_range(info, offset, length)
    except BaseException as error:
        seen(0, begin_ns, error)
        raise
    seen(0, begin_ns, None)
    return data


def _by_range(ids: Ints, range_of: Ints) -> list[Ints]:
    """Return the samples that lie in each range."""
    by_range = np.argsort(range_of, kind="stable")
    return np.split(ids[by_range], np.flatnonzero(np.diff(range_of[by_range])) + 1)


def _fills_of_peers(local_tiers: LocalTiers, cluster: Cluster) -> PeerFills:
    # Imported here, because the first batch of a run without other nodes would wait for it.
    from penstock.engine.peer_reads import PeerFills

    return PeerFills(local_tiers, cluster)
