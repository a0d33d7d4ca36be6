"""A pack at work: threads write shards, each is noted when done, all are committed at the end."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import xxhash

from penstock.dataset.catalog import Manifest
from penstock.dataset.pack_options import PackOptions, PackProgress, PackReport, Report
from penstock.dataset.pack_plan import PackPlan, make_plan
from penstock.dataset.part import Part
from penstock.dataset.sources import Source
from penstock.dataset.writer import sample_key, write_shard
from penstock.dataset.writer_destination import Destination, open_destination
from penstock.dataset.writer_layouts import Layout, TarLayout, npy_layout
from penstock.errors import DatasetError
from penstock.storage.options import StoreOptions
from penstock.storage.pool import Pool
from penstock.units import bytes_of

_WORKERS_LOCAL_MAX = 4
_WORKERS_REMOTE = 8
_LOCAL = ("folder", "memory")


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

    source: Source
    plan: PackPlan
    layout: Layout
    place: Destination
    readers: Pool
    options: PackOptions
    goes_on: bool
    written: set[int] = field(default_factory=set)
    """Shards whose writing has begun."""

    @classmethod
    def begin(
        cls,
        source: Source,
        destination: str | Path,
        options: PackOptions,
        readers: Pool,
        store: StoreOptions | None,
    ) -> Packing:
        """Plan the shards and take the destination."""
        sizes = source.sizes()
        if not len(sizes):
            raise DatasetError(f"{source.uri} has no samples to pack")
        plan = make_plan(
            sizes, source.num_fields, options.shard_size, options.shuffle, options.limit
        )
        layout: Layout = TarLayout()
        if options.format == "npy":
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
            readers=readers,
            options=options,
            goes_on=goes_on,
        )

    def run(self, report: Report | None) -> PackReport:
        """Write what is missing, then commit."""
        latest = self.place.catalog.read()
        if latest is not None and latest.version > self.place.job.base_version:
            # Killed between the commit and the end: the version is there, the note is left over.
            self.place.forget()
            return report_of(
                self.place.store.uri, latest, self.plan.num_shards, self.plan.num_shards
            )
        parts: dict[int, Part] = {}
        num_reused = 0
        progress = PackProgress(shards=self.plan.num_shards)
        try:
            self.place.check_layout(self.layout)
            with Pool(self._num_workers()) as pool:
                shards = pool.map_unordered(self._shard, range(self.plan.num_shards))
                for number, part, is_reused in shards:
                    parts[number] = part
                    num_reused += is_reused
                    progress = progress.after(part)
                    if report is not None:
                        report(progress)
        except BaseException:
            if not self.goes_on and not self.written:
                self.place.forget()
            raise
        manifest = self.place.commit([parts[n] for n in sorted(parts)], self.layout)
        return report_of(self.place.store.uri, manifest, self.plan.num_shards, num_reused)

    def _num_workers(self) -> int:
        if self.options.workers is not None:
            return self.options.workers
        if self.place.store.source in _LOCAL:
            return min(_WORKERS_LOCAL_MAX, os.cpu_count() or 1)
        return _WORKERS_REMOTE

    def _shard(self, number: int) -> tuple[int, Part, bool]:
        """Return a shard's number, its index, and whether it was there already."""
        kept = self.place.kept(number) if self.goes_on else None
        if kept is not None:
            return number, kept, True
        numbers = self.plan.numbers(number)
        decoded = self.options.format == "npy"
        samples = self.source.read(numbers, self.readers, decoded=decoded)
        first = int(self.plan.starts[number])
        records = [
            self.layout.encode(self._key(first + i, n), sample)
            for i, (n, sample) in enumerate(zip(numbers.tolist(), samples, strict=True))
        ]
        self.written.add(number)
        part = write_shard(self.place, number, self.layout, records, is_new=False)
        self.place.keep(number, part)
        return number, part, False

    def _key(self, position: int, number: int) -> str:
        own = self.source.key(number) if self.options.keep_keys else None
        return own or sample_key(self.place.num_samples_before, position)


def _job_name(source: Source, options: PackOptions) -> str:
    """Return a name that is the same for the same samples in the same shards."""
    chosen = [options.format, bytes_of(options.shard_size), options.shuffle, options.limit]
    what = [source.fingerprint, *chosen, options.append, options.keep_keys]
    return "pack-" + xxhash.xxh3_64_hexdigest(msgspec.json.encode(what))
