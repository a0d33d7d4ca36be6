"""Scanning the units of a data set: each is a piece of work of its own, kept when it is done.

What is found in a unit is kept as a file of its own until the version is committed, so a build that
was killed, here or on a worker, goes on where it stopped. One machine keeps these files in the
user's cache; workers elsewhere keep them in the store of the index, where all of them and the one
who commits can see them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from penstock.dataset.build_merge import MergeOutline, Piece, held_piece, outline_of
from penstock.dataset.catalog import FOLDER, Catalog, cache_folder
from penstock.dataset.columns import parse_columns
from penstock.dataset.formats.base import Format, Unit
from penstock.dataset.magic import what_else
from penstock.dataset.part import Part, open_part, part_of, recomputed
from penstock.errors import (
    CorruptError,
    DatasetError,
    FormatError,
    NotFoundError,
    PenstockError,
)
from penstock.storage.base import ObjectInfo, Store
from penstock.storage.folder import FolderStore
from penstock.storage.folder_errors import store_error
from penstock.storage.keys import TEMPORARY_PREFIX
from penstock.storage.pool import ReadPool

_DELETES_AT_ONCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexRecipe:
    """What is indexed: everything a version depends on but the bytes."""

    store: Store
    objects: Sequence[ObjectInfo]
    """All objects there are now that belong to the format, sorted by key."""
    spec: str
    """Hash of the names that were asked for."""
    format: Format
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkFolder:
    """Where the parts of units, or of packed shards, are kept until a version is committed."""

    store: Store
    prefix: str

    def key(self, name: str) -> str:
        """Return where the part of a unit is kept."""
        return f"{self.prefix}{name}.idx"

    def keep(self, name: str, part: Part) -> None:
        """Keep the part of a unit: visible when it is whole."""
        if isinstance(self.store, FolderStore):
            path = self.store.path_of(self.key(name))
            size_bytes = sum(column.nbytes for column in part.columns.values())
            with store_error(str(path), needed_bytes=size_bytes):
                path.parent.mkdir(parents=True, exist_ok=True)
                part.save(path)
        else:
            self.store.write(self.key(name), part.as_bytes())

    def part(self, name: str) -> Part:
        """Return the part of a unit, or raise `NotFoundError`, or `CorruptError`."""
        key = self.key(name)
        where = self.store.uri + key
        if isinstance(self.store, FolderStore):
            part = open_part(self.store.path_of(key))
        else:
            part = part_of(parse_columns(self.store.read(key), where), where)
        if recomputed(part) != part.fingerprint:
            raise CorruptError(f"{where} is damaged: its columns do not give its fingerprint")
        return part

    def clear(self, names: Sequence[str]) -> None:
        """Remove what was kept, and what killed builds left.

        Another build may be at work on the same units, so a file that is not there is no error.
        """
        with suppress(OSError, PenstockError):
            if isinstance(self.store, FolderStore):
                _clear_folder(self.store.path_of(self.prefix + "x").parent, names)
            else:
                with ReadPool(_DELETES_AT_ONCE) as pool:
                    for _ in pool.map_unordered(self.store.delete, map(self.key, names)):
                        pass


def _clear_folder(folder: Path, names: Sequence[str]) -> None:
    paths = [folder / f"{name}.idx" for name in names]
    used = min(p.stat().st_mtime for p in paths)
    left = [p for p in folder.glob(f"{TEMPORARY_PREFIX}*") if p.stat().st_mtime < used]
    for path in paths + left:
        path.unlink(missing_ok=True)
    folder.rmdir()


def work_here(recipe: IndexRecipe) -> WorkFolder:
    """Return the place that one machine uses: a folder in the user's cache."""
    what = [recipe.store.uri, recipe.format.name, dict(recipe.options)]
    name = xxhash.xxh3_128_hexdigest(msgspec.json.encode(what, order="sorted"))
    return WorkFolder(store=FolderStore(cache_folder() / "work" / name), prefix="")


def work_shared(catalog: Catalog) -> WorkFolder:
    """Return the place that many machines use: in the store of the index, beside its catalog."""
    # Not inside the catalog, where everybody who looks for versions would have to list it.
    name = catalog.prefix.rstrip("/").rpartition("/")[2]
    return WorkFolder(store=catalog.store, prefix=f"{FOLDER}/work/{name}/")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanJob:
    """What all units of a build share."""

    store: Store
    format: Format
    options: Mapping[str, Any]
    work: WorkFolder
    must_keep: bool
    """Whether a part that cannot be kept is an error; else it is held in memory, and only scanned
    again if this process dies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedUnit:
    """The index of one unit, or of one packed shard: its outline, and where the rest is."""

    number: int
    name: str
    """Of its part in the work folder."""
    outline: MergeOutline
    held: Part | None = None
    """The part itself where it is not read from the work folder."""
    is_reused: bool = False
    """Whether an earlier run had made it."""

    def piece(self, work: WorkFolder) -> Piece:
        """Return the part as something to be merged."""
        return partial(_kept, work, self.name) if self.held is None else held_piece(self.held)


def _kept(work: WorkFolder, name: str) -> Part:
    try:
        return work.part(name)
    except NotFoundError as error:
        raise NotFoundError(
            f"{error}; it was written, but is not seen from here. All nodes must see one folder: "
            "put the data set, or PENSTOCK_CACHE where that is read-only, on one that they share",
            uri=error.uri,
        ) from None


def scan_unit(job: ScanJob, numbered: tuple[int, Unit]) -> IndexedUnit:
    """Find the samples of one unit, or find that it was done before."""
    number, unit = numbered
    name, held = unit_name(unit), None
    try:
        part = job.work.part(name)
    except (NotFoundError, FormatError, CorruptError):  # Or made by another Penstock.
        part = _scanned(job, unit)
        try:
            job.work.keep(name, part)
        except PenstockError:
            if job.must_keep:
                raise
            held = part
    return IndexedUnit(number=number, name=name, outline=outline_of(part, number), held=held)


def _scanned(job: ScanJob, unit: Unit) -> Part:
    """Scan a unit. Where an object is not of the kind that its name promises, the error says so."""
    info = unit.objects[0]
    try:
        part = job.format.scan(unit, job.store, job.options)
    except DatasetError as error:
        what = what_else(job.store, info, job.format.name)
        if what:
            raise FormatError(what) from error
        raise
    # A text shorter than the first header of a tar is read as an empty tar, without any error.
    what = what_else(job.store, info, job.format.name) if part.num_samples == 0 else ""
    if what and info.size_bytes:
        raise FormatError(what)
    return part


def unit_name(unit: Unit) -> str:
    """Return a name for a unit as it is now."""
    digest = xxhash.xxh3_128(msgspec.json.encode(unit.note, order="sorted"))
    for o in unit.objects:
        digest.update(o.key.encode("utf-8", "surrogateescape"))
        digest.update(f"\0{o.size_bytes} {o.etag} {o.mtime_ns}\0".encode())
    return digest.hexdigest()
