"""Is an index sound in itself, and are the objects there that it speaks of?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.dataset.bound import BoundPart
from penstock.dataset.build_changes import info_or_none
from penstock.dataset.part import ABSENT, Ints, Part, Table, recomputed
from penstock.dataset.verify_report import Kind, Problem
from penstock.storage.base import ObjectInfo, Store
from penstock.storage.pool import ReadPool

_CHUNK = 1 << 20
_INFOS_AT_ONCE = 16


def named(bound: BoundPart, local: int) -> str:
    """Return a sample's number, and its own name where it has one."""
    key = bound.part.key(local)
    return f"sample {bound.first + local}" + (f" ({key})" if key else "")


def is_sound(bound: BoundPart) -> bool:
    """Return whether the counts of samples rise, without which none of them can be looked up."""
    firsts = [table.first_sample for table in bound.part.tables]
    return all(int(first[0]) == 0 and bool((np.diff(first) >= 0).all()) for first in firsts)


def check_part(bound: BoundPart) -> Iterator[Problem]:
    """Yield what is wrong with a part's own columns."""
    if not is_sound(bound):
        yield _wrong(bound, "its counts of samples do not rise from 0")
        return
    stated, found = bound.part.fingerprint, recomputed(bound.part)
    if stated != found:
        yield _wrong(bound, f"its columns give the fingerprint {found}, it says {stated}")
    for table in bound.part.tables:
        starts = table.block_starts()[:-1] if table.addressing == "blocks" else None
        count = table.num_samples if starts is None else len(starts)
        for at in range(0, count, _CHUNK):
            # One more than the chunk, so that the step between two chunks is looked at too.
            ids = np.arange(at, min(at + _CHUNK + 1, count), dtype=np.int64)
            yield from _check_extents(bound, table, ids if starts is None else starts[ids])
    if "member.offset" in bound.part.columns:
        yield from _check_members(bound)


def problem_at(
    bound: BoundPart, local: int, kind: Kind, message: str, table: Table | None = None
) -> Problem:
    """Return a problem of one sample, with the place where it lies."""
    table = table or bound.part.tables[0]
    extents = table.extents(np.array([local], np.int64))
    return Problem(
        kind=kind,
        message=message,
        object=table.key(int(extents.object[0])),
        offset=int(extents.offset[0]),
        sample_id=bound.first + local,
        key=bound.part.key(local),
    )


def _wrong(bound: BoundPart, what: str) -> Problem:
    return Problem(
        kind="index",
        message=(
            f"the index of {bound.store.uri} (samples {bound.first} and on) is damaged: {what}; "
            "index it again with `penstock index --rebuild`"
        ),
        sample_id=bound.first,
    )


def _check_extents(bound: BoundPart, table: Table, ids: Ints) -> Iterator[Problem]:
    extents = table.extents(ids)
    ends = extents.offset + extents.length
    outside = (extents.offset < 0) | (extents.length < 0) | (ends > table.sizes[extents.object])
    falls = np.zeros(len(ids), bool)
    if table.addressing == "extents":
        same = extents.object[1:] == extents.object[:-1]
        falls[1:] = same & (extents.offset[1:] < extents.offset[:-1])
    for place in np.flatnonzero(outside | falls).tolist():
        number, local = int(extents.object[place]), int(ids[place])
        offset, end = int(extents.offset[place]), int(ends[place])
        what = f"the object has {int(table.sizes[number])}" if outside[place] else "out of order"
        message = (
            f"the index puts {named(bound, local)} at bytes {offset} to {end} of "
            f"{bound.store.uri}{table.key(number)}: {what}"
        )
        yield problem_at(bound, local, "index", message, table)


def _check_members(bound: BoundPart) -> Iterator[Problem]:
    columns, table = bound.part.columns, bound.part.tables[0]
    for at in range(0, bound.part.num_samples, _CHUNK):
        ids = np.arange(at, min(at + _CHUNK, bound.part.num_samples), dtype=np.int64)
        lengths = columns["member.length"][ids]
        ends = columns["member.offset"][ids].astype(np.int64) + lengths
        room = table.extents(ids).length[:, None]
        bad = (lengths != ABSENT) & (ends > room)
        for row, column in zip(*np.nonzero(bad), strict=True):
            local = int(ids[row])
            message = (
                f"the index puts field {bound.part.fields[column].name!r} of "
                f"{named(bound, local)} up to byte {ends[row, column]} of its {room[row, 0]}"
            )
            yield problem_at(bound, local, "index", message)


@dataclass(frozen=True, slots=True)
class Objects:
    """The objects as they lie there now."""

    found: dict[str, ObjectInfo]

    def sizes(self, table: Table, numbers: Ints) -> Ints:
        """Return the size of each object now; -1 for one that is not there."""
        unique, back = np.unique(numbers, return_inverse=True)
        infos = [self.found.get(table.key(int(n))) for n in unique]
        return np.array([-1 if i is None else i.size_bytes for i in infos], np.int64)[back]


class AsFound:
    """A store whose objects are read as they lie there now, whatever the index says of them.

    That an object has changed is reported apart, and its samples are checked nevertheless. An
    object that changes while it is checked is a `ChangedError`.
    """

    def __init__(self, store: Store, objects: Objects) -> None:
        self._store = store
        self._objects = objects

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def read_range(self, info: ObjectInfo, offset: int, length: int) -> memoryview:
        """Return a part of an object as it is now."""
        return self._store.read_range(self._objects.found.get(info.key, info), offset, length)

    def read_into(self, info: ObjectInfo, offset: int, target: memoryview) -> None:
        """Fill `target` with a part of an object as it is now."""
        self._store.read_into(self._objects.found.get(info.key, info), offset, target)


def find_objects(store: Store, parts: Iterable[Part]) -> Objects:
    """Return what lies there of the objects that an index names."""
    if store.can_list:
        return Objects({info.key: info for info in store.list()})
    keys = {t.key(n) for p in parts for t in p.tables for n in range(t.num_objects)}
    with ReadPool(_INFOS_AT_ONCE) as pool:
        infos = pool.map_unordered(lambda key: info_or_none(store, key), keys)
        return Objects({info.key: info for info in infos if info is not None})


def check_objects(bound: BoundPart, objects: Objects) -> Iterator[Problem]:
    """Yield the objects that are gone or are not those that were indexed.

    The time of a file is not compared: a copy has another, and checksums say more.
    """
    for table in bound.part.tables:
        for number in range(table.num_objects):
            was = table.info(number)
            now = objects.found.get(was.key)
            what = _difference(was, now)
            if what:
                yield _object_problem(bound, table, number, what, now)


def _difference(was: ObjectInfo, now: ObjectInfo | None) -> str:
    if now is None:
        return f"is not there, {was.size_bytes} bytes when indexed"
    if now.size_bytes != was.size_bytes:
        return f"has {now.size_bytes} bytes, {was.size_bytes} when indexed"
    if was.etag and now.etag and was.etag != now.etag:
        return f"has the mark {now.etag}, {was.etag} when indexed"
    return ""


def _object_problem(
    bound: BoundPart, table: Table, number: int, what: str, now: ObjectInfo | None
) -> Problem:
    first, stop = table.first_sample[number : number + 2].tolist()
    extents = table.extents(np.arange(first, stop))
    ends = extents.offset + extents.length
    lost = first + np.flatnonzero(ends > (-1 if now is None else now.size_bytes))
    message = f"{bound.store.uri}{table.key(number)} {what}"
    if len(lost):
        count = "1 sample is" if len(lost) == 1 else f"{len(lost)} samples are"
        message += f"; {count} lost, the first is {named(bound, int(lost[0]))}"
    return Problem(
        kind="object",
        message=message,
        object=table.key(number),
        sample_id=bound.first + int(lost[0]) if len(lost) else bound.first + first,
        key=bound.part.key(int(lost[0])) if len(lost) else None,
    )
