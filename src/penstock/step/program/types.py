"""The type of a value: its shape over all ranks, its elements, and its layouts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from penstock.step.program.layouts import DTYPES, Layout, R, S, dtype_name, part
from penstock.step.program.mesh import Mesh

__all__ = ["Type"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Type:
    """Shape, element type and layouts of a value."""

    shape: tuple[int, ...]
    """Of the whole value, over all ranks."""
    dtype: str = "f32"
    layouts: tuple[tuple[str, Layout], ...] = ()
    """By axis, in the order of their names; replicated axes are left out."""

    def __post_init__(self) -> None:
        kept = sorted((axis, lay) for axis, lay in dict(self.layouts).items() if lay.kind != "R")
        object.__setattr__(self, "layouts", tuple(kept))
        if self.dtype not in DTYPES:
            object.__setattr__(self, "dtype", dtype_name(self.dtype))

    def __str__(self) -> str:
        shape = "×".join(map(str, self.shape)) or "scalar"
        held = " ".join(f"{axis}:{layout}" for axis, layout in self.layouts) or "R"
        return f"{self.dtype}[{shape}] {held}"

    @property
    def ndim(self) -> int:
        """How many dimensions it has."""
        return len(self.shape)

    @property
    def num_elements(self) -> int:
        """Elements of the whole value."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole value."""
        return self.num_elements * DTYPES[self.dtype].size_bytes

    @property
    def is_float(self) -> bool:
        """Whether its elements have fractions."""
        return DTYPES[self.dtype].is_float

    def layout(self, axis: str) -> Layout:
        """Return how an axis holds it."""
        return dict(self.layouts).get(axis, R)

    def with_layout(self, axis: str | Iterable[str], layout: Layout) -> Type:
        """Return the same value, held differently by one axis or several."""
        axes = [axis] if isinstance(axis, str) else axis
        return replace(self, layouts=(*self.layouts, *((one, layout) for one in axes)))

    def axes(self, kind: str) -> tuple[str, ...]:
        """Return the axes that hold it in one kind of layout."""
        return tuple(axis for axis, layout in self.layouts if layout.kind == kind)

    def slicing(self, dim: int) -> tuple[str, ...]:
        """Return the axes that slice a dimension."""
        return tuple(axis for axis, layout in self.layouts if layout == S(dim))

    def bounds(self, mesh: Mesh, rank: int) -> tuple[tuple[int, int], ...]:
        """Return by dimension where the part of a rank begins and ends.

        >>> from penstock.step.program import S, mesh
        >>> Type(shape=(10, 4), layouts=(("dp", S(0)),)).bounds(mesh(dp=4), 3)
        ((9, 10), (0, 4))
        """
        out = [(0, length) for length in self.shape]
        for axis in mesh.names:
            layout = self.layout(axis)
            if layout.kind == "S":
                first, last = out[layout.dim]
                begin, end = part(last - first, mesh.size(axis), mesh.coordinate(rank, axis))
                out[layout.dim] = (first + begin, first + end)
        return tuple(out)

    def local_shape(self, mesh: Mesh, rank: int) -> tuple[int, ...]:
        """Return the shape of one rank's part."""
        return tuple(last - first for first, last in self.bounds(mesh, rank))

    def local_bytes(self, mesh: Mesh, rank: int) -> int:
        """Return the bytes that one rank has."""
        return math.prod(self.local_shape(mesh, rank)) * DTYPES[self.dtype].size_bytes
