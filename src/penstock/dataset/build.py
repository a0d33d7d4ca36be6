"""Building an index: scan what is new, in parallel, and commit it as a version.

Each unit's result is kept until the version is committed, so a build that was killed goes on where
it stopped. What was indexed before is compared with what lies there now: a changed object is named,
new ones are appended as a new version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

import msgspec

from penstock.dataset.build_changes import Changes, compare
from penstock.dataset.build_merge import MergeOutline, Piece
from penstock.dataset.build_scan import (
    IndexRecipe,
    ScanJob,
    WorkFolder,
    scan_unit,
    unit_name,
    work_here,
    work_shared,
)
from penstock.dataset.catalog import Catalog, Manifest, VersionFile
from penstock.dataset.crew import Crew, ThreadCrew, refuse_memory
from penstock.dataset.formats.base import Unit
from penstock.dataset.moved import open_parts, settled
from penstock.dataset.versions import Addition, Heading, next_version
from penstock.errors import DatasetError, ExistsError, FormatError, NotFoundError

_THREADS_LOCAL = 4
_THREADS_REMOTE = 16
_TOGETHER_MAX = 32
"""Units given to a remote worker at once: to hand one out often takes longer than to scan it."""
_COMMIT_TRIES_MAX = 8

__all__ = ["BuildProgress", "Changes", "IndexRecipe", "Report", "build", "compare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildProgress:
    """How far a build has come."""

    units_done: int
    units: int
    num_samples: int
    size_bytes: int


Report = Callable[[BuildProgress], None]


def build(
    recipe: IndexRecipe,
    catalog: Catalog,
    *,
    rebuild: bool = False,
    over: VersionFile | None = None,
    report: Report | None = None,
    crew: Crew | None = None,
) -> Manifest:
    """Return the version that describes the objects as they are now, committing it if it is new.

    `over` is a version beside the data that the new one, kept elsewhere, replaces for its readers.
    """
    crew = crew or ThreadCrew()
    work = work_shared(catalog) if crew.is_elsewhere else work_here(recipe)
    for _ in range(_COMMIT_TRIES_MAX):
        # Base and number come from the same look: a writer that saw an older version, or none,
        # takes a number that is in use by now, and its commit is refused.
        record = catalog.record()
        latest = None if rebuild or record is None else _ours(recipe, record.manifest())
        version = max(record.version if record else 0, over.version if over else 0) + 1
        base, units = latest, _new_units(recipe, catalog, latest)
        if units is None:
            base, units = None, recipe.format.units(recipe.objects, recipe.store, recipe.options)
        if not units and latest is not None:
            return latest
        addition = _scan_all(recipe, units, work, crew, report)
        heading = Heading(
            version=version,
            spec=recipe.spec,
            format=recipe.format.name,
            options=recipe.options,
            replaces=over.digest if over else "",
        )
        try:
            manifest = next_version(catalog, base, addition, heading, store=recipe.store)
            there = _committed_already(catalog, manifest) if rebuild else None
            if there is None:
                catalog.commit(manifest)
        except ExistsError:
            continue  # Another writer was first; its version may hold all that we wanted.
        except NotFoundError:
            if catalog.newest(version - 1) < version:
                raise
            continue  # Another writer was first, and has removed the parts that both had kept.
        work.clear([unit_name(unit) for unit in units])
        return there or manifest
    raise DatasetError(
        f"{catalog.uri}: {_COMMIT_TRIES_MAX} times another writer committed first; let one finish"
    )


def _ours(recipe: IndexRecipe, latest: Manifest) -> Manifest | None:
    """Return a version if it is one of the data set that is built."""
    is_ours = latest.is_of(recipe.spec, recipe.format.name, recipe.options)
    return latest if is_ours else None


def _committed_already(catalog: Catalog, manifest: Manifest) -> Manifest | None:
    """Return the latest version if it says the same: two may build from scratch at once."""
    record = catalog.record()
    try:
        latest = record.manifest() if record else None
    except FormatError:
        return None  # A version that cannot be read is a reason to build from scratch.
    same = latest and msgspec.structs.replace(latest, version=manifest.version) == manifest
    return latest if same else None


def _new_units(recipe: IndexRecipe, catalog: Catalog, latest: Manifest | None) -> list[Unit] | None:
    """Return the units that are not indexed yet, or None when everything must be scanned anew."""
    units = recipe.format.units(recipe.objects, recipe.store, recipe.options)
    if latest is None:
        return units
    found = [o for u in units for o in u.objects]
    parts = open_parts(recipe.store, catalog, latest, lambda: found)
    old, added = settled(recipe.store, latest, parts, found)
    new = {o.key for o in added}
    if any(u.note.get("classes", c) != c for u in units for c in [old[0].options.get("classes")]):
        return None  # A new folder may change the numbers of all classes.
    fresh = [u for u in units if any(o.key in new for o in u.objects)]
    # A unit of many small files may hold old and new ones. Then numbering starts over, which costs
    # nothing, since such units are made from the listing alone.
    return None if any(o.key not in new for u in fresh for o in u.objects) else fresh


def _scan_all(
    recipe: IndexRecipe, units: Sequence[Unit], work: WorkFolder, crew: Crew, report: Report | None
) -> Addition:
    if not units:
        raise FormatError(f"{recipe.store.uri}: no {recipe.format.name} objects to index")
    refuse_memory(crew, recipe.store, work.store)
    local = recipe.store.source in ("folder", "memory")
    scanned = crew.map_unordered(
        scan_unit,
        ScanJob(
            store=recipe.store,
            format=recipe.format,
            options=recipe.options,
            work=work,
            must_keep=crew.is_elsewhere,
        ),
        list(enumerate(units)),
        at_once=_THREADS_LOCAL if local else _THREADS_REMOTE,
        together_max=_TOGETHER_MAX,
        names=lambda numbered: recipe.store.uri + numbered[1].objects[0].key,
    )
    # Of each unit only the place of its part is kept here, and of all of them the outline of the
    # whole: a set may have more units than parts fit into memory.
    pieces: dict[int, Piece] = {}
    outline: MergeOutline | None = None
    # An error below leaves the crew at work until it is told to stop.
    with closing(scanned):
        for one in scanned:
            pieces[one.number] = one.piece(work)
            outline = one.outline if outline is None else outline.joined(one.outline)
            if report is not None:
                report(_progress(len(pieces), len(units), outline))
    assert outline is not None
    if outline.num_samples == 0:
        raise FormatError(
            f"{recipe.store.uri}: {len(units)} {recipe.format.name} objects hold no sample at all"
        )
    return Addition(outline=outline, pieces=[pieces[number] for number in range(len(units))])


def _progress(num_done: int, num_units: int, outline: MergeOutline) -> BuildProgress:
    return BuildProgress(
        units_done=num_done,
        units=num_units,
        num_samples=outline.num_samples,
        size_bytes=outline.object_bytes,
    )
