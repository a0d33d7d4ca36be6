"""Do the columns of a part fit together? What is looked at here does not grow with its samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from penstock.dataset.fields import Field
    from penstock.dataset.part import Part


def check_types(fields: Sequence[Field]) -> None:
    """Raise for a type that would turn bytes into pointers, or that is none."""
    for f in fields:
        if f.dtype is not None and np.dtype(f.dtype).hasobject:
            raise ValueError(f"field {f.name!r} is of type {f.dtype!r}, which no file can hold")


def check_lengths(part: Part) -> None:
    """Raise unless all columns have as many rows as there are objects, blocks or samples."""
    num_samples = part.num_samples
    for number, table in enumerate(part.tables):
        have = {
            name.removeprefix(f"t{number}."): column.shape
            for name, column in part.columns.items()
            if name.startswith(f"t{number}.") and not name.endswith(".bytes")
        }
        if table.num_samples != num_samples:
            raise ValueError(f"tables of {num_samples} and {table.num_samples} samples")
        needed = ("object.key.ends", "object.etag.ends", "object.size", "object.mtime_ns")
        rows = dict.fromkeys((*needed, *have), table.num_objects)
        rows["object.first"] = table.num_objects + 1
        if table.addressing == "extents":
            rows |= {"offset": num_samples, "length": num_samples}
        elif table.addressing == "even":
            rows |= dict.fromkeys(("base", "stride", "width"), table.num_objects)
        else:
            names = ("block.object", "block.offset", "block.length")
            rows |= dict.fromkeys(names, table.num_blocks) | {"block.first": table.num_blocks + 1}
        _check_rows(have, {name: (count,) for name, count in rows.items()}, f"t{number}.")
    for name in [name for name in part.columns if name.endswith(".ends")]:
        part.columns.texts(name.removesuffix(".ends"))  # has its bytes too
    top = {"key.ends": (num_samples,)} | dict.fromkeys(
        ("member.offset", "member.length"), (num_samples, len(part.fields))
    )
    sums = part.tables[0].num_blocks if len(part.tables) == 1 else num_samples
    shapes = {name: c.shape for name, c in part.columns.items()}
    _check_rows(shapes, {n: s for n, s in (top | {"checksum": (sums,)}).items() if n in shapes})


def _check_rows(
    have: Mapping[str, tuple[int, ...]], want: Mapping[str, tuple[int, ...]], prefix: str = ""
) -> None:
    for name, shape in want.items():
        if have[name] != shape:
            raise ValueError(f"column {prefix}{name} has {have[name]} rows, {shape} are needed")
