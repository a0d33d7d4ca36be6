"""A pack at work: shards are written in any order, each is noted when done, then all are committed.

A `Packing` is a value that says everything about a pack, so it can be handed to workers elsewhere;
`pack_shard` is what is done for one shard, here or there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import xxhash

from penstock.dataset.build_merge import MergeOutline, Piece, outline_of
from penstock.dataset.build_scan import IndexedUnit
from penstock.dataset.catalog import Manifest
from penstock.dataset.crew import Crew, refuse_memory
from penstock.dataset.pack_options import PackOptions, PackProgress, PackReport, Report
from penstock.dataset.pack_plan import PackPlan, make_plan
from penstock.dataset.part import Part
from penstock.dataset.sources_csv import PackSource
from penstock.dataset.versions import Addition
from penstock.dataset.writer import sample_key, write_shard
from penstock.dataset.writer_destination import Destination, open_destination, part_name
from penstock.dataset.writer_layouts import ShardLayout, TarLayout, npy_layout
from penstock.errors import DatasetError, StoreError
from penstock.storage.options import StoreOptions
from penstock.storage.pool import ReadPool
from penstock.units import bytes_of

_WORKERS_LOCAL_MAX = 4
_WORKERS_REMOTE = 8
_READERS = 16
_LOCAL = ("folder", "memory")
_HELD_PARTS_MAX = 1000
"""Parts of shards that stay in memory; those of more shards are read again in the end."""


def report_of(uri: str, manifest: Manifest, num_shards: int, num_reused: int) -> PackReport:
    """Return what a committed version says of a pack."""
    return PackReport(
        uri=uri,
        version=manifest.version,
        num_samples=manifest.num_samples,
        num_shards=num_shards,
        num_shards_reused=num_reused,
        size_bytes=manifest.size_bytes,
    )


@dataclass(frozen=True, kw_only=True)
class Packing:
    """A pack at work: a source, a plan, and a place for what it gives."""

    source: PackSource
    plan: PackPlan
    layout: ShardLayout
    place: Destination
    options: PackOptions
    goes_on: bool
    """Whether there may be shards that are done: of an earlier run, or of a worker that died."""
    readers: ReadPool | None = field(default=None, compare=False)
    """Threads that all shards share; None where each brings its own."""
    holds: bool = True
    """Whether the index of a shard is handed back, rather than read again in the end."""

    @classmethod
    def begin(
        cls,
        source: PackSource,
        destination: str | Path,
        options: PackOptions,
        store: StoreOptions | None,
    ) -> Packing:
        """Plan the shards and take the destination."""
        if not source.num_samples:
            raise DatasetError(f"{source.uri} has no samples to pack")
        plan = make_plan(
            source.sizes_of,
            source.num_samples,
            num_fields=source.num_fields,
            shard_size=options.shard_size,
            seed=options.shuffle,
            limit=options.limit,
        )
        layout: ShardLayout = TarLayout()
        if options.format == "npy":
            with ReadPool(1) as readers:
                layout = npy_layout(source.read(plan.first(1), readers, decoded=True)[0])
            plan = plan.with_rows(layout.row_bytes, options.shard_size)
        place, goes_on = open_destination(
            destination,
            options.format,
            _job_name(source, options),
            append=options.append,
            options=store,
        )
        return cls(
            source=source,
            plan=plan,
            layout=layout,
            place=place,
            options=options,
            goes_on=goes_on,
        )

    def run(self, crew: Crew, report: Report | None) -> PackReport:
        """Write what is missing, then commit."""
        place = self.place
        done = place.committed()
        if done is not None:
            # Killed between the commit and the end: the version is there, the note is left over.
            place.forget(done)
            return report_of(place.store.uri, done, self.plan.num_shards, self.plan.num_shards)
        # Before anything is written: a shard of this name may belong to the newer version.
        place.refuse_newer()
        try:
            refuse_memory(crew, self.place.store)
            place.check_layout(self.layout)
            addition, num_reused = self._write_all(crew, report)
        except BaseException:
            self._forget_if_empty()
            raise
        manifest = place.commit(addition, self.layout)
        place.forget(manifest)
        return report_of(place.store.uri, manifest, self.plan.num_shards, num_reused)

    def _write_all(self, crew: Crew, report: Report | None) -> tuple[Addition, int]:
        pieces: dict[int, Piece] = {}
        outline: MergeOutline | None = None
        num_reused = 0
        progress = PackProgress(shards=self.plan.num_shards)
        with self._for_crew(crew) as job:
            shards = crew.map_unordered(
                pack_shard,
                job,
                range(self.plan.num_shards),
                at_once=self._num_workers(),
                names=lambda number: self.place.store.uri + self.place.key(number),
            )
            # An error below leaves the crew at work until it is told to stop.
            with closing(shards):
                for shard in shards:
                    pieces[shard.number] = shard.piece(self.place.work)
                    outline = shard.outline.joined(outline) if outline else shard.outline
                    num_reused += shard.is_reused and self.goes_on
                    progress = progress.after(shard.outline)
                    if report is not None:
                        report(progress)
        assert outline is not None
        return Addition(outline=outline, pieces=[pieces[n] for n in sorted(pieces)]), num_reused

    @contextmanager
    def _for_crew(self, crew: Crew) -> Iterator[Packing]:
        """Give this as its crew needs it."""
        if crew.is_elsewhere:
            # A task that is started again after its worker died finds shards that it had finished.
            yield replace(self, goes_on=True, holds=False)
            return
        # Apart from the threads that write shards: these wait for reads, and could take all threads
        # of one pool.
        with ReadPool(_READERS) as readers:
            yield replace(self, readers=readers, holds=self.plan.num_shards <= _HELD_PARTS_MAX)

    def _num_workers(self) -> int:
        if self.options.workers is not None:
            return self.options.workers
        if self.place.store.source in _LOCAL:
            return min(_WORKERS_LOCAL_MAX, os.cpu_count() or 1)
        return _WORKERS_REMOTE

    def _forget_if_empty(self) -> None:
        """Free the destination if no shard lies there; else the job must be finished."""
        first = self.place.key(0)
        with suppress(StoreError):  # The error that led here matters more.
            shards = self.place.store.list(first[: first.index("-") + 1])
            if not self.goes_on and not any(shard.key >= first for shard in shards):
                self.place.forget()


def pack_shard(packing: Packing, number: int) -> IndexedUnit:
    """Write one shard and note its index, unless that was done before."""
    part = packing.place.kept(number) if packing.goes_on else None
    is_reused = part is not None
    if part is None:
        part = _written(packing, number)
        packing.place.work.keep(part_name(number), part)
    return IndexedUnit(
        number=number,
        name=part_name(number),
        outline=outline_of(part, number),
        # One of an earlier run may be mapped and hold a descriptor: it is read again in the end.
        held=part if packing.holds and not is_reused else None,
        is_reused=is_reused,
    )


def _written(packing: Packing, number: int) -> Part:
    plan, layout = packing.plan, packing.layout
    numbers = plan.numbers(number)
    decoded = packing.options.format == "npy"
    if packing.readers is not None:
        samples = packing.source.read(numbers, packing.readers, decoded=decoded)
    else:
        with ReadPool(_READERS) as readers:
            samples = packing.source.read(numbers, readers, decoded=decoded)
    first = int(plan.starts[number])
    records = [
        layout.encode(_key(packing, first + i, n), sample)
        for i, (n, sample) in enumerate(zip(numbers.tolist(), samples, strict=True))
    ]
    return write_shard(packing.place, number, layout, records, is_new=False)


def _key(packing: Packing, position: int, number: int) -> str:
    own = packing.source.key(number) if packing.options.keep_keys else None
    return own or sample_key(packing.place.num_samples_before, position)


def _job_name(source: PackSource, options: PackOptions) -> str:
    """Return a name that is the same for the same samples in the same shards."""
    chosen = [options.format, bytes_of(options.shard_size), options.shuffle, options.limit]
    what = [source.fingerprint, *chosen, options.append, options.keep_keys]
    return "pack-" + xxhash.xxh3_64_hexdigest(msgspec.json.encode(what))
