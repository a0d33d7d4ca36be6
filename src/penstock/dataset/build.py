"""Building an index: scan what is new, in parallel, and commit it as a version.

Each unit's result is kept in the user's cache until the version is committed, so a build that was
killed goes on where it stopped. What was indexed before is compared with what lies there now: a
changed object is named, new ones are appended as a new version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from penstock.dataset.catalog import Catalog, Manifest, cache_folder
from penstock.dataset.formats.base import Format, Unit
from penstock.dataset.part import Part, merge_parts, open_part
from penstock.errors import ChangedError, DatasetError, ExistsError, FormatError
from penstock.storage.base import ObjectInfo, Store
from penstock.storage.pool import Pool

_THREADS_LOCAL = 4
_THREADS_REMOTE = 16
_PARTS_MAX = 16
_COMMIT_TRIES_MAX = 8
_NAMED_MAX = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildProgress:
    """How far a build has come."""

    units_done: int
    units: int
    num_samples: int
    size_bytes: int


Report = Callable[[BuildProgress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What is indexed: everything a version depends on but the bytes."""

    store: Store
    objects: Sequence[ObjectInfo]
    """All objects there are now that belong to the format, sorted by key."""
    format: Format
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """How the objects that lie there differ from those that were indexed."""

    changed: tuple[tuple[ObjectInfo, ObjectInfo], ...]
    """Indexed and found, where they differ."""
    gone: tuple[ObjectInfo, ...]
    new: tuple[ObjectInfo, ...]

    def refuse(self, uri: str, way_out: str) -> None:
        """Raise an error that names what changed, if anything did."""
        lines = [
            f"{was.key} ({_mark(was)} when indexed, {_mark(now)} now)" for was, now in self.changed
        ]
        lines += [f"{o.key} (gone)" for o in self.gone]
        if lines:
            more = f" and {len(lines) - _NAMED_MAX} more" if len(lines) > _NAMED_MAX else ""
            verb = "object is" if len(lines) == 1 else "objects are"
            raise ChangedError(
                f"{uri}: {len(lines)} {verb} not what was indexed: "
                f"{'; '.join(lines[:_NAMED_MAX])}{more}. {way_out}"
            )


def _mark(info: ObjectInfo) -> str:
    when = datetime.fromtimestamp(info.mtime_ns / 1e9, UTC).isoformat(" ", "milliseconds")
    return f"{info.size_bytes} bytes, {info.etag or when}"


def _same(was: ObjectInfo, now: ObjectInfo) -> bool:
    if was.size_bytes != now.size_bytes:
        return False
    if was.etag and now.etag:
        return was.etag == now.etag
    return not (was.mtime_ns and now.mtime_ns) or was.mtime_ns == now.mtime_ns


def compare(parts: Sequence[Part], objects: Sequence[ObjectInfo]) -> Changes:
    """Return what changed between an index and the objects that lie there."""
    found = {o.key: o for o in objects}
    changed, gone = [], []
    for part in parts:
        for table in part.tables:
            for number in range(table.num_objects):
                was = table.info(number)
                now = found.pop(was.key, None)
                if now is None:
                    gone.append(was)
                elif not _same(was, now):
                    changed.append((was, now))
    return Changes(changed=tuple(changed), gone=tuple(gone), new=tuple(found.values()))


def build(
    recipe: Recipe, catalog: Catalog, *, rebuild: bool = False, report: Report | None = None
) -> Manifest:
    """Return the version that describes the objects as they are now, committing it if it is new."""
    for _ in range(_COMMIT_TRIES_MAX):
        # From scratch, what stands there is not looked at: it may be what must be replaced.
        latest = None if rebuild else catalog.read()
        version = max(catalog.versions(), default=0) + 1
        old = [] if latest is None else [catalog.part(ref) for ref in latest.parts]
        units = _new_units(recipe, old)
        if units is None:
            old, units = [], recipe.format.units(recipe.objects, recipe.store, recipe.options)
        if not units and latest is not None:
            return latest
        parts = [*old, _scan_all(recipe, units, report)]
        if len(parts) > _PARTS_MAX:
            parts = [merge_parts(parts)]
        manifest = _manifest(recipe, catalog, parts, version)
        try:
            catalog.commit(manifest)
        except ExistsError:
            continue  # Another writer was first: what it committed may be all that we wanted.
        _clear_work(recipe, units)
        return manifest
    raise DatasetError(
        f"{catalog.uri}: {_COMMIT_TRIES_MAX} times another writer committed first; let one finish"
    )


def _new_units(recipe: Recipe, old: Sequence[Part]) -> list[Unit] | None:
    """Return the units that are not indexed yet, or None when everything must be scanned anew."""
    units = recipe.format.units(recipe.objects, recipe.store, recipe.options)
    if not old:
        return units
    changes = compare(old, [o for u in units for o in u.objects])
    changes.refuse(
        recipe.store.uri,
        "Data sets are immutable: add new objects instead, or index from scratch with "
        "`penstock index --rebuild` (older versions then no longer match their data)",
    )
    new = {o.key for o in changes.new}
    if any(u.note.get("classes", c) != c for u in units for c in [old[0].options.get("classes")]):
        return None  # A new folder may change the numbers of all classes.
    fresh = [u for u in units if any(o.key in new for o in u.objects)]
    # A unit of many small files may hold old and new ones; then numbering starts over, which costs
    # nothing: such units are made from the listing alone.
    return None if any(o.key not in new for u in fresh for o in u.objects) else fresh


def _scan_all(recipe: Recipe, units: Sequence[Unit], report: Report | None) -> Part:
    if not units:
        raise FormatError(f"{recipe.store.uri}: no {recipe.format.name} objects to index")
    folder = _work_folder(recipe)
    parts: dict[int, Part] = {}
    num_samples = size_bytes = 0
    local = recipe.store.source in ("folder", "memory")
    with Pool(_THREADS_LOCAL if local else _THREADS_REMOTE) as pool:
        jobs = list(enumerate(units))
        for number, part in pool.map_unordered(lambda j: (j[0], _scan(recipe, j[1], folder)), jobs):
            parts[number] = part
            num_samples += part.num_samples
            size_bytes += sum(o.size_bytes for o in units[number].objects)
            if report is not None:
                report(
                    BuildProgress(
                        units_done=len(parts),
                        units=len(units),
                        num_samples=num_samples,
                        size_bytes=size_bytes,
                    )
                )
    merged = merge_parts([parts[i] for i in range(len(units))])
    if merged.num_samples == 0:
        raise FormatError(
            f"{recipe.store.uri}: {len(units)} {recipe.format.name} objects hold no sample at all"
        )
    return merged


def _scan(recipe: Recipe, unit: Unit, folder: Path) -> Part:
    path = folder / f"{_unit_name(unit)}.idx"
    with suppress(FileNotFoundError, FormatError):  # not there, or of another Penstock
        return open_part(path)
    part = recipe.format.scan(unit, recipe.store, recipe.options)
    with suppress(OSError):  # What cannot be kept is scanned again should this build be killed.
        folder.mkdir(parents=True, exist_ok=True)
        part.save(path)
    return part


def _clear_work(recipe: Recipe, units: Sequence[Unit]) -> None:
    """Remove what this build kept, and what killed ones left; another may be at work beside us."""
    folder = _work_folder(recipe)
    paths = [folder / f"{_unit_name(unit)}.idx" for unit in units]
    with suppress(OSError):
        used = min(p.stat().st_mtime for p in paths)
        left = [p for p in folder.glob(".penstock-tmp-*") if p.stat().st_mtime < used]
        for path in paths + left:
            path.unlink(missing_ok=True)
        folder.rmdir()


def _unit_name(unit: Unit) -> str:
    digest = xxhash.xxh3_128(msgspec.json.encode(unit.note, order="sorted"))
    for o in unit.objects:
        digest.update(o.key.encode("utf-8", "surrogateescape"))
        digest.update(f"\0{o.size_bytes} {o.etag} {o.mtime_ns}\0".encode())
    return digest.hexdigest()


def _work_folder(recipe: Recipe) -> Path:
    what = [recipe.store.uri, recipe.format.name, dict(recipe.options)]
    name = xxhash.xxh3_128_hexdigest(msgspec.json.encode(what, order="sorted"))
    return cache_folder() / "work" / name


def _manifest(recipe: Recipe, catalog: Catalog, parts: Sequence[Part], version: int) -> Manifest:
    return Manifest(
        version=version,
        format=recipe.format.name,
        options=dict(recipe.options),
        num_samples=sum(p.num_samples for p in parts),
        num_objects=sum(t.num_objects for p in parts for t in p.tables),
        size_bytes=sum(int(t.sizes.sum()) for p in parts for t in p.tables),
        parts=[catalog.add_part(p) for p in parts],
    )
