"""What communication means: how the parts of a value change hands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.step.program.mesh import Mesh
from penstock.step.program.nodes import Node
from penstock.step.program.ops import Array

__all__ = ["At", "Held", "Place", "moved", "reduced"]

Held = list[Array]
"""What each rank has of a value."""
Place = tuple[Any, ...]
"""Coordinates in the whole value, dimension by dimension."""
At = list[Place]
"""By rank: where the elements lie that it has."""


def moved(node: Node, inputs: list[Held], mesh: Mesh, out_at: At, in_at: list[At]) -> Held:
    """Return what each rank has after a move, a slice, an update or a store."""
    if node.op == "store":
        return inputs[0]
    if node.op == "recv":
        return _received(node, inputs, mesh)
    if node.op in ("slice", "update"):
        return _picked(inputs[-1], in_at[-1], out_at)
    return _BY_OP[node.op](node, inputs[0], mesh, out_at, in_at[0])


def reduced(addends: Sequence[Array], op: str) -> Array:
    """Return the sum, mean, maximum or minimum of what several ranks have, in their order."""
    together = {"max": np.maximum, "min": np.minimum}.get(op, np.add)
    out: Array = addends[0]
    for addend in addends[1:]:
        out = together(out, addend)
    return out / len(addends) if op == "mean" else out


def _picked(held: Held, at: At, wanted: At) -> Held:
    """Return the wanted elements of those that each rank has; both by their coordinates."""
    out = []
    for one, have, want in zip(held, at, wanted, strict=True):
        found = [np.searchsorted(h, w) for h, w in zip(have, want, strict=True)]
        out.append(one[np.ix_(*found)] if one.ndim else one)
    return out


def _all_reduce(node: Node, held: Held, mesh: Mesh, out_at: At, in_at: At) -> Held:
    out: Held = [held[0]] * mesh.num_ranks
    for group in mesh.groups(*node.axes):
        total = reduced([held[r] for r in group], str(node.attr("op")))
        for rank in group:
            out[rank] = total
    return out


def _reduce_scatter(node: Node, held: Held, mesh: Mesh, out_at: At, in_at: At) -> Held:
    return _picked(_all_reduce(node, held, mesh, out_at, in_at), in_at, out_at)


def _exchanged(node: Node, held: Held, mesh: Mesh, out_at: At, in_at: At) -> Held:
    """Give each rank the elements that it is to have; who sends them follows from coordinates."""
    out = []
    for rank in range(mesh.num_ranks):
        mine = np.zeros(tuple(len(at) for at in out_at[rank]), held[rank].dtype)
        seen = np.zeros(mine.shape, np.int64)
        for peer in mesh.group(rank, *node.axes):
            pairs = list(zip(out_at[rank], in_at[peer], strict=True))
            both = [np.intersect1d(want, have, assume_unique=True) for want, have in pairs]
            to = np.ix_(*(np.searchsorted(w, b) for (w, _), b in zip(pairs, both, strict=True)))
            of = np.ix_(*(np.searchsorted(h, b) for (_, h), b in zip(pairs, both, strict=True)))
            mine[to] = held[peer][of]
            seen[to] += 1
        assert (seen == 1).all(), f"{node.name}: parts overlap or leave gaps"
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
    senders = _senders(node, mesh)
    return [
        np.zeros_like(one) if sender is None else held[sender]
        for one, sender in zip(held, senders, strict=True)
    ]


def _received(node: Node, inputs: list[Held], mesh: Mesh) -> Held:
    senders = _senders(node, mesh)
    return [
        first if sender is None else sent
        for sent, first, sender in zip(*inputs, senders, strict=True)
    ]


def _senders(node: Node, mesh: Mesh) -> list[int | None]:
    """Return by rank who sends to it; None for those at the end, to whom nobody sends."""
    out: list[int | None] = []
    for rank in range(mesh.num_ranks):
        group = mesh.group(rank, *node.axes)
        at = mesh.coordinate(rank, *node.axes) - int(node.attr("by"))
        out.append(group[at] if 0 <= at < len(group) else None)
    return out


_BY_OP: dict[str, Callable[[Node, Held, Mesh, At, At], Held]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _exchanged,
    "all_to_all": _exchanged,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "send": _send,
}
