"""From what was asked for to where its versions lie.

A data set is the names that were asked for, whole and in order, with the format and its options.
Each has a *catalog* named by the hash of all three; a whole folder in its own format, without
options, has the catalog `all`, where writers put theirs. A catalog lies beside the data or in the
user's cache. Whatever lies there, a version is only taken if its manifest says that it is of the
data set that was asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import xxhash

from penstock.dataset.build import IndexRecipe
from penstock.dataset.catalog import (
    EVERYTHING_SPEC,
    FOLDER,
    Catalog,
    Manifest,
    Origin,
    VersionFile,
    cache_folder,
    catalog_name,
    spec_of,
)
from penstock.dataset.formats import format_named, format_of
from penstock.dataset.formats.base import Format
from penstock.errors import DatasetError, FormatError, OptionError, StoreError
from penstock.storage.base import ObjectInfo, Store
from penstock.storage.folder import FolderStore
from penstock.storage.locate import Located, resolve
from penstock.storage.options import StoreOptions

_log = logging.getLogger("penstock.dataset")

ALL = "all"
"""Name of the catalog of a whole folder with the format's default options."""

T = TypeVar("T")
Wanted = Callable[[Manifest], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDataset:
    """A data set that was looked up: what lies there and where its versions are kept."""

    located: Located
    format: Format
    options: dict[str, Any]
    objects: list[ObjectInfo]
    """Those that belong to the format."""

    @property
    def store(self) -> Store:
        """Where the objects lie."""
        return self.located.store

    @property
    def spec(self) -> str:
        """Hash of the names that were asked for."""
        return spec_of(self.located.names)

    @property
    def recipe(self) -> IndexRecipe:
        """What an index of it is built from."""
        return IndexRecipe(
            store=self.located.store,
            objects=self.objects,
            spec=self.spec,
            format=self.format,
            options=self.options,
        )

    @property
    def catalog_names(self) -> list[str]:
        """The catalogs that its versions may lie in, the first to look into first."""
        own = catalog_name(self.spec, self.format.name, self.options)
        return [ALL, own] if self.located.is_everything else [own]

    def is_of(self, manifest: Manifest) -> bool:
        """Return whether a version is one of this data set."""
        return manifest.is_of(self.spec, self.format.name, self.options)


def catalogs_at(store: Store, name: str) -> tuple[Catalog, Catalog]:
    """Return where versions may lie: beside the data, and in the user's cache."""
    where = xxhash.xxh3_128_hexdigest(store.uri.encode("utf-8", "surrogateescape"))
    kept = FolderStore(cache_folder() / "indexes" / where)
    return Catalog(store, f"{FOLDER}/{name}/"), Catalog(kept, f"{name}/")


def look_up(
    uri: Any,
    *,
    format: str | None = None,
    store: StoreOptions | None = None,
    options: dict[str, Any] | None = None,
) -> FoundDataset:
    """Return what lies under a name, and in which format.

    A folder that is indexed has the format of its index, where none is named: it does not change
    when other files are put there.
    """
    located = resolve(uri, store)
    known = None
    if located.is_everything and not options:
        # A damaged index is an error only where it is read; here it may be about to be replaced.
        with suppress(FormatError):
            known = version_at(located.store, ALL, lambda m: m.is_of(EVERYTHING_SPEC, format, None))
    return found_in(located, format, options, known.manifest if known else None)


def found_in(
    located: Located,
    format: str | None,
    options: dict[str, Any] | None,
    known: Manifest | None = None,
) -> FoundDataset:
    """Return what was found, in the format that was named, or that its index has, or its own."""
    if known is not None and not is_usable(known, located, format):
        known = None
    if format is not None:
        chosen = format_named(format)
    else:
        chosen = format_named(known.format) if known else format_of(located.objects)
    unknown = set(options or {}) - chosen.options
    if unknown:
        names = ", ".join(sorted(chosen.options)) or "none"
        raise OptionError(f"{chosen.name} has no option {sorted(unknown)[0]!r}; it has: {names}")
    objects = [o for o in located.objects if chosen.name == "files" or chosen.claims(o.key)]
    if not objects:
        raise DatasetError(
            f"{located.store.uri}: none of {len(located.objects)} objects is {chosen.name} "
            f"(the first is {located.objects[0].key!r}); leave out format= to have it found"
        )
    given = dict(options or (known.options if known else {}))
    return FoundDataset(located=located, format=chosen, options=given, objects=objects)


def is_usable(manifest: Manifest, located: Located, format: str | None) -> bool:
    """Return whether a version of a whole folder says what the folder is.

    A version of an older Penstock may have a format that a user once named, for that one time.
    """
    is_recorded = bool(manifest.spec) or format is not None
    return is_recorded or manifest.format == format_of(located.objects).name


def is_default(found: FoundDataset) -> bool:
    """Return whether this is what a whole folder is without a word about format and options."""
    plain = found.located.is_everything and not found.options
    return plain and format_of(found.located.objects).name == found.format.name


def indexed(found: FoundDataset, version: int | None = None) -> Origin | None:
    """Return a version of a data set that is there already, the latest unless one is named."""
    for name in found.catalog_names:
        origin = version_at(found.store, name, found.is_of, version)
        if origin is not None:
            return origin
    return None


def version_at(
    store: Store, name: str, wanted: Wanted, version: int | None = None
) -> Origin | None:
    """Return a version in the catalogs of a name, if it is of the data set that is wanted.

    The one beside the data is taken first, unless one in the user's cache was made to replace it.
    """
    beside, kept = catalogs_at(store, name)
    if version is not None:
        for catalog in (beside, kept):
            manifest = catalog.read(version) if version in versions_of(catalog) else None
            if manifest is not None and wanted(manifest):
                return Origin(catalog=catalog, manifest=manifest)
        return None
    there, own = latest_file(beside), latest_file(kept)
    mine = own.manifest() if own is not None else None
    if mine is not None and not wanted(mine):
        mine = None
    if there is not None and not (mine is not None and mine.replaces == there.digest):
        manifest = there.manifest()
        if wanted(manifest):
            return Origin(catalog=beside, manifest=manifest)
    return None if mine is None else Origin(catalog=kept, manifest=mine)


def latest_file(catalog: Catalog) -> VersionFile | None:
    """Return the file of the latest version, if this catalog can be read and has any."""
    return _if_readable(catalog, catalog.record)


def versions_of(catalog: Catalog) -> list[int]:
    """Return the numbers of all versions; none where the catalog cannot be read."""
    return _if_readable(catalog, catalog.versions) or []


def _if_readable(catalog: Catalog, read: Callable[[], T]) -> T | None:
    try:
        return read()
    except StoreError as error:
        if error.retryable:
            raise  # A store that is overloaded has not lost its index.
        _log.info("no index at %s: %s", catalog.uri, error)
        return None


def versions_there(found: FoundDataset) -> list[int]:
    """Return the numbers of all versions of a data set, wherever they lie."""
    catalogs = [c for name in found.catalog_names for c in catalogs_at(found.store, name)]
    pairs = [(c, v) for c in catalogs for v in versions_of(c)]
    return sorted({v for c, v in pairs if (m := c.read(v)) is not None and found.is_of(m)})
