"""A few samples of a part as a part of their own.

It is small, so it can be sent to another process with the bytes of its samples, and everything that
can be done with these samples can be done there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.dataset.formats.base import block_rows
from penstock.dataset.part import Ints, Part, Rows, Table, make_part


def excerpt_of(part: Part, ids: Ints) -> Part:
    """Return samples that are addressed alone; the j-th of `ids` is sample j."""
    members = None
    if "member.offset" in part.columns:
        members = part.columns["member.offset"][ids], part.columns["member.length"][ids]
    return make_part(
        format=part.format,
        fields=part.fields,
        tables=[_rows(table, ids) for table in part.tables],
        keys=_keys(part, ids),
        members=members,
        options=part.options,
    )


def block_excerpt(part: Part, number: int) -> Part:
    """Return one block with all of its samples."""
    table = part.tables[0]
    first, stop = table.block_starts()[number : number + 2].tolist()
    found = table.extents(np.array([first], np.int64))
    owner = int(found.object[0])
    place = (int(found.offset[0]), int(found.length[0]), stop - first)
    return make_part(
        format=part.format,
        fields=part.fields,
        tables=[block_rows(table.info(owner), [place], _blob(table, owner))],
        keys=_keys(part, np.arange(first, stop, dtype=np.int64)),
        options=part.options,
    )


def _rows(table: Table, ids: Ints) -> Rows:
    found = table.extents(ids)
    # An object is listed again where samples of another lie between its own.
    starts = np.flatnonzero(np.diff(found.object, prepend=-1))
    owners = found.object[starts].tolist()
    blobs: Any = [_blob(table, number) for number in owners]
    return Rows(
        objects=[table.info(number) for number in owners],
        counts=np.diff(np.append(starts, len(ids))),
        addressing="extents",
        columns={"offset": found.offset, "length": found.length},
        blobs=None if None in blobs else blobs,
    )


def _blob(table: Table, number: int) -> bytes | None:
    return table.blob(number) if table.has_blobs else None


def _keys(part: Part, ids: Ints) -> list[str] | None:
    if "key.ends" not in part.columns:
        return None
    texts = part.columns.texts("key")
    return [texts.text(i) for i in ids.tolist()]
