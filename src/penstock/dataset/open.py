"""`open`: from a name to a data set, building the index where there is none yet.

An index that lies beside its data (`.penstock/`) is used first. One that `open` builds goes to the
user's cache if the data lies in a folder, where other tools would find a new name among their
files, and beside the data in an object store, where all nodes of a job share it. A set that was
indexed before opens without reading its data; its objects are compared with the listing, so that a
changed one is named rather than misread.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any, ParamSpec

from penstock.arguments import count_of
from penstock.dataset.bound import Decoders, checked_decoders
from penstock.dataset.build import Report
from penstock.dataset.catalog import EVERYTHING_SPEC, FOLDER, Catalog, Manifest, Origin
from penstock.dataset.catalog import stamp_folder as stamps
from penstock.dataset.dataset import Dataset
from penstock.dataset.formats.parser_process import in_this_process
from penstock.dataset.lookup import (
    ALL,
    FoundDataset,
    found_in,
    indexed,
    is_usable,
    look_up,
    version_at,
    versions_there,
)
from penstock.dataset.moved import open_parts, settled
from penstock.dataset.part import Part
from penstock.dataset.part_files import open_verified
from penstock.dataset.publish import write_index
from penstock.errors import OptionError
from penstock.storage.base import Store
from penstock.storage.folder import FolderStore
from penstock.storage.keys import is_hash
from penstock.storage.locate import open_store, resolve
from penstock.storage.options import StoreOptions
from penstock.storage.passing import passing_to
from penstock.storage.tier_sizes import Wish
from penstock.storage.uris import split_uri

__all__ = ["FoundDataset", "Uri", "look_up", "open", "open_unverified", "write_index"]

_log = logging.getLogger("penstock.dataset")
_CHECKED_OBJECTS_MAX = 100_000
_WILDCARDS = frozenset("*?[]{}")
_VERSION = re.compile(r"(.+)/v(\d{1,12})\.json")

Uri = str | Path | Sequence[str | Path]


P = ParamSpec("P")


def _timed(call: Callable[P, Dataset]) -> Callable[P, Dataset]:
    """Have a data set remember when it was opened: the trace of a loader begins with that."""

    @wraps(call)
    def opened(*args: P.args, **kwargs: P.kwargs) -> Dataset:
        begin_ns = time.perf_counter_ns()
        dataset = call(*args, **kwargs)
        dataset.opened_ns = begin_ns, time.perf_counter_ns()
        return dataset

    return opened


@_timed
def open(
    uri: Uri,
    *,
    version: int | None = None,
    format: str | None = None,
    decoders: Decoders | None = None,
    store: StoreOptions | None = None,
    check: bool = True,
    rebuild: bool = False,
    report: Report | None = None,
    tiers: Sequence[Wish] | Wish = (),
    **options: Any,
) -> Dataset:
    """Return the data set under a name, as it lies there.

    Args:
        uri: a folder, prefix, glob, braces (`s3://b/x-{000..127}.tar`), a list of these, or an
            index.
        version: which version to read; the latest when not given.
        format: the format's name, where it is not plain from the names of the objects.
        decoders: functions from bytes to a value, by field name or extension; None leaves bytes.
        store: endpoint, credentials and the like, where the environment does not say.
        check: compare the objects with those that were indexed, and name what changed.
        rebuild: build the index from scratch, whatever is there.
        report: called with progress while an index is built.
        tiers: those that the loader will be given. What is read of a remote set while an index is
            built is kept for them, instead of being read again.
        options: of the format, such as `sequence_length` for token arrays.
    """
    version = _checked_version(version, rebuild=rebuild)
    uri = list(uri) if isinstance(uri, Iterable) and not isinstance(uri, str | bytes) else uri
    if names_index(uri):
        if version is not None or format is not None or rebuild or options:
            raise OptionError(f"{uri} is an index itself: leave out version, format and options")
        return _open_index(str(uri), decoders, store)
    ready = None if options or rebuild else _ready(uri, version, format, store)
    if ready and not (check and ready[1].manifest.num_objects <= _CHECKED_OBJECTS_MAX):
        return _dataset(*ready, decoders)
    if ready is None:
        found = look_up(uri, format=format, store=store, options=options)
    else:
        found = found_in(resolve(uri, store), format, None, ready[1].manifest)
    if rebuild:
        return _built(found, decoders, report, tiers, rebuild=True)
    origin = _ready_again(ready, found, format) or indexed(found, version)
    if origin is not None:
        dataset = _dataset(found.store, origin, decoders, found)
        is_checked = check and len(found.objects) <= _CHECKED_OBJECTS_MAX
        return _checked(found, dataset, is_latest=version is None) if is_checked else dataset
    if version is not None:
        have = versions_there(found)
        known = f"it has: {', '.join(map(str, have))}" if have else "it is not indexed yet"
        raise OptionError(f"{found.store.uri} has no version {version}; {known}")
    return _built(found, decoders, report, tiers, rebuild=False)


def _checked_version(version: Any, *, rebuild: bool) -> int | None:
    if version is None:
        return None
    if rebuild:
        raise OptionError("rebuild=True makes a new version of what lies there; leave out version=")
    return count_of("version", version, hint="versions are numbered from 1")


def _built(
    found: FoundDataset,
    decoders: Decoders | None,
    report: Report | None,
    tiers: Sequence[Wish] | Wish,
    *,
    rebuild: bool,
) -> Dataset:
    wishes = tiers if isinstance(tiers, Sequence) else [tiers]
    passing = passing_to(wishes, found.store, found.objects)
    catalog, manifest = write_index(
        found, rebuild=rebuild, beside=False, report=report, passing=passing
    )
    origin = Origin(catalog=catalog, manifest=manifest)
    dataset = _dataset(found.store, origin, decoders, found)
    dataset.passed = None if passing is None else passing.passed
    return dataset


def _ready(
    uri: Any, version: int | None, format: str | None, options: StoreOptions | None
) -> tuple[Store, Origin] | None:
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
    wanted = partial(Manifest.is_of, spec=EVERYTHING_SPEC, format=format, options=None)
    origin = version_at(store, ALL, wanted, version)
    return None if origin is None else (store, origin)


def _ready_again(
    ready: tuple[Store, Origin] | None, found: FoundDataset, format: str | None
) -> Origin | None:
    """Return the version that was found without a listing, if it fits what the listing shows."""
    if ready is None or not found.located.is_everything or ready[0].uri != found.store.uri:
        return None
    manifest = ready[1].manifest
    return (
        ready[1] if is_usable(manifest, found.located, format) and found.is_of(manifest) else None
    )


def _dataset(
    store: Store,
    origin: Origin,
    decoders: Decoders | None,
    found: FoundDataset | None = None,
    parts: Sequence[Part] | None = None,
) -> Dataset:
    if parts is None:
        listing = (lambda: found.objects) if found is not None else None
        parts = open_parts(store, origin.catalog, origin.manifest, listing)
    return Dataset(
        store=store,
        parts=parts,
        decoders=checked_decoders(decoders, parts, store.uri),
        version=origin.manifest.version,
        origin=origin,
    )


def _checked(found: FoundDataset, dataset: Dataset, *, is_latest: bool) -> Dataset:
    """Return the data set if its objects are those that were indexed, or raise `ChangedError`."""
    origin = dataset.origin
    assert origin is not None
    format = in_this_process(found.format)
    units = format.units(found.objects, found.store, found.options)
    listed = [o for u in units for o in u.objects]
    parts, new = settled(found.store, origin.manifest, dataset.parts, listed)
    if new and is_latest:
        _log.warning(
            "%s has %d objects that version %d does not know, the first is %s; "
            "`penstock index` makes a new version with them",
            dataset.uri,
            len(new),
            dataset.version,
            new[0].key,
        )
    return dataset.with_parts(parts)


def open_unverified(
    uri: Uri,
    *,
    version: int | None = None,
    store: StoreOptions | None = None,
    format: str | None = None,
    **options: Any,
) -> Dataset:
    """Return a data set whose index may be damaged, for `verify`, which says what is wrong."""
    if names_index(uri):
        return open(uri, store=store)
    found = look_up(uri, format=format, store=store, options=options)
    origin = indexed(found, version)
    if origin is None:
        return open(uri, version=version, store=store, format=format, check=False, **options)
    parts = open_parts(
        found.store, origin.catalog, origin.manifest, lambda: found.objects, verified=False
    )
    return _dataset(found.store, origin, None, parts=parts)


def names_index(uri: object) -> bool:
    """Return whether a name is that of an index or a version, not of data."""
    if not isinstance(uri, str | os.PathLike):
        return False
    text = str(uri)
    return text.endswith(".idx") or (text.endswith(".json") and f"/{FOLDER}/" in text)


def _open_index(text: str, decoders: Decoders | None, options: StoreOptions | None) -> Dataset:
    """Return the data set of an index that is named itself: a part's file, or a version."""
    root, inside, rest = text.partition(f"/{FOLDER}/")
    if text.endswith(".json"):
        named = _VERSION.fullmatch(rest)
        if named is None:
            raise OptionError(f"{text} is not a version of an index: those are named v000001.json")
        store = open_store(root + "/", options)
        catalog = Catalog(store, f"{FOLDER}/{named[1]}/")
        manifest = catalog.read(int(named[2]))
        assert manifest is not None
        return _dataset(store, Origin(catalog=catalog, manifest=manifest), decoders)
    place = split_uri(text)
    if place.scheme != "file":
        raise OptionError(
            f"{text}: a part of an index is opened from a folder; name the data set, or one of its "
            f"versions ({FOLDER}/all/v000001.json)"
        )
    path = Path(place.path)
    part = open_verified(path, path.stem if is_hash(path.stem) else None, stamps())
    data_root = Path(split_uri(root).path) if inside else path.parent
    chosen = checked_decoders(decoders, [part], text)
    return Dataset(store=FolderStore(data_root), parts=[part], decoders=chosen)
