"""The loops of an operation: dimensions along which it works piece by piece.

A product of matrices has loops over rows of the first, columns of the second and batches; a cut
along any of them cuts operands and result alike, and the pieces are independent. The inner
dimension is no loop. A loop has its dimension of the result and of each operand; every piece needs
an operand without one whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.step.program.nodes import Node, Program
from penstock.step.program.ops import OPS
from penstock.step.program.types import Type

__all__ = ["Dims", "Loop", "loops_of"]

Dims = tuple[int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """One dimension that pieces may be cut along."""

    out: int
    """Of the result."""
    operands: Dims
    """Of each operand; None where each piece needs all of it."""
    divides: int = 0
    """For merged dimensions: a length that equal pieces must divide; 0: any pieces."""


def loops_of(node: Node, program: Program) -> tuple[Loop, ...]:
    """Return the loops of a node; none for nodes without pieces, such as a load."""
    types = [program[name].type for name in node.inputs]
    kind = OPS[node.op].kind
    if kind == "pointwise":
        return tuple(_pointwise(node, types, dim) for dim in range(node.type.ndim))
    if kind == "matmul":
        return _matmul(node, types)
    if kind == "reduce":
        return _reduction(node, types[0])
    if kind == "move" or node.op in ("slice", "update", "recv", "store"):
        return tuple(Loop(out=dim, operands=(dim,) * len(types)) for dim in range(node.type.ndim))
    if node.op == "transpose":
        return tuple(Loop(out=d, operands=(of,)) for d, of in enumerate(node.attr("dims")))
    if node.op == "unflatten":
        return _unflatten(node)
    if node.op == "expand":
        return _expand(node)
    if node.op in ("call", "pick"):
        return _samples(node)
    return _flatten(node, types[0]) if node.op == "flatten" else ()


def _aligned(made: Type, dim: int, out: Type) -> int | None:
    """Return the dimension of an operand that meets a dimension of the result."""
    at = dim - (out.ndim - made.ndim)
    return at if at >= 0 and made.shape[at] == out.shape[dim] else None


def _pointwise(node: Node, types: list[Type], dim: int) -> Loop:
    return Loop(out=dim, operands=tuple(_aligned(made, dim, node.type) for made in types))


def _matmul(node: Node, types: list[Type]) -> tuple[Loop, ...]:
    a, b = types
    ndim = node.type.ndim
    out = [_pointwise(node, types, dim) for dim in range(ndim - 2)]
    out.append(Loop(out=ndim - 2, operands=(a.ndim - 2, None)))
    return (*out, Loop(out=ndim - 1, operands=(None, b.ndim - 1)))


def _reduction(node: Node, of: Type) -> tuple[Loop, ...]:
    if node.op == "softmax":
        kept = [dim for dim in range(of.ndim) if dim != node.attr("dim")]
        return tuple(Loop(out=dim, operands=(dim,)) for dim in kept)
    gone = tuple(node.attr("dims"))
    kept = [dim for dim in range(of.ndim) if dim not in gone]
    if node.attr("keep"):
        return tuple(Loop(out=dim, operands=(dim,)) for dim in kept)
    return tuple(Loop(out=at, operands=(dim,)) for at, dim in enumerate(kept))


def _unflatten(node: Node) -> tuple[Loop, ...]:
    dim, lengths = int(node.attr("dim")), tuple(node.attr("lengths"))
    more = len(lengths) - 1
    # Only a run of the first of the new dimensions is one run of the old one.
    out = [Loop(out=d, operands=(d,)) for d in range(dim)]
    out.append(Loop(out=dim, operands=(dim,), divides=lengths[0]))
    rest = range(dim + 1, node.type.ndim - more)
    return (*out, *(Loop(out=d + more, operands=(d,)) for d in rest))


def _flatten(node: Node, of: Type) -> tuple[Loop, ...]:
    dim, count = int(node.attr("dim")), int(node.attr("count"))
    out = [Loop(out=d, operands=(d,)) for d in range(dim)]
    out.append(Loop(out=dim, operands=(dim,), divides=of.shape[dim]))
    rest = range(dim + count, of.ndim)
    return (*out, *(Loop(out=d - count + 1, operands=(d,)) for d in rest))


def _samples(node: Node) -> tuple[Loop, ...]:
    """The loop over the samples of a call, if no result is a sum over them."""
    if node.op == "pick":
        dim = node.attr("along", "sum")
        return () if dim == "sum" else (Loop(out=int(dim), operands=(0,)),)
    if not node.type.ndim:
        return ()
    operands, results = node.attr("batch", ((), ("sum",)))
    return () if "sum" in results else (Loop(out=0, operands=tuple(operands)),)


def _expand(node: Node) -> tuple[Loop, ...]:
    new, out, at = tuple(node.attr("dims")), [], 0
    for dim in range(node.type.ndim):
        is_new = dim in new
        out.append(Loop(out=dim, operands=(None if is_new else at,)))
        at += 1 if node.attr("keep") or not is_new else 0
    return tuple(out)
