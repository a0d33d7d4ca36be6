"""The next version of a data set: what it had, and something new at its end.

A version names parts. Appending adds one; beyond a few they are merged into one, so that looking a
sample up stays a single gather. Nothing here commits: the caller does, and knows what to do when
another writer was first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

from penstock.dataset.build_merge import MergeOutline, Piece, held_piece, merged, outline_of
from penstock.dataset.catalog import EVERYTHING_SPEC, Catalog, Manifest, cache_folder
from penstock.dataset.moved import open_part_at
from penstock.dataset.part import Part
from penstock.storage.base import Store

PARTS_MAX = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Addition:
    """New samples: parts in their order, and what they are like together."""

    outline: MergeOutline
    pieces: Sequence[Piece]


def addition_of(parts: Sequence[Part]) -> Addition:
    """Return parts that are at hand as an addition."""
    outlines = [outline_of(part, number) for number, part in enumerate(parts)]
    pieces = [held_piece(part) for part in parts]
    return Addition(outline=reduce(MergeOutline.joined, outlines), pieces=pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """What a version says of itself beside its samples; see `Manifest`."""

    version: int
    format: str
    options: Mapping[str, Any]
    spec: str = EVERYTHING_SPEC
    replaces: str = ""


def next_version(
    catalog: Catalog,
    base: Manifest | None,
    addition: Addition,
    heading: Heading,
    *,
    store: Store,
) -> Manifest:
    """Store the new part and return the version that names it; nobody sees it before its commit.

    `store` is where the objects lie, which need not be where the catalog lies.
    """
    new, outline = addition, addition.outline
    kept = list(base.parts) if base else []
    num_samples = (base.num_samples if base else 0) + outline.num_samples
    num_objects = (base.num_objects if base else 0) + outline.num_objects
    size_bytes = (base.size_bytes if base else 0) + outline.object_bytes
    if base is not None and len(kept) >= PARTS_MAX:
        kept, new = [], _after(store, catalog, base, addition)
    with merged(new.outline, new.pieces, cache_folder() / "parts") as part:
        ref = catalog.add_part(part, store.uri)
    return Manifest(
        version=heading.version,
        spec=heading.spec,
        format=heading.format,
        options=dict(heading.options),
        num_samples=num_samples,
        num_objects=num_objects,
        size_bytes=size_bytes,
        parts=[*kept, ref],
        replaces=heading.replaces,
    )


def _after(store: Store, catalog: Catalog, base: Manifest, addition: Addition) -> Addition:
    """Return the whole data set as one addition."""
    # With the marks that its objects have here, since the merged part records this place.
    old = [partial(open_part_at, store, catalog, ref) for ref in base.parts]
    outline = addition.outline
    for number, piece in enumerate(old):
        outline = outline.joined(outline_of(piece(), number - len(old)))
    return Addition(outline=outline, pieces=[*old, *addition.pieces])
