"""The next version of a data set: what it had, and something new at its end.

A version names parts. Appending adds one; beyond a few they are merged into one, so that looking a
sample up stays a single gather. Nothing here commits: whoever makes a version does, and knows what
to do when another writer was first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

from penstock.dataset.build_merge import Outline, Piece, merged, outline_of
from penstock.dataset.catalog import Catalog, Manifest, cache_folder
from penstock.dataset.part import Part

PARTS_MAX = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Addition:
    """New samples: parts in their order, and what they are like together."""

    outline: Outline
    pieces: Sequence[Piece]


def addition_of(parts: Sequence[Part]) -> Addition:
    """Return parts that are at hand as an addition."""
    outlines = [outline_of(part, number) for number, part in enumerate(parts)]
    pieces = [partial(_itself, part) for part in parts]
    return Addition(outline=reduce(Outline.joined, outlines), pieces=pieces)


def _itself(part: Part) -> Part:
    return part


def next_version(
    catalog: Catalog,
    base: Manifest | None,
    addition: Addition,
    *,
    version: int,
    format: str,
    options: Mapping[str, Any],
) -> Manifest:
    """Store the new part and return the version that names it; nobody sees it before its commit."""
    new, outline = addition, addition.outline
    kept = list(base.parts) if base else []
    num_samples = (base.num_samples if base else 0) + outline.num_samples
    num_objects = (base.num_objects if base else 0) + outline.num_objects
    size_bytes = (base.size_bytes if base else 0) + outline.object_bytes
    if base is not None and len(kept) >= PARTS_MAX:
        kept, new = [], _after(catalog, base, addition)
    with merged(new.outline, new.pieces, cache_folder() / "parts") as part:
        ref = catalog.add_part(part)
    return Manifest(
        version=version,
        format=format,
        options=dict(options),
        num_samples=num_samples,
        num_objects=num_objects,
        size_bytes=size_bytes,
        parts=[*kept, ref],
    )


def _after(catalog: Catalog, base: Manifest, addition: Addition) -> Addition:
    """Return the whole data set as one addition."""
    old = [partial(catalog.part, ref) for ref in base.parts]
    outline = addition.outline
    for number, piece in enumerate(old):
        outline = outline.joined(outline_of(piece(), number - len(old)))
    return Addition(outline=outline, pieces=[*old, *addition.pieces])
