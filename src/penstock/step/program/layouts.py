"""Layouts: how the ranks of one mesh axis hold a value.

    R       replicated: every rank has all of it, the same
    S(d)    sliced: rank i has the i-th part along dimension d
    P       partial: every rank has an addend; the value is their sum (or maximum, minimum)
    L       local: every rank has something of that shape, and they have nothing to do with
            each other

They are those of DTensor (Replicate, Shard, Partial) and one more. Only communication turns one
into another, except that a replicated value can be sliced for nothing. A value has one layout for
each axis of the mesh, by default R.

Parts are cut as torch cuts chunks: all of `ceil(length / parts)`, the last ones shorter or empty.
Where two axes slice one dimension, the first axis of the mesh cuts first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from penstock.errors import ProgramError

__all__ = ["L", "Annotation", "DType", "Layout", "P", "R", "S", "dtype_name", "part", "partial"]

_REDUCTIONS = ("sum", "max", "min")


@dataclass(frozen=True, slots=True)
class DType:
    """The type of elements."""

    name: str
    size_bytes: int
    is_float: bool = True

    def __str__(self) -> str:
        return self.name


DTYPES = {
    dtype.name: dtype
    for dtype in (
        DType("f64", 8),
        DType("f32", 4),
        DType("bf16", 2),
        DType("f16", 2),
        DType("i64", 8, is_float=False),
        DType("i32", 4, is_float=False),
        DType("u8", 1, is_float=False),
        DType("bool", 1, is_float=False),
    )
}


_NAMES = (
    "f64 float64 double, f32 float32 float, bf16 bfloat16, f16 float16 half, "
    "i64 int64 long int, i32 int32, u8 uint8"
)
_ELSEWHERE = {
    other: name for name, *others in map(str.split, _NAMES.split(",")) for other in others
}
"""Element types by their names in torch and NumPy."""


def dtype_name(given: Any) -> str:
    """Return the name of an element type, given the type or its name."""
    name = str(given)
    if name in DTYPES:
        return name
    plain = getattr(given, "__name__", name).removeprefix("torch.")
    known = _ELSEWHERE.get(plain, plain if plain in DTYPES else "")
    way = f"write {known!r}, or ps.{known}; " if known else ""
    raise ProgramError(f"no element type {name!r}; {way}there are {', '.join(DTYPES)}")


@dataclass(frozen=True, slots=True)
class Layout:
    """How one axis holds a value. Written `R`, `S(0)`, `P`, `L`; with dimensions `S(0)["n"]`."""

    kind: str
    dim: int = 0
    op: str = "sum"
    axis: str | None = field(default=None, compare=False)
    """Its axis in an annotation; None: the program's own."""

    def __str__(self) -> str:
        if self.kind == "S":
            return f"S({self.dim})"
        return f"P({self.op})" if self.kind == "P" and self.op != "sum" else self.kind

    def __getitem__(self, dims: Any) -> Annotation:
        return Annotation((self,), ())[dims]

    def __and__(self, other: Layout | Annotation) -> Annotation:
        if isinstance(other, Annotation):  # the brackets stand behind the last layout
            return Annotation((self, *other.layouts), other.dims, other.dtype)
        return Annotation((self, other), ())

    def over(self, axis: str) -> Layout:
        """Return the layout for a named axis: `S(0).over("tp")`."""
        return Layout(self.kind, self.dim, self.op, axis)


@dataclass(frozen=True, slots=True)
class Annotation:
    """The type of a parameter: layouts, dimensions by name or length, element type."""

    layouts: tuple[Layout, ...]
    dims: tuple[str | int, ...]
    dtype: str = "f32"

    def __getitem__(self, dims: Any) -> Annotation:
        given = dims if isinstance(dims, tuple) else (dims,)
        names = tuple(d for d in given if not isinstance(d, DType))
        dtypes = [d.name for d in given if isinstance(d, DType)]
        for name in names:
            if not isinstance(name, str | int):
                known = _ELSEWHERE.get(getattr(name, "__name__", str(name)).removeprefix("torch."))
                raise ProgramError(
                    f"a dimension is a name or a number, got {name!r}; write R['rows', 1024]"
                    + (f", and ps.{known} behind them for the element type" if known else "")
                )
        return Annotation(self.layouts, names, dtypes[-1] if dtypes else "f32")

    def __and__(self, other: Layout) -> Annotation:
        return Annotation((*self.layouts, other), self.dims, self.dtype)


R = Layout("R")
L = Layout("L")
P = Layout("P")


def S(dim: int) -> Layout:  # noqa: N802 - it stands beside R, P and L
    """Return the layout of a value of which each rank has a part along a dimension."""
    if dim < 0:
        raise ProgramError(f"S({dim}): dimensions of layouts are counted from 0")
    return Layout("S", dim)


def partial(op: str) -> Layout:
    """Return the layout of a value that is the sum, maximum or minimum of all ranks' tensors."""
    if op not in _REDUCTIONS:
        raise ProgramError(f"no partial values by {op!r}; there are {', '.join(_REDUCTIONS)}")
    return Layout("P", op=op)


def part(length: int, parts: int, index: int) -> tuple[int, int]:
    """Return where one of several parts of a length begins and ends.

    >>> [part(10, 4, i) for i in range(4)]
    [(0, 3), (3, 6), (6, 9), (9, 10)]
    """
    size = -(-length // parts)
    return min(length, index * size), min(length, (index + 1) * size)
