"""An index that was copied together with its data: the same samples, with other marks.

A part holds the mark (etag or time) of each object, and readers compare it with what lies there. A
copy has other marks. The index says where the data lay when it was indexed, so a copy is
recognised: it is accepted if all sizes agree, and if its content agrees where the index has
checksums. Then the part is written anew with the marks of the copy, to the user's cache, and a
*note* records which part replaces which. The fingerprint stays the same, because it does not
include marks.

Where the data was indexed, other marks mean that a file was rewritten. There a part is only taken
with new marks if all that was rewritten has checksums and is read again, which is done if it is
little.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from penstock.dataset.bound import BoundPart
from penstock.dataset.build_changes import Changes, compare_with_store
from penstock.dataset.catalog import Catalog, Manifest, PartRef, cache_folder
from penstock.dataset.checks import has_checksums
from penstock.dataset.columns import Columns, text_columns
from penstock.dataset.part import Ints, Part, part_of
from penstock.errors import ChangedError, CorruptError, DatasetError, PenstockError, StoreError
from penstock.storage.base import ObjectInfo, Store
from penstock.storage.folder import FolderStore
from penstock.storage.pool import ReadPool

_log = logging.getLogger("penstock.dataset")

_SAMPLES_READ = 64
"""Samples of a copy that are compared with their checksums, evenly spread over each part."""
_SAMPLES_EACH = 100
"""In an object store, at most one in this many samples is read."""
_REREAD_BYTES_MAX = 64 << 20
"""Rewritten objects up to this size are read again to see whether they are what they were."""
_READS_AT_ONCE = 16

REBUILD = (
    "Data sets are immutable: index it again with penstock.open(..., rebuild=True) or "
    "`penstock index --rebuild`"
)

Listing = Callable[[], Sequence[ObjectInfo]]


def open_parts(
    store: Store,
    catalog: Catalog,
    manifest: Manifest,
    listing: Listing | None = None,
    *,
    verified: bool = True,
) -> list[Part]:
    """Return the parts of a version, with the marks that its objects have at `store`.

    `listing` gives the objects that lie there; without it they are listed when needed. A damaged
    part is returned as it is if parts need not be `verified`.
    """
    out = []
    for ref in manifest.parts:
        try:
            out.append(open_part_at(store, catalog, ref, listing))
        except DatasetError:
            if verified:
                raise
            out.append(catalog.part_unverified(ref))
    return out


def open_part_at(
    store: Store, catalog: Catalog, ref: PartRef, listing: Listing | None = None
) -> Part:
    """Return a part of a version, with the marks that its objects have at `store`."""
    noted = _noted(_note_path(store, ref))
    if noted is not None and noted.name != ref.name:
        try:
            return _parts_here().part(noted)
        except PenstockError as error:
            _log.warning("a part with the marks of %s is made anew: %s", store.uri, error)
    part = catalog.part(ref)
    if ref.uri in ("", store.uri) or (noted is not None and noted.name == ref.name):
        return part
    objects = listing() if listing is not None else _listed(store)
    changes = compare_with_store([part], objects, store)
    refuse_other_sizes(changes, store.uri)
    part = _marked(part, changes)  # Reads of the check compare marks as well.
    _check_copy(store, part, ref, changes)
    return _kept(store, part, ref, changes)


def _listed(store: Store) -> list[ObjectInfo]:
    return list(store.list()) if store.can_list else []


def refuse_other_sizes(changes: Changes, uri: str) -> None:
    """Raise if objects are gone or have another size: no copy has."""
    is_other = any(was.size_bytes != now.size_bytes for was, now in changes.changed)
    if is_other or changes.gone:
        changes.refuse(uri, REBUILD)


def _check_copy(store: Store, part: Part, ref: PartRef, changes: Changes) -> None:
    """Raise if a copy does not hold what was indexed, as far as can be seen by a few reads."""
    if not changes.changed:
        return
    bound = BoundPart(store=store, part=part, first=0, decoders={})
    if not has_checksums(bound):
        _log.warning(
            "%s is a copy of %s: %d objects have the sizes that were indexed and other marks; "
            "there are no checksums, so only sizes were compared (penstock.open(..., rebuild=True) "
            "indexes it anew)",
            store.uri,
            ref.uri,
            len(changes.changed),
        )
        return
    count = _SAMPLES_READ
    if store.source != "folder":
        # Every rank may be the first to open a copy, so all ranks together must read little of it.
        count = max(1, min(count, part.num_samples // _SAMPLES_EACH))
    ids = np.unique(np.linspace(0, part.num_samples - 1, count).astype(np.int64))
    try:
        _read_all(bound, ids)
    except CorruptError as error:
        raise ChangedError(
            f"{store.uri} is not a copy of {ref.uri}, where it was indexed: {error}. {REBUILD}"
        ) from error


def _read_all(bound: BoundPart, ids: Ints) -> None:
    """Read samples and compare them with their checksums."""
    with ReadPool(_READS_AT_ONCE) as pool:
        for _ in pool.map_unordered(lambda i: bound.read_sample(0, i), ids.tolist()):
            pass


def settled(
    store: Store, manifest: Manifest, parts: Sequence[Part], objects: Sequence[ObjectInfo]
) -> tuple[list[Part], tuple[ObjectInfo, ...]]:
    """Return parts of which no object changed, and the objects that they do not know.

    Objects with other marks where they were indexed are read again if that is little and all of
    their samples have checksums; if these agree, the part is taken with the new marks. Otherwise
    this raises `ChangedError`.
    """
    changes = compare_with_store(parts, objects, store)
    if not (changes.changed or changes.gone):
        return list(parts), changes.new
    refuse_other_sizes(changes, store.uri)
    if sum(now.size_bytes for _, now in changes.changed) > _REREAD_BYTES_MAX:
        changes.refuse(store.uri, REBUILD)
    out = []
    for ref, part in zip(manifest.parts, parts, strict=True):
        own = replace(changes, changed=_of_part(part, changes))
        if own.changed:
            marked = _marked(part, own)
            if not _is_unchanged(store, marked, own):
                changes.refuse(store.uri, REBUILD)
            out.append(_kept(store, marked, ref, own))
        else:
            out.append(part)
    return out, changes.new


def _of_part(part: Part, changes: Changes) -> tuple[tuple[ObjectInfo, ObjectInfo], ...]:
    keys = {table.key(n) for table in part.tables for n in range(table.num_objects)}
    return tuple((was, now) for was, now in changes.changed if was.key in keys)


def _is_unchanged(store: Store, part: Part, changes: Changes) -> bool:
    """Return whether all samples of rewritten objects are what they were."""
    bound = BoundPart(store=store, part=part, first=0, decoders={})
    if not has_checksums(bound):
        return False
    try:
        _read_all(bound, _samples_in(part, {was.key for was, _ in changes.changed}))
    except (CorruptError, ChangedError, StoreError):
        return False
    return True


def _samples_in(part: Part, keys: set[str]) -> Ints:
    (table,) = part.tables
    first = table.first_sample
    numbers = [n for n in range(table.num_objects) if table.key(n) in keys]
    runs = [np.arange(first[n], first[n + 1]) for n in numbers]
    return np.concatenate([np.zeros(0, np.int64), *runs])


def _kept(store: Store, part: Part, ref: PartRef, changes: Changes) -> Part:
    """Return a part that has the marks of the objects as they are now, and remember it."""
    try:
        own = _parts_here().add_part(part, ref.uri) if changes.changed else ref
        note = _note_path(store, ref)
        FolderStore(note.parent).write(note.name, msgspec.json.encode(own))
    except StoreError as error:
        # The next to open the copy checks it again, which costs nothing but time.
        _log.info("the marks of %s cannot be kept: %s", store.uri, error)
    return part


def _marked(part: Part, changes: Changes) -> Part:
    """Return the same part with the marks of the objects as they are now."""
    if not changes.changed:
        return part
    now = {info.key: info for _, info in changes.changed}
    arrays = dict(part.columns)
    for number, table in enumerate(part.tables):
        infos = [table.info(n) for n in range(table.num_objects)]
        infos = [now.get(info.key, info) for info in infos]
        arrays |= text_columns(f"t{number}.object.etag", [i.etag for i in infos])
        arrays[f"t{number}.object.mtime_ns"] = np.array([i.mtime_ns for i in infos], np.int64)
    return part_of(Columns(arrays, part.columns.meta))


def _note_path(store: Store, ref: PartRef) -> Path:
    """Return the file, in the user's cache, that says which part stands in for `ref` at a store."""
    where = f"{store.uri}\0{ref.name}".encode("utf-8", "surrogateescape")
    return cache_folder() / "moved" / f"{xxhash.xxh3_128_hexdigest(where)}.json"


def _noted(path: Path) -> PartRef | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=PartRef)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        _log.warning("%s cannot be used (%s) and is made anew", path, error)
        return None


def _parts_here() -> Catalog:
    """Return the user's cache as a place of parts: they lie where copies of remote ones lie."""
    return Catalog(FolderStore(cache_folder()), "")
