"""Packing: many small files, tables or arrays into shards that are read fast.

The samples of a source are cut into shards by their sizes, which the index knows, before any of
them is read. So a shard is a piece of work of its own: threads write shards in any order, the
result is the same, and a pack that was killed writes only what is missing when it is run again.
Readers see nothing before the last step, which commits one version.

Samples that lie in blocks (Parquet, compressed shards) are read a block at a time. Shuffled, each
shard then reads every block that one of its samples lies in: choose large shards, or pack such a
source as it is first and shuffle the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, cast

from penstock.dataset.crew import Crew, ThreadCrew
from penstock.dataset.dataset import Dataset
from penstock.dataset.open import Uri
from penstock.dataset.open import open as open_dataset
from penstock.dataset.pack_options import PackOptions, PackProgress, PackReport, Report
from penstock.dataset.pack_run import Packing, report_of
from penstock.dataset.sources import DatasetSource
from penstock.dataset.sources_csv import PackSource, open_csv
from penstock.dataset.writer import Writer
from penstock.errors import OptionError
from penstock.storage.options import StoreOptions

__all__ = ["PackOptions", "PackProgress", "PackReport", "Report", "pack"]


def pack(
    source: Uri | Dataset | Iterable[Mapping[str, Any]],
    destination: str | Path,
    options: PackOptions | None = None,
    *,
    store: StoreOptions | None = None,
    source_store: StoreOptions | None = None,
    report: Report | None = None,
    crew: Crew | None = None,
) -> PackReport:
    """Pack a source into shards at a destination and commit them as one version.

    Args:
        source: a folder of plain files (top folders are classes), a `.csv` beside its files,
            anything else that `penstock.open` reads, an open data set, or an iterable of samples.
        destination: a folder, a bucket or a prefix in one.
        options: format, size of shards, order.
        store: how the destination is reached, where the environment does not say.
        source_store: how the source is reached.
        report: called with progress.
        crew: who writes shards, where that is not this process alone.

    Run again after it was killed, with the same source and options, it goes on where it was. That
    does not hold for an iterable, which cannot be asked for its middle.
    """
    options = options or PackOptions()
    chosen = _source(source, options, source_store)
    if chosen is None:
        if crew is not None and crew.is_elsewhere:
            raise OptionError(
                "an iterable is one stream, which workers elsewhere cannot share; write it with "
                "a Writer in each of them, to destinations of their own"
            )
        samples = cast("Iterable[Mapping[str, Any]]", source)
        return _pack_iterable(samples, destination, options, store, report)
    packing = Packing.begin(chosen, destination, options, store)
    return packing.run(crew or ThreadCrew(), report)


def _source(
    source: Uri | Dataset | Iterable[Mapping[str, Any]],
    options: PackOptions,
    store: StoreOptions | None,
) -> PackSource | None:
    """Return what can be packed by number; None for an iterable."""
    if isinstance(source, Dataset):
        return DatasetSource(source)
    if isinstance(source, str | Path):
        if str(source).lower().endswith((".csv", ".tsv")):
            return open_csv(source, store, options.file_column)
        return DatasetSource(open_dataset(source, store=store))
    if isinstance(source, list | tuple) and all(isinstance(s, str | Path) for s in source):
        return DatasetSource(open_dataset(source, store=store))
    return None


def _pack_iterable(
    samples: Iterable[Mapping[str, Any]],
    destination: str | Path,
    options: PackOptions,
    store: StoreOptions | None,
    report: Report | None,
) -> PackReport:
    if options.shuffle is not None:
        raise OptionError(
            "an iterable has no end to shuffle to; pack it first, then pack the result shuffled"
        )
    writer = Writer(
        destination,
        format=options.format,
        shard_size=options.shard_size,
        append=options.append,
        store=store,
    )
    with writer:
        for sample in islice(samples, options.limit):
            before = writer.num_shards
            writer.write(sample)
            if report is not None and writer.num_shards > before:
                done, number = writer.num_shards, writer.num_samples
                report(PackProgress(shards=0, shards_done=done, num_samples=number))
    assert writer.manifest is not None
    return report_of(str(destination), writer.manifest, writer.num_shards, 0)
