"""`open`: from a name to a data set, building the index where there is none yet.

An index lies beside its data (`.penstock/`) where that can be written, else in the user's cache
folder. A set that was indexed before opens without reading its data; its objects are compared with
the listing, so that a changed one is named rather than misread.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from penstock.dataset.bound import Decoders
from penstock.dataset.build import Recipe, Report, build
from penstock.dataset.build_changes import compare_with_store
from penstock.dataset.catalog import FOLDER, Catalog, Manifest, Origin, cache_folder
from penstock.dataset.crew import Crew
from penstock.dataset.dataset import Dataset
from penstock.dataset.formats import format_named, format_of
from penstock.dataset.formats.base import Format
from penstock.dataset.part import open_part
from penstock.dataset.writer_destination import refuse_unfinished
from penstock.errors import DatasetError, OptionError, StoreError
from penstock.storage.base import ObjectInfo, Store
from penstock.storage.folder import FolderStore
from penstock.storage.locate import Located, open_store, resolve
from penstock.storage.options import StoreOptions
from penstock.storage.passing import PassingStore, passing_to
from penstock.storage.places import split_uri
from penstock.storage.tier_sizes import Wish

_log = logging.getLogger("penstock.dataset")
_CHECKED_OBJECTS_MAX = 100_000
_EVERYTHING = "all"
"""Name of the catalog of a whole folder with the format's default options."""

_WILDCARDS = frozenset("*?[]{}")

Uri = str | Path | Sequence[str | Path]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A data set that was looked up: what lies there and where its versions are kept."""

    located: Located
    format: Format
    options: dict[str, Any]
    objects: list[ObjectInfo]
    """Those that belong to the format."""

    @property
    def recipe(self) -> Recipe:
        """What an index of it is built from."""
        return Recipe(
            store=self.located.store,
            objects=self.objects,
            format=self.format,
            options=self.options,
        )

    def catalogs(self) -> tuple[Catalog, Catalog]:
        """Return where versions may lie: beside the data, and in the user's cache."""
        what = [self.located.spec, self.format.name, self.options]
        name = xxhash.xxh3_64_hexdigest(msgspec.json.encode(what, order="sorted"))
        if self.located.is_everything and not self.options:
            name = _EVERYTHING
        return _catalogs(self.located.store, name)


def _catalogs(store: Store, name: str) -> tuple[Catalog, Catalog]:
    where = xxhash.xxh3_128_hexdigest(store.uri.encode())
    kept = FolderStore(cache_folder() / "indexes" / where)
    return Catalog(store, f"{FOLDER}/{name}/"), Catalog(kept, f"{name}/")


def look_up(
    uri: Uri,
    *,
    format: str | None = None,
    store: StoreOptions | None = None,
    options: dict[str, Any] | None = None,
) -> Found:
    """Return what lies under a name, and in which format."""
    located = resolve(_plain(uri), store)
    chosen = format_of(located.objects) if format is None else format_named(format)
    unknown = set(options or {}) - chosen.options
    if unknown:
        known = ", ".join(sorted(chosen.options)) or "none"
        raise OptionError(f"{chosen.name} has no option {sorted(unknown)[0]!r}; it has: {known}")
    objects = [o for o in located.objects if chosen.name == "files" or chosen.claims(o.key)]
    if not objects:
        raise DatasetError(
            f"{located.store.uri}: none of {len(located.objects)} objects is {chosen.name} "
            f"(the first is {located.objects[0].key!r}); leave out format= to have it found"
        )
    return Found(located=located, format=chosen, options=dict(options or {}), objects=objects)


def _plain(uri: Uri) -> str | list[str]:
    return str(uri) if isinstance(uri, str | Path) else [str(u) for u in uri]


def open(
    uri: Uri,
    *,
    version: int | None = None,
    format: str | None = None,
    decoders: Decoders | None = None,
    store: StoreOptions | None = None,
    check: bool = True,
    report: Report | None = None,
    tiers: Sequence[Wish] | Wish = (),
    **options: Any,
) -> Dataset:
    """Return the data set under a name, as it lies there.

    Args:
        uri: a folder, prefix, glob, braces (`s3://b/x-{000..127}.tar`), a list of these, or an
        index. version: which version to read; the latest when not given. format: the format's name,
        where it is not plain from the names of the objects. decoders: functions from bytes to a
        value, by field name or extension; None leaves bytes. store: endpoint, credentials and the
        like, where the environment does not say. check: compare the objects with those that were
        indexed, and name what changed. report: called with progress while an index is built. tiers:
        those that the loader will be given; what is read of a remote set while an index is built is
        kept for them, instead of being read again.
        options: of the format, such as `sequence_length` for token arrays.
    """
    direct = _open_index(uri, decoders, store)
    if direct is not None:
        return direct
    ready = None if options else _ready(uri, version, format, store)
    if ready is not None and not (check and ready.num_objects <= _CHECKED_OBJECTS_MAX):
        return ready.dataset(decoders)
    found = look_up(uri, format=format, store=store, options=options)
    for catalog in found.catalogs():
        is_known = ready is not None and ready.origin.catalog.uri == catalog.uri
        manifest = ready.origin.manifest if ready and is_known else _read(catalog, version)
        if manifest is not None:
            dataset = _dataset(found.located.store, catalog, manifest, decoders)
            if check and len(found.objects) <= _CHECKED_OBJECTS_MAX:
                _check(found, dataset, is_latest=version is None)
            return dataset
    if version is not None:
        raise OptionError(f"{found.located.store.uri} is not indexed yet: no version {version}")
    wishes = tiers if isinstance(tiers, Sequence) else [tiers]
    passing = passing_to(wishes, found.located.store, found.objects)
    catalog, manifest = write_index(found, report=report, passing=passing)
    dataset = _dataset(found.located.store, catalog, manifest, decoders)
    dataset.passed = None if passing is None else passing.passed
    return dataset


def _read(catalog: Catalog, version: int | None) -> Manifest | None:
    """Return a version if this catalog has any at all; one that cannot be read has none."""
    try:
        return catalog.read(version) if version is None or catalog.versions() else None
    except StoreError as error:
        _log.info("no index at %s: %s", catalog.uri, error)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    """A version that was found without looking at the objects."""

    store: Store
    origin: Origin

    @property
    def num_objects(self) -> int:
        return self.origin.manifest.num_objects

    def dataset(self, decoders: Decoders | None) -> Dataset:
        return _dataset(self.store, self.origin.catalog, self.origin.manifest, decoders)


def _ready(
    uri: Uri, version: int | None, format: str | None, options: StoreOptions | None
) -> _Ready | None:
    """Return the version of a whole folder, if it is indexed.

    To list a hundred thousand objects takes a hundred requests, on every rank; a version takes two,
    however large the set. It is also found before the listing, and so names nothing that a listing
    has missed.
    """
    if not isinstance(uri, str | Path) or _WILDCARDS & set(str(uri)):
        return None
    place = split_uri(str(uri))
    if place.scheme in ("http", "https") or (place.scheme == "memory" and place.path):
        return None
    store = open_store(f"{str(uri).rstrip('/')}/", options)
    for catalog in _catalogs(store, _EVERYTHING):
        manifest = _read(catalog, version)
        if manifest is not None:
            is_wanted = format in (None, manifest.format)
            origin = Origin(catalog=catalog, manifest=manifest)
            return _Ready(store=store, origin=origin) if is_wanted else None
    return None


def _dataset(
    store: Store, catalog: Catalog, manifest: Manifest, decoders: Decoders | None
) -> Dataset:
    return Dataset(
        store=store,
        parts=[catalog.part(ref) for ref in manifest.parts],
        decoders=decoders,
        version=manifest.version,
        origin=Origin(catalog=catalog, manifest=manifest),
    )


def _check(found: Found, dataset: Dataset, *, is_latest: bool) -> None:
    units = found.format.units(found.objects, found.located.store, found.options)
    listed = [o for u in units for o in u.objects]
    changes = compare_with_store(dataset.parts, listed, found.located.store)
    changes.refuse(
        dataset.uri,
        "Index it again with `penstock index --rebuild`; if it is a copy with new times, pass "
        "check=False (`cp -a` keeps them)",
    )
    if changes.new and is_latest:
        _log.warning(
            "%s has %d objects that version %d does not know, the first is %s; "
            "`penstock index` makes a new version with them",
            dataset.uri,
            len(changes.new),
            dataset.version,
            changes.new[0].key,
        )


def write_index(
    found: Found,
    *,
    rebuild: bool = False,
    report: Report | None = None,
    crew: Crew | None = None,
    passing: PassingStore | None = None,
) -> tuple[Catalog, Manifest]:
    """Build an index and store it beside the data, or in the user's cache where that is refused.

    Objects are read through `passing`, if it is given.
    """
    refuse_unfinished(found.located.store)
    recipe = found.recipe if passing is None else replace(found.recipe, store=passing)
    beside, kept = found.catalogs()
    # `open` looks beside the data first, so that is where versions go on once there are any. Plain
    # http can be neither listed nor written.
    if beside.store.can_list and (_has_versions(beside) or not _has_versions(kept)):
        try:
            return beside, build(recipe, beside, rebuild=rebuild, report=report, crew=crew)
        except (StoreError, OSError) as error:
            if isinstance(error, StoreError) and error.retryable:
                raise
            _log.info("the index cannot be stored at %s (%s)", beside.uri, error)
    manifest = build(recipe, kept, rebuild=rebuild, report=report, crew=crew)
    _log.info("the index of %s is kept in %s", found.located.store.uri, kept.uri)
    return kept, manifest


def _has_versions(catalog: Catalog) -> bool:
    try:
        return bool(catalog.versions())
    except StoreError:
        return False


def _open_index(
    uri: Uri, decoders: Decoders | None, options: StoreOptions | None
) -> Dataset | None:
    """Return the data set of an index that is named itself: a part's file, or a version."""
    if not isinstance(uri, str | Path) or not str(uri).endswith((".idx", ".json")):
        return None
    text = str(uri)
    root, inside, rest = text.partition(f"/{FOLDER}/")
    if inside and text.endswith(".json"):
        store = open_store(root + "/", options)
        name, _, number = rest.rpartition("/v")
        catalog = Catalog(store, f"{FOLDER}/{name}/")
        manifest = catalog.read(int(number.removesuffix(".json")))
        assert manifest is not None
        return _dataset(store, catalog, manifest, decoders)
    if text.endswith(".idx"):
        path = Path(text.removeprefix("file://")).expanduser()
        data_root = Path(root) if inside else path.parent
        return Dataset(store=FolderStore(data_root), parts=[open_part(path)], decoders=decoders)
    return None
