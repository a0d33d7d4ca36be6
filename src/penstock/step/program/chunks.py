"""Chunks of values: which elements of a rank's part belong to the k-th of them.

A value that every rank has whole is cut into runs along a dimension. Where an axis slices values of
the region, the k-th chunk of the whole is the k-th run of every rank's part: so the k-th chunk of a
reduce-scatter leaves each rank with the k-th run of its own part, and nothing waits for others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.step.program.layouts import S, part
from penstock.step.program.mesh import Mesh
from penstock.step.program.nodes import Region
from penstock.step.program.types import Type

__all__ = ["chunk_along", "chunk_places"]

Ints = npt.NDArray[np.int64]


def chunk_places(
    region: Region, name: str, made: Type, *, mesh: Mesh, rank: int, chunk: int
) -> tuple[Any, ...]:
    """Return by dimension the coordinates of one chunk of what a rank has of a value."""
    out = [np.arange(*bound) for bound in made.bounds(mesh, rank)]
    dim = region.dim(name)
    if dim is None:
        return tuple(out)
    first, last = made.bounds(mesh, rank)[dim]
    is_mine = region.axis is not None and made.layout(region.axis) == S(dim)
    parts = 1 if is_mine or region.axis is None else mesh.size(region.axis)
    out[dim] = first + chunk_along(last - first, parts, region.num_chunks, chunk)
    return tuple(out)


def chunk_along(length: int, parts: int, num_chunks: int, chunk: int) -> Ints:
    """Return where one chunk lies in a length that is cut into parts: a run of each of them.

    >>> chunk_along(12, 2, 3, 1).tolist()
    [2, 3, 8, 9]
    """
    runs = []
    for index in range(parts):
        first, last = part(length, parts, index)
        begin, end = part(last - first, num_chunks, chunk)
        runs.append(np.arange(first + begin, first + end))
    return np.concatenate(runs) if runs else np.zeros(0, np.int64)
