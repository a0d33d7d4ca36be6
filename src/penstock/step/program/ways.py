"""Options of a collective: its algorithm (`algo`) and the element type on the wire (`wire`).

Neither changes a layout, so type inference does not check them. The rules stand here: rewrites ask
before they set an option on a move or on the moves that replace it, and `verified` asks for every
program.
"""

from __future__ import annotations

from penstock.step.program.layouts import DTYPES
from penstock.step.program.nodes import Node

__all__ = ["ALGOS", "COLLECTIVES", "WIRES", "can_do", "can_shrink", "fitting", "misfit", "why_not"]

ALGOS = ("direct", "ring", "native")
WIRES = ("bf16", "f16")
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")
"""Moves with more than one algorithm, which can also send other element types."""
_NATIVE = ("f32", "f64", "i32", "i64")


def can_do(node: Node, way: str) -> bool:
    """Whether a collective can use an algorithm without a change of its values."""
    sent = node.attr("wire") or node.type.dtype
    if node.op not in COLLECTIVES or way not in ALGOS:
        return False
    if way == "native":
        return node.op == "all_reduce" and sent in _NATIVE and sent == node.type.dtype
    is_rounded = DTYPES[sent].is_float and DTYPES[sent].size_bytes < 4
    return way == "direct" or not (node.op != "all_gather" and is_rounded)


def why_not(way: str) -> str:
    """Return why a collective cannot use an algorithm, and which one it can."""
    if way == "native":
        return f"the library has its own for all_reduce of {', '.join(_NATIVE)} only; use direct"
    return "a ring would round sums on each rank; use direct"


def can_shrink(node: Node, dtype: str) -> bool:
    """Whether a move can send its values in fewer bits."""
    held = DTYPES[node.type.dtype]
    is_wider = held.is_float and dtype in WIRES and held.size_bytes > DTYPES[dtype].size_bytes
    return node.op in COLLECTIVES and is_wider


def fitting(node: Node) -> Node:
    """Drop inherited `wire` and `algo` that do not apply to a node."""
    if node.attr("wire") is not None and not can_shrink(node, node.attr("wire")):
        node = node.with_attrs(wire=None)
    if node.attr("algo") is not None and not can_do(node, node.attr("algo")):
        node = node.with_attrs(algo=None)
    return node


def misfit(node: Node) -> str:
    """Return why `wire` or `algo` of a node cannot apply; nothing if they can."""
    wire, way = node.attr("wire"), node.attr("algo")
    if wire is not None and not can_shrink(node, wire):
        return (
            f"{node.name} ({node.op} of {node.type.dtype}) cannot send {wire}; "
            f"wire({node.name!r}, dtype=None) sends values as they are"
        )
    if way is not None and not can_do(node, way):
        sent = f" as {wire}" if wire is not None else ""
        return (
            f"{node.name} ({node.op} of {node.type.dtype}{sent}) cannot go by algo {way!r}: "
            f"{why_not(way)}, or algo({node.name!r}, way=None)"
        )
    return ""
