"""Parts merged in memory, all at once: the plainest way to what `dataset.build_merge` gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.dataset.fields import Field
from penstock.dataset.part import ABSENT, Part, merge_fields, seal_part

_Arrays = Mapping[str, npt.NDArray[Any]]


def merge_parts(parts: Sequence[Part]) -> Part:
    """Return one part with the samples of several, in that order."""
    if len(parts) == 1:
        return parts[0]
    fields = merge_fields([p.fields for p in parts])
    columns = [p.columns for p in parts]
    arrays: dict[str, npt.NDArray[Any]] = {}
    # Fields of members come last: they are the only columns that depend on all parts.
    for name in sorted(columns[0], key=lambda name: name.startswith("member.")):
        if name.startswith("member."):
            arrays[name] = np.concatenate([_by_field(p, fields, name) for p in parts])
        elif all(name in c for c in columns):
            arrays[name] = _merged(columns, name)
    first = parts[0]
    return seal_part(arrays, first.format, fields, first.columns.meta["tables"], first.options)


def _merged(columns: Sequence[_Arrays], name: str) -> npt.NDArray[Any]:
    """Return one column over several parts; numbers that count objects or bytes go on counting."""
    own = [c[name] for c in columns]
    if name.endswith(".first"):
        counts = np.concatenate([np.diff(first) for first in own])
        return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    counted = ""
    if name.endswith(".ends"):
        counted = name.removesuffix("ends") + "bytes"
    elif name.endswith("block.object"):
        counted = name.removesuffix("block.object") + "object.size"
    if counted:
        shifts = np.cumsum([0] + [len(c[counted]) for c in columns[:-1]]).astype(np.uint64)
        own = [column + shift for column, shift in zip(own, shifts, strict=True)]
    whole: npt.NDArray[Any] = np.concatenate(own)
    if name.endswith("block.object"):
        return whole.astype(np.uint32 if not len(whole) or int(whole.max()) < 2**32 else np.uint64)
    return whole


def _by_field(part: Part, fields: Sequence[Field], column: str) -> npt.NDArray[np.uint32]:
    own = {f.name: i for i, f in enumerate(part.fields)}
    absent = ABSENT if column == "member.length" else np.uint32(0)
    out = np.full((part.num_samples, len(fields)), absent, np.uint32)
    for i, field in enumerate(fields):
        if field.name in own:
            out[:, i] = part.columns[column][:, own[field.name]]
    return out
