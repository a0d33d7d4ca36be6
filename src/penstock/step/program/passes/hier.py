"""Hier: a collective along two axes, one after the other, so that the slow one carries less.

An all-reduce among nodes of T ranks each sends everything over the network T times. In three steps,
reduce-scatter inside the node, all-reduce of a T-th between nodes, all-gather inside, each rank
sends a T-th of it over the network. `factor` makes the two axes of one, ranks stay what they are.
"""

from __future__ import annotations

import math
from dataclasses import replace

from penstock.errors import ProgramError
from penstock.step.program.layouts import Layout
from penstock.step.program.mesh import Mesh
from penstock.step.program.nodes import Attr, Node, Program
from penstock.step.program.passes.draft import Draft, carried, stem
from penstock.step.program.types import Type

__all__ = ["factor", "hier"]

_SPLIT_ALONE = ("all_reduce", "reduce_scatter", "all_gather")
"""Moves that may go along several axes at once."""


def hier(program: Program, name: str, *, inner: str | None = None, dim: int = 0) -> Program:
    """Return the program with one all-reduce or all-gather along two axes done axis by axis.

    `inner` is the axis whose ranks are near each other, by default the last one. `dim` is the
    dimension of an all-reduce that is sliced there.
    """
    node = program.find(name, "all_reduce", "all_gather")
    if len(node.axes) < 2:
        raise ProgramError(
            f"hier of {node.name} along one axis, {node.axes[0]!r}; factor makes two axes of it"
        )
    near = inner or max(node.axes, key=program.mesh.names.index)
    if near not in node.axes:
        raise ProgramError(f"hier of {node.name} with {near!r} inside; it goes along {node.axes}")
    draft = Draft(program, f"hier of {node.name}")
    if node.op == "all_gather":
        return draft.replace(node.name, lambda node: _gathered(draft, node))
    return draft.replace(node.name, lambda node: _reduced(draft, node, near, dim))


def _reduced(draft: Draft, node: Node, near: str, dim: int) -> str:
    far = tuple(axis for axis in node.axes if axis != near)
    outer = far if len(far) > 1 else far[0]
    name, op = stem(node), node.attr("op")
    source = draft.now(node.inputs[0])
    if not 0 <= dim < draft.type(source).ndim:
        raise ProgramError(
            f"hier of {node.name} along dimension {dim}; it has {draft.type(source).ndim}"
        )
    how = carried(node)
    scatter = {"axis": near, "dim": dim, "op": op, **how}
    part = draft.add("reduce_scatter", [source], f"{name}.scatter", of=node, **scatter)
    total = draft.add("all_reduce", [part], f"{name}.reduce", of=node, axis=outer, op=op, **how)
    return draft.add("all_gather", [total], f"{name}.gather", of=node, axis=near, **how)


def _gathered(draft: Draft, node: Node) -> str:
    # The axis that cut last joins first: only its parts lie beside each other.
    found = draft.now(node.inputs[0])
    for axis in sorted(node.axes, key=draft.mesh.names.index, reverse=True):
        name = f"{stem(node).removesuffix('.gather')}.gather.{axis}"
        found = draft.add("all_gather", [found], name, of=node, axis=axis, **carried(node))
    return found


# -- one axis as two ---------------------------------------------------------------------------


def factor(program: Program, axis: str, *into: tuple[str, int]) -> Program:
    """Return the program on a mesh in which one axis has become several, slowest first.

    `factor("dp", ("node", 2), ("local", 4))`: what went along dp goes along both.
    """
    mesh = program.mesh
    size = mesh.size(axis)
    product = math.prod(length for _, length in into)
    if len(into) < 2 or product != size:
        raise ProgramError(
            f"factor of axis {axis!r} with {size} ranks into {dict(into)}, which makes {product}; "
            f"give two or more names with sizes whose product is {size}"
        )
    axes: list[tuple[str, int]] = []
    for one in mesh.axes:
        axes += into if one[0] == axis else [one]
    work = _Factoring(program, axis, tuple(name for name, _ in into), Mesh(axes=tuple(axes)))
    return work.run()


class _Factoring(Draft):
    """One walk over a program, in which an axis becomes several."""

    def __init__(self, program: Program, axis: str, names: tuple[str, ...], mesh: Mesh) -> None:
        super().__init__(program, f"factor of axis {axis!r}")
        self.mesh, self._axis, self._names = mesh, axis, names

    def run(self) -> Program:
        if self.program.regions:
            raise ProgramError(
                f"{self.rewrite} of a program with regions; rewrite the graph first, then "
                "say how it is carried out"
            )
        for node in self.program.nodes:
            if self._axis not in node.axes:
                self.copy(self._with_types(node))
            elif node.op == "slice":
                self.renamed[node.name] = self._sliced(node)
            elif node.op in _SPLIT_ALONE:
                self.copy(node.with_attrs(axis=self._axes(node.axes)))
            else:
                raise ProgramError(
                    f"{self.rewrite}: {node.name} is a {node.op}, which goes along one axis"
                )
            self._check(node, self.now(node.name))
        return self.finished()

    def _axes(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        out: list[str] = []
        for axis in axes:
            out += self._names if axis == self._axis else [axis]
        return tuple(out)

    def _type(self, made: Type) -> Type:
        layouts: dict[str, Layout] = {}
        for axis, layout in made.layouts:
            layouts |= dict.fromkeys(self._axes((axis,)), layout)
        return replace(made, layouts=tuple(layouts.items()))

    def _with_types(self, node: Node) -> Node:
        attrs: dict[str, Attr] = {}
        for key, value in node.attrs:
            if isinstance(value, Type):
                attrs[key] = self._type(value)
            elif isinstance(value, tuple) and any(isinstance(one, Type) for one in value):
                attrs[key] = tuple(self._type(o) if isinstance(o, Type) else o for o in value)
        return node.with_attrs(**attrs)

    def _sliced(self, node: Node) -> str:
        found, last = self.now(node.inputs[0]), self._names[-1]
        for axis in self._names:
            name = node.name if axis == last else f"{stem(node)}.{axis}"
            attrs: dict[str, Attr] = {"axis": axis, "dim": node.attr("dim")}
            found = self.add("slice", [found], name, of=node, **attrs)
        return found

    def _check(self, node: Node, now: str) -> None:
        """Refuse if a rank's part of a value changes: parts of uneven parts may differ."""
        mesh, made = self.program.mesh, self.type(now)
        for rank in range(mesh.num_ranks):
            then, here = node.type.bounds(mesh, rank), made.bounds(self.mesh, rank)
            is_empty = not _elements(then) and not _elements(here)
            if then != here and not is_empty:
                raise ProgramError(
                    f"{self.rewrite}: rank {rank} has {then} of {node.name} and would have "
                    f"{here}; lengths that {mesh.size(self._axis)} divides keep their parts"
                )


def _elements(bounds: tuple[tuple[int, int], ...]) -> int:
    return math.prod(last - first for first, last in bounds)
