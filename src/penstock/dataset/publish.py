"""Where an index is written: beside the data for all to use, or in the user's cache."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

import msgspec

from penstock.dataset.build import Report, build
from penstock.dataset.catalog import Catalog, Manifest, cache_folder
from penstock.dataset.columns import map_file
from penstock.dataset.crew import Crew
from penstock.dataset.lookup import (
    ALL,
    FoundDataset,
    catalogs_at,
    is_default,
    latest_file,
    versions_of,
)
from penstock.dataset.writer_destination import refuse_unfinished
from penstock.errors import ExistsError, FormatError, StoreError
from penstock.storage.folder import FolderStore
from penstock.storage.passing import PassingStore
from penstock.units import show_bytes

_log = logging.getLogger("penstock.dataset")


def write_index(
    found: FoundDataset,
    *,
    rebuild: bool = False,
    beside: bool = True,
    report: Report | None = None,
    crew: Crew | None = None,
    passing: PassingStore | None = None,
) -> tuple[Catalog, Manifest]:
    """Build an index and store it beside the data, or in the user's cache where that is refused.

    Without `beside` the user has only opened the data: then nothing is written into a folder.
    Objects are read through `passing`, if it is given.
    """
    refuse_unfinished(found.store)
    there, own = catalogs_at(found.store, _name(found))
    recipe = found.recipe if passing is None else replace(found.recipe, store=passing)
    job = partial(build, recipe, rebuild=rebuild, report=report, crew=crew)
    if _goes_beside(found, there, own, is_asked=beside):
        try:
            if not rebuild:
                _publish(found, own, there)
            manifest = job(there)
            if not beside and found.store.source != "memory":
                _say_where(found, there, manifest)
            return there, manifest
        except (StoreError, OSError) as error:
            if isinstance(error, StoreError) and error.retryable:
                raise
            _log.info("the index cannot be stored at %s (%s)", there.uri, error)
    try:
        manifest = job(own, over=latest_file(there))
    except StoreError as error:
        if error.retryable or not error.uri.startswith(str(cache_folder())):
            raise
        raise type(error)(
            f"{error}. The index is kept there: set PENSTOCK_CACHE to a folder that you can write, "
            "or store it beside the data with `penstock index`",
            uri=error.uri,
        ) from None
    _log.info("the index of %s is kept in %s", found.store.uri, own.uri)
    return own, manifest


def _name(found: FoundDataset) -> str:
    """Return the catalog that a new version belongs into."""
    names = found.catalog_names
    if names[0] != ALL:
        return names[0]
    files = [f for c in catalogs_at(found.store, ALL) if (f := latest_file(c)) is not None]
    for file in files:
        try:
            if found.is_of(file.manifest()):
                return ALL
        except FormatError:
            return ALL if is_default(found) else names[-1]  # It cannot be read: it is replaced.
    return ALL if not files and is_default(found) else names[-1]


def _goes_beside(found: FoundDataset, there: Catalog, own: Catalog, *, is_asked: bool) -> bool:
    if not there.store.can_list:
        return False  # Plain http can be neither listed nor written.
    if is_asked:
        return True
    # A folder is not changed by opening it: other tools list it too. In an object store there are
    # no folders to be seen, and all nodes of a job would index the same objects.
    if isinstance(there.store, FolderStore):
        return False
    return bool(versions_of(there)) or not versions_of(own)


def _publish(found: FoundDataset, own: Catalog, there: Catalog) -> None:
    """Put the versions in the user's cache beside the data, if there are none yet."""
    numbers = versions_of(own)
    if not numbers or versions_of(there):
        return
    manifests = [m for number in numbers if (m := own.read(number)) is not None]
    if not all(found.is_of(m) and not m.replaces for m in manifests):
        return
    assert isinstance(own.store, FolderStore)
    for name in dict.fromkeys(ref.name for m in manifests for ref in m.parts):
        there.store.write(there.part_key(name), map_file(own.store.path_of(own.part_key(name))))
    for manifest in manifests:
        try:
            there.commit(msgspec.structs.replace(manifest, replaces=""))
        except ExistsError:
            return  # Another writer has begun a catalog there, and that one is continued.


def _say_where(found: FoundDataset, there: Catalog, manifest: Manifest) -> None:
    _log.warning(
        "%s was not indexed: its index (%s) now lies in %s, for all who open it; delete what is "
        "below that prefix to remove it",
        found.store.uri,
        show_bytes(sum(ref.size_bytes for ref in manifest.parts)),
        there.uri,
    )
