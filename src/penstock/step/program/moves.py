"""What communication means: how the parts of a value change hands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.step.program.mesh import Mesh
from penstock.step.program.nodes import Node, Program
from penstock.step.program.ops import Array

__all__ = ["moved"]

Held = list[Array]
At = list[tuple[Any, ...]]
"""By rank: the coordinates, dimension by dimension, of what it has."""


def moved(node: Node, inputs: list[Held], program: Program, out_at: At, in_at: list[At]) -> Held:
    """Return what each rank has after a move, a slice, an update or a store."""
    mesh = program.mesh
    if node.op == "update":
        return [_pick(inputs[1][r], in_at[1][r], out_at[r]) for r in range(mesh.num_ranks)]
    if node.op == "store":
        return inputs[0]
    if node.op == "slice":
        return [_pick(inputs[0][r], in_at[0][r], out_at[r]) for r in range(mesh.num_ranks)]
    if node.op == "recv":
        return _received(node, inputs, mesh)
    return _BY_OP[node.op](node, inputs[0], mesh, out_at, in_at[0])


def _pick(held: Array, at: tuple[Any, ...], wanted: tuple[Any, ...]) -> Array:
    """Return the wanted elements of some that a rank has; both by their coordinates."""
    picked = [np.searchsorted(have, want) for have, want in zip(at, wanted, strict=True)]
    out: Array = held[np.ix_(*picked)] if held.ndim else held
    return out


def _reduced(node: Node, addends: list[Array]) -> Array:
    op = str(node.attr("op"))
    together = {"max": np.maximum, "min": np.minimum}.get(op, np.add)
    out: Array = addends[0]
    for addend in addends[1:]:
        out = together(out, addend)
    return out / len(addends) if op == "mean" else out


def _all_reduce(node: Node, held: Held, mesh: Mesh, out_at: At, in_at: At) -> Held:
    out: Held = [held[0]] * mesh.num_ranks
    for group in mesh.groups(*node.axes):
        total = _reduced(node, [held[r] for r in group])
        for rank in group:
            out[rank] = total
    return out


def _reduce_scatter(node: Node, held: Held, mesh: Mesh, out_at: At, in_at: At) -> Held:
    totals = _all_reduce(node, held, mesh, out_at, in_at)
    return [_pick(totals[r], in_at[r], out_at[r]) for r in range(mesh.num_ranks)]


def _all_gather(node: Node, held: Held, mesh: Mesh, out_at: At, in_at: At) -> Held:
    out = []
    for rank in range(mesh.num_ranks):
        whole = np.zeros(tuple(len(at) for at in out_at[rank]), held[rank].dtype)
        seen = np.zeros(whole.shape, np.int64)
        for peer in mesh.group(rank, *node.axes):
            places = [
                np.searchsorted(have, at)
                for have, at in zip(out_at[rank], in_at[peer], strict=True)
            ]
            whole[np.ix_(*places)] = held[peer]
            seen[np.ix_(*places)] += 1
        assert (seen == 1).all(), f"{node.name}: parts overlap or leave gaps"
        out.append(whole)
    return out


def _all_to_all(node: Node, held: Held, mesh: Mesh, out_at: At, in_at: At) -> Held:
    # As if gathered and sliced again; who sends what follows from the coordinates.
    out = []
    for rank in range(mesh.num_ranks):
        mine = np.zeros(tuple(len(at) for at in out_at[rank]), held[rank].dtype)
        for peer in mesh.group(rank, *node.axes):
            both = [
                np.intersect1d(want, have, assume_unique=True)
                for want, have in zip(out_at[rank], in_at[peer], strict=True)
            ]
            to = [np.searchsorted(w, b) for w, b in zip(out_at[rank], both, strict=True)]
            of = [np.searchsorted(h, b) for h, b in zip(in_at[peer], both, strict=True)]
            mine[np.ix_(*to)] = held[peer][np.ix_(*of)]
        out.append(mine)
    return out


def _reduce(node: Node, held: Held, mesh: Mesh, out_at: At, in_at: At) -> Held:
    root = int(node.attr("root"))
    totals = _all_reduce(node, held, mesh, out_at, in_at)
    return [
        total if mesh.coordinate(rank, *node.axes) == root else np.zeros_like(total)
        for rank, total in enumerate(totals)
    ]


def _broadcast(node: Node, held: Held, mesh: Mesh, out_at: At, in_at: At) -> Held:
    root = int(node.attr("root"))
    return [held[mesh.group(rank, *node.axes)[root]] for rank in range(mesh.num_ranks)]


def _send(node: Node, held: Held, mesh: Mesh, out_at: At, in_at: At) -> Held:
    by = int(node.attr("by"))
    out = []
    for rank in range(mesh.num_ranks):
        group = mesh.group(rank, *node.axes)
        sender = mesh.coordinate(rank, *node.axes) - by
        there = 0 <= sender < len(group)
        out.append(held[group[sender]] if there else np.zeros_like(held[rank]))
    return out


def _received(node: Node, inputs: list[Held], mesh: Mesh) -> Held:
    by = int(node.attr("by"))
    sent, first = inputs
    out = []
    for rank in range(mesh.num_ranks):
        sender = mesh.coordinate(rank, *node.axes) - by
        out.append(sent[rank] if 0 <= sender < mesh.size(*node.axes) else first[rank])
    return out


_BY_OP: dict[str, Callable[[Node, Held, Mesh, At, At], Held]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "send": _send,
}
