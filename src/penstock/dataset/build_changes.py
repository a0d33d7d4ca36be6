"""How the objects that lie there now differ from those that were indexed: changed, gone, new."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from penstock.dataset.part import Part
from penstock.errors import ChangedError, NotFoundError
from penstock.storage.base import ObjectInfo, Store
from penstock.storage.pool import ReadPool

_NAMED_MAX = 3
_INFOS_AT_ONCE = 16


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


def compare_with_store(
    parts: Sequence[Part], objects: Sequence[ObjectInfo], store: Store
) -> Changes:
    """Return what changed between an index and a listing that may be older than it.

    A writer may have committed a version after its reader made the listing. Then objects are
    missing from the listing that are not gone, so each missing object is asked for.
    """
    changes = compare(parts, objects)
    if not changes.gone:
        return changes
    with ReadPool(_INFOS_AT_ONCE) as pool:
        asked = pool.map_unordered(lambda was: (was, info_or_none(store, was.key)), changes.gone)
        now = {was.key: info for was, info in asked}
    found = [(was, info) for was in changes.gone if (info := now[was.key]) is not None]
    return replace(
        changes,
        changed=changes.changed + tuple((was, info) for was, info in found if not _same(was, info)),
        gone=tuple(was for was in changes.gone if now[was.key] is None),
    )


def info_or_none(store: Store, key: str) -> ObjectInfo | None:
    """Return size and marks of an object, or None where there is none."""
    try:
        return store.info(key)
    except NotFoundError:
        return None
