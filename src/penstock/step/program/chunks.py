"""Chunks of values: which elements of a rank's part belong to the k-th of them.

A value that every rank has whole is cut into runs along a dimension. Where an axis slices values of
the region, the k-th chunk of the whole is the k-th run of every rank's part: so the k-th chunk of a
reduce-scatter leaves each rank with the k-th run of its own part, and nothing waits for others.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.step.program.layouts import S, part
from penstock.step.program.mesh import Mesh
from penstock.step.program.nodes import Region
from penstock.step.program.types import Type

__all__ = ["Runs", "chunk_places", "chunk_runs"]

Runs = tuple[tuple[int, int], ...]
"""Where elements lie along one dimension of the whole value: runs, each with its begin and end."""


def chunk_runs(
    region: Region, name: str, made: Type, *, mesh: Mesh, rank: int, chunk: int
) -> tuple[Runs, ...]:
    """Return by dimension where the elements lie of one chunk of a rank's part of a value.

    >>> from penstock.step.program import mesh
    >>> cut = Region(name="c", kind="chunk", nodes=(), num_chunks=3, dims=(("x", 0),), axis="dp")
    >>> chunk_runs(cut, "x", Type(shape=(12,)), mesh=mesh(dp=2), rank=0, chunk=1)
    (((2, 4), (8, 10)),)
    """
    bounds = made.bounds(mesh, rank)
    out: list[Runs] = [(bound,) for bound in bounds]
    dim = region.dim(name)
    if dim is None:
        return tuple(out)
    first, last = bounds[dim]
    # The region's axis slices this value already, or slices none: then a chunk is a single run.
    is_one = region.axis is None or made.layout(region.axis) == S(dim)
    num_parts = 1 if is_one else mesh.size(str(region.axis))
    runs = []
    for index in range(num_parts):
        start, stop = part(last - first, num_parts, index)
        begin, end = part(stop - start, region.num_chunks, chunk)
        runs.append((first + start + begin, first + start + end))
    out[dim] = tuple(runs)
    return tuple(out)


def chunk_places(
    region: Region, name: str, made: Type, *, mesh: Mesh, rank: int, chunk: int
) -> tuple[Any, ...]:
    """Return by dimension the coordinates of one chunk of a rank's part of a value."""
    runs = chunk_runs(region, name, made, mesh=mesh, rank=rank, chunk=chunk)
    return tuple(np.concatenate([np.arange(*run) for run in along]) for along in runs)
