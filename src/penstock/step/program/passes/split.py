"""Split: communication as two halves, between which other work can find a place.

    all_reduce            reduce_scatter ; all_gather        the same bytes, and slices in between
    all_reduce            reduce ; broadcast                 one rank has the sum first
    send                  slice ; send ; all_gather          each of T ranks sends a part of T
    load                  load of a slice ; all_gather       each of T ranks reads a part of T

The last two are for values that another axis holds replicated: T ranks would send or read the same.
A broadcast has no split: only its root has the value, and no other rank can slice it for nothing.
"""

from __future__ import annotations

from penstock.errors import ProgramError
from penstock.step.program.layouts import S
from penstock.step.program.nodes import Node, Program
from penstock.step.program.passes.draft import Draft, carried, stem
from penstock.step.program.types import Type

__all__ = ["split"]


def split(
    program: Program,
    name: str,
    *,
    into: str = "scatter",
    dim: int | None = None,
    axis: str | None = None,
    root: int = 0,
) -> Program:
    """Return the program with one all-reduce, send or load in two halves.

    `dim` is the dimension that is sliced, by default the first that can be. `axis` is the axis that
    holds a sent or loaded value replicated.
    """
    node = program.find(name, "all_reduce", "send", "load")
    if into not in ("scatter", "root") or (into == "root" and node.op != "all_reduce"):
        raise ProgramError(
            f"split of {node.name} ({node.op}) into {into!r}; there are 'scatter', and 'root' for "
            "an all_reduce"
        )
    draft = Draft(program, f"split of {node.name}")
    if into == "root":
        return draft.replace(node.name, lambda node: _at_root(draft, node, root))
    if node.op == "all_reduce":
        return draft.replace(node.name, lambda node: _scattered(draft, node, dim))
    over = _replicated_axis(program, node, axis)
    half = _sent_sliced if node.op == "send" else _loaded_sliced
    return draft.replace(node.name, lambda node: half(draft, node, over, dim))


def _scattered(draft: Draft, node: Node, dim: int | None) -> str:
    (source,) = [draft.now(i) for i in node.inputs]
    attrs = {"axis": node.attr("axis"), **carried(node)}
    at = _dim(draft, draft.type(source), node.axes, dim, node)
    how = {"dim": at, "op": node.attr("op"), **attrs}
    part = draft.add("reduce_scatter", [source], f"{stem(node)}.scatter", of=node, **how)
    return draft.add("all_gather", [part], f"{stem(node)}.gather", of=node, **attrs)


def _at_root(draft: Draft, node: Node, root: int) -> str:
    if len(node.axes) > 1:
        raise ProgramError(
            f"split of {node.name} into a reduce and a broadcast along {len(node.axes)} axes; "
            "hier splits it by axis first"
        )
    (source,) = [draft.now(i) for i in node.inputs]
    attrs = {"axis": node.axes[0], "root": root, **carried(node)}
    name = stem(node)
    at = draft.add("reduce", [source], f"{name}.reduce", of=node, op=node.attr("op"), **attrs)
    return draft.add("broadcast", [at], f"{name}.broadcast", of=node, **attrs)


def _sent_sliced(draft: Draft, node: Node, axis: str, dim: int | None) -> str:
    (source,) = [draft.now(i) for i in node.inputs]
    made = draft.nodes[source]
    gathered = made.op == "all_gather" and made.axes == (axis,)
    if gathered and dim in (None, draft.type(made.inputs[0]).layout(axis).dim):
        part = made.inputs[0]  # what was gathered is there in slices already
    else:
        at = _dim(draft, draft.type(source), (axis,), dim, node)
        part = draft.add("slice", [source], f"{stem(node)}.slice", of=node, axis=axis, dim=at)
    sent = draft.copy(node, [part])
    return draft.add("all_gather", [sent], f"{stem(node)}.gather", of=node, axis=axis)


def _loaded_sliced(draft: Draft, node: Node, axis: str, dim: int | None) -> str:
    at = _dim(draft, node.type, (axis,), dim, node)
    read = draft.copy(node.with_attrs(type=node.type.with_layout(axis, S(at))))
    return draft.add("all_gather", [read], f"{stem(node)}.gather", of=node, axis=axis)


def _replicated_axis(program: Program, node: Node, axis: str | None) -> str:
    """Return the axis whose ranks all send or load the same."""
    if axis is not None:
        program.mesh.size(axis)
    free = [
        name
        for name in program.mesh.names
        if node.type.layout(name).kind == "R" and name not in node.axes
    ]
    found = [name for name in free if program.mesh.size(name) > 1] or free
    if axis is None and len(found) == 1:
        return found[0]
    if axis is None or axis not in free:
        raise ProgramError(
            f"split of {node.name} ({node.type}) along axis {axis!r}: its ranks must all "
            f"{node.op} the same; those that do are {', '.join(free) or 'of no axis'}"
        )
    return axis


def _dim(draft: Draft, made: Type, axes: tuple[str, ...], dim: int | None, node: Node) -> int:
    """Return the dimension to slice: the given one, or the first with a part for every rank."""
    num_ranks = draft.mesh.size(*axes)
    if dim is not None:
        if not 0 <= dim < made.ndim:
            raise ProgramError(f"split of {node.name} along dimension {dim}; it has {made.ndim}")
        return dim
    if not made.ndim:
        raise ProgramError(f"split of {node.name}, a scalar: it has no parts; leave it whole")
    taken = {layout.dim for _, layout in made.layouts if layout.kind == "S"}
    free = [d for d in range(made.ndim) if d not in taken] or list(range(made.ndim))
    return next((d for d in free if made.shape[d] >= num_ranks), free[0])
