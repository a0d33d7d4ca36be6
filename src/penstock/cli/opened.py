"""Opens data sets for verbs, with the place and the versions of the index.

`penstock.open` hides where an index lies, but `info` and `index` show it. So this module takes the
same steps one by one, and lists objects only once.
"""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass
from pathlib import Path

from penstock.cli.options import format_options_of, store_of, uri_of
from penstock.cli.progress import ProgressBar
from penstock.dataset.build import BuildProgress, Changes
from penstock.dataset.build_changes import compare_with_store
from penstock.dataset.catalog import Catalog, Manifest
from penstock.dataset.crew import Crew
from penstock.dataset.dataset import Dataset
from penstock.dataset.lookup import indexed as indexed_origin
from penstock.dataset.moved import open_parts
from penstock.dataset.open import FoundDataset, look_up, names_index, write_index
from penstock.dataset.open import open as open_dataset
from penstock.errors import OptionError

_log = logging.getLogger("penstock.cli")
_CHECKED_OBJECTS_MAX = 100_000
"""The most objects that are compared with the index: that takes a moment only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedDataset:
    """A data set and its index."""

    dataset: Dataset
    index_uri: str
    """The folder of its versions, or the index that the user named."""
    versions: list[int]
    """All versions; none for an index that the user named."""
    num_objects: int
    size_bytes: int
    """Bytes of the objects; samples may take fewer."""


def find(args: argparse.Namespace) -> FoundDataset:
    """Return the objects under the name that the user gave."""
    return look_up(
        uri_of(args), format=args.format, store=store_of(args), options=format_options_of(args)
    )


def indexed(found: FoundDataset, version: int | None = None) -> tuple[Catalog, Manifest] | None:
    """Return the existing index that `penstock.open` would use; None if there is none."""
    origin = indexed_origin(found, version)
    return None if origin is None else (origin.catalog, origin.manifest)


def build_index(
    found: FoundDataset, *, rebuild: bool = False, beside: bool = False, crew: Crew | None = None
) -> tuple[Catalog, Manifest]:
    """Build or update an index, `beside` the data if it may lie there, and show the progress."""
    with ProgressBar("indexing", "units") as progress:

        def report(state: BuildProgress) -> None:
            progress.update(
                state.units_done,
                state.units,
                samples=state.num_samples,
                size_bytes=state.size_bytes,
            )

        return write_index(found, rebuild=rebuild, beside=beside, report=report, crew=crew)


def changes_since(found: FoundDataset, catalog: Catalog, manifest: Manifest) -> Changes:
    """Return how the objects differ from those of an index; the format selects them."""
    recipe = found.recipe
    units = recipe.format.units(recipe.objects, recipe.store, recipe.options)
    parts = open_parts(recipe.store, catalog, manifest, lambda: found.objects)
    objects = [o for unit in units for o in unit.objects]
    return compare_with_store(parts, objects, recipe.store)


def open_named(args: argparse.Namespace, *, check: bool = True) -> OpenedDataset:
    """Open the data set that the user named; index it first if it has no index.

    With `check`, refuse objects that have changed since they were indexed.
    """
    if names_index(uri_of(args)):
        return _open_index(args)
    found = find(args)
    ready = indexed(found, args.version)
    if ready is None and args.version is not None:
        raise OptionError(
            f"{found.located.store.uri} is not indexed yet, so it has no version {args.version}; "
            "`penstock index` makes the first"
        )
    catalog, manifest = ready or build_index(found)
    if ready is not None and check and manifest.num_objects <= _CHECKED_OBJECTS_MAX:
        _check(found, catalog, manifest)
    return OpenedDataset(
        dataset=Dataset(
            store=found.located.store,
            # Without `check` nothing is refused: `verify` reports damage of the index itself.
            parts=open_parts(found.store, catalog, manifest, lambda: found.objects, verified=check),
            version=manifest.version,
        ),
        index_uri=catalog.uri,
        versions=catalog.versions(),
        num_objects=manifest.num_objects,
        size_bytes=manifest.size_bytes,
    )


def _check(found: FoundDataset, catalog: Catalog, manifest: Manifest) -> None:
    """Refuse objects that changed since they were indexed, and warn of new ones."""
    uri, changes = found.located.store.uri, changes_since(found, catalog, manifest)
    changes.refuse(uri, "Index it again with `penstock index --rebuild`")
    if changes.new:
        _log.warning(
            "%s has %d objects that version %d does not know, the first is %s; "
            "`penstock index` makes a new version with them",
            uri,
            len(changes.new),
            manifest.version,
            changes.new[0].key,
        )


def _open_index(args: argparse.Namespace) -> OpenedDataset:
    dataset = open_dataset(args.uri[0], store=store_of(args))
    tables = [table for part in dataset.parts for table in part.tables]
    return OpenedDataset(
        dataset=dataset,
        index_uri=args.uri[0],
        versions=[],
        num_objects=sum(t.num_objects for t in tables),
        size_bytes=sum(int(t.sizes.sum()) for t in tables),
    )


def show_place(uri: str) -> str:
    """Return a place as a person would type it: paths without `file://`, `~` for the home folder.

    >>> show_place("s3://bucket/train/"), show_place("file:///data/x/")
    ('s3://bucket/train/', '/data/x/')
    """
    if not uri.startswith("file://"):
        return uri
    path, home = uri.removeprefix("file://"), str(Path.home())
    return "~" + path.removeprefix(home) if path.startswith(home + "/") else path
