"""Many parts merged into one, at any size, without holding any of them.

Two steps. An *outline* says how large each column of the result will be and which fields it has; it
is folded from the outlines of the pieces in whatever order they are finished, so no piece need be
kept at hand for it. Then the pieces are opened one after the other, in their order, and copied to
their places. A large result lies in files that are mapped: the system writes them out as it needs
the memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.dataset.fields import MEMBERS_MAX, Field, too_many_members
from penstock.dataset.part import ABSENT, Part, merge_fields, seal_part
from penstock.storage.folder_errors import store_error
from penstock.storage.keys import TEMPORARY_PREFIX
from penstock.storage.pool import ReadPool

Piece = Callable[[], Part]
"""Opens a part; a value that can be pickled where pieces travel."""


def held_piece(part: Part) -> Piece:
    """Return a part that is at hand as a piece."""
    return partial(_itself, part)


def _itself(part: Part) -> Part:
    return part


_HELD_BYTES_MAX = 64 << 20
"""A result up to this size is put together in memory."""
_OPENED_AT_ONCE = 16
_MEMBERS = ("member.offset", "member.length")
_TOP = ("key.bytes", "key.ends", "checksum")
"""Columns beside the tables that a result has only if all pieces have them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _MergedColumn:
    """A column of some pieces."""

    dtype: str
    num_rows: int
    num_parts: int
    """Pieces that have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _MergedField:
    """A field of some pieces."""

    place: tuple[int, int]
    """Number of the first piece that has it, and its place there."""
    field: Field
    num_parts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOutline:
    """What must be known of all pieces before the first byte of the result is written."""

    first: int
    """The smallest of their numbers: that piece says which columns there are."""
    names: tuple[str, ...]
    """The columns of that piece, in its order."""
    meta: dict[str, Any]
    """Format, options and tables of that piece."""
    columns: dict[str, _MergedColumn]
    fields: dict[str, _MergedField]
    num_parts: int
    num_samples: int
    num_objects: int
    object_bytes: int
    """Size of all objects."""

    def joined(self, other: MergeOutline) -> MergeOutline:
        """Return the outline of the pieces of both."""
        one, two = (self, other) if self.first <= other.first else (other, self)
        columns = dict(one.columns)
        for name, column in two.columns.items():
            columns[name] = _joined_column(columns[name], column) if name in columns else column
        fields = dict(one.fields)
        for name, seen in two.fields.items():
            fields[name] = _joined_field(fields[name], seen) if name in fields else seen
        if _MEMBERS[0] in one.names and len(fields) > MEMBERS_MAX:
            raise too_many_members("this set", list(fields)[MEMBERS_MAX])
        return replace(
            one,
            columns=columns,
            fields=fields,
            num_parts=one.num_parts + two.num_parts,
            num_samples=one.num_samples + two.num_samples,
            num_objects=one.num_objects + two.num_objects,
            object_bytes=one.object_bytes + two.object_bytes,
        )

    def merged_fields(self) -> tuple[Field, ...]:
        """Return all fields in the order of first sight; what some piece lacks is optional."""
        seen = sorted(self.fields.values(), key=lambda s: s.place)
        return tuple(
            replace(s.field, optional=s.field.optional or s.num_parts < self.num_parts)
            for s in seen
        )


def outline_of(part: Part, number: int) -> MergeOutline:
    """Return the outline of one piece, which has this number in the order of all."""
    columns = {
        name: _MergedColumn(dtype=array.dtype.str, num_rows=len(array), num_parts=1)
        for name, array in part.columns.items()
    }
    return MergeOutline(
        first=number,
        names=tuple(part.columns),
        meta={
            "format": part.format,
            "options": part.options,
            "tables": part.columns.meta["tables"],
        },
        columns=columns,
        fields={
            f.name: _MergedField(place=(number, place), field=f, num_parts=1)
            for place, f in enumerate(part.fields)
        },
        num_parts=1,
        num_samples=part.num_samples,
        num_objects=sum(t.num_objects for t in part.tables),
        object_bytes=sum(int(t.sizes.sum()) for t in part.tables),
    )


def _joined_column(one: _MergedColumn, two: _MergedColumn) -> _MergedColumn:
    return _MergedColumn(
        dtype=np.result_type(np.dtype(one.dtype), np.dtype(two.dtype)).str,
        num_rows=one.num_rows + two.num_rows,
        num_parts=one.num_parts + two.num_parts,
    )


def _joined_field(one: _MergedField, two: _MergedField) -> _MergedField:
    (field,) = merge_fields([(one.field,), (two.field,)])
    return _MergedField(
        place=min(one.place, two.place), field=field, num_parts=one.num_parts + two.num_parts
    )


@contextmanager
def merged(outline: MergeOutline, pieces: Sequence[Piece], scratch: Path) -> Iterator[Part]:
    """Give the part with the samples of all pieces, in their order, until the end of the block."""
    assert outline.num_parts == len(pieces), (outline.num_parts, len(pieces))
    if len(pieces) == 1:
        yield pieces[0]()
        return
    fields = outline.merged_fields()
    shapes = _shapes(outline, fields)
    total_bytes = sum(dtype.itemsize * int(np.prod(shape)) for dtype, shape in shapes.values())
    with store_error(str(scratch)):
        scratch.mkdir(parents=True, exist_ok=True)
        held = tempfile.TemporaryDirectory(prefix=f"{TEMPORARY_PREFIX}merge-", dir=scratch)
    with held as folder:
        where = Path(folder) if total_bytes > _HELD_BYTES_MAX else None
        with store_error(str(scratch), needed_bytes=total_bytes):
            arrays = {
                name: _room(where, number, dtype, shape)
                for number, (name, (dtype, shape)) in enumerate(shapes.items())
            }
        filling = _ColumnFill(arrays, fields)
        for part in _opened(pieces):
            filling.add(part)
        head = outline.meta
        yield seal_part(arrays, head["format"], fields, head["tables"], head["options"])


def _shapes(
    outline: MergeOutline, fields: tuple[Field, ...]
) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
    """Return type and shape of each column of the result, in the order of its file."""
    chosen = [n for n in outline.names if n.startswith("t")]
    for names in (_TOP[:2], _TOP[2:]):
        if all(_num_parts(outline, name) == outline.num_parts for name in names):
            chosen += names
    out: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
    for name in chosen:
        column = outline.columns[name]
        assert column.num_parts == outline.num_parts, f"some pieces have no column {name}"
        num_rows, dtype = column.num_rows, np.dtype(column.dtype)
        if name.endswith(".first"):
            num_rows -= outline.num_parts - 1  # Each ends where the next one starts.
        if name.endswith("block.object"):
            prefix = name.removesuffix("block.object")
            is_small = outline.columns[f"{prefix}object.size"].num_rows <= 2**32
            dtype = np.dtype("<u4" if is_small else "<u8")
        out[name] = (dtype, (num_rows,))
    if _MEMBERS[0] in outline.names:
        rows = (outline.num_samples, len(fields))
        out |= {name: (np.dtype("<u4"), rows) for name in _MEMBERS}
    return out


def _num_parts(outline: MergeOutline, name: str) -> int:
    return outline.columns[name].num_parts if name in outline.columns else 0


def _room(
    folder: Path | None, number: int, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> npt.NDArray[Any]:
    if folder is None or not all(shape):
        return np.empty(shape, dtype)
    return np.memmap(folder / str(number), dtype, "w+", shape=shape)


class _ColumnFill:
    """Columns that are being filled, piece after piece."""

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]], fields: tuple[Field, ...]) -> None:
        self._arrays = arrays
        self._fields = fields
        self._rows = dict.fromkeys(arrays, 0)
        self._num_samples = 0

    def add(self, part: Part) -> None:
        """Copy the next piece to its place."""
        # All shifts come first: each depends on rows that the loop below counts on.
        shifts = {name: self._shift(name) for name in self._arrays}
        for name, array in self._arrays.items():
            at = self._rows[name]
            if name in _MEMBERS:
                self._add_members(part, name, array[at : at + part.num_samples])
                self._rows[name] += part.num_samples
                continue
            own = part.columns[name]
            target = array[at : at + len(own)]
            target[...] = own
            if shifts[name]:
                target += target.dtype.type(shifts[name])
            self._rows[name] += len(own) - name.endswith(".first")
        self._num_samples += part.num_samples

    def _shift(self, name: str) -> int:
        """Return what is added to the numbers of a column because of the pieces before."""
        if name.endswith(".ends"):
            return self._rows[name.removesuffix("ends") + "bytes"]
        if name.endswith(".first"):
            return self._num_samples
        if name.endswith("block.object"):
            return self._rows[name.removesuffix("block.object") + "object.size"]
        return 0

    def _add_members(self, part: Part, name: str, target: npt.NDArray[Any]) -> None:
        own = {f.name: i for i, f in enumerate(part.fields)}
        column = part.columns[name]
        for i, f in enumerate(self._fields):
            absent = 0 if name == "member.offset" else ABSENT
            target[:, i] = column[:, own[f.name]] if f.name in own else absent


def _opened(pieces: Sequence[Piece]) -> Iterator[Part]:
    """Yield all parts in their order, opening some of them ahead."""
    with ReadPool(_OPENED_AT_ONCE) as pool:
        for start in range(0, len(pieces), 2 * _OPENED_AT_ONCE):
            some = list(enumerate(pieces[start : start + 2 * _OPENED_AT_ONCE]))
            opened = dict(pool.map_unordered(lambda numbered: (numbered[0], numbered[1]()), some))
            for number in range(len(some)):
                yield opened.pop(number)
