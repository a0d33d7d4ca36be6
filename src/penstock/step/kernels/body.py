"""What a kernel computes, taken out of its program and normalised.

Numbers that depend on scalars only are computed once a call, on the host, in float64; the rest are
values with one of four *reaches* within the block that a kernel works on:

    full   an element for each element of the block
    row    one for each row: the result of a reduction along the last dimension
    col    one for each column, the same for all rows (a bias)
    one    one for the whole block: a sum over everything, or a tensor without dimensions

A kernel whose values are full or one is *flat*: its block can be seen as one run of elements. One
with rows and columns is *rows*. Others (*loose*) have shapes that are left to torch.

Updates, slices and casts between floats compute nothing here; they are other names of the same
value. Communication may stand at the edges: a reduction at the beginning (*addends*: one tensor for
each rank goes in) and a gather at the end (*copies*: the result is written to one for each rank).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from penstock.errors import ProgramError
from penstock.step.dtypes import computed
from penstock.step.program.nodes import Node, Program
from penstock.step.program.ops import OPS
from penstock.step.program.types import Type

__all__ = ["KernelBody", "body_of"]

_REDUCING = ("reduce_scatter", "all_reduce")
_GATHERING = ("all_gather", "broadcast")
_LOOSE = ("transpose", "unflatten", "flatten", "matmul")
_NAMES_ONLY = ("update", "slice", "store")


@dataclass(frozen=True, kw_only=True)
class KernelBody:
    """The values of a kernel and how they are made."""

    name: str
    inputs: tuple[str, ...]
    """Tensors from outside, in the order of the program."""
    scalars: tuple[str, ...]
    """Scalars of the program that are needed."""
    host: tuple[Node, ...]
    """Arithmetic on scalars, in order."""
    nodes: tuple[Node, ...]
    """Operations on tensors, in order; inputs of nodes are resolved to values."""
    stores: tuple[tuple[str, str], ...]
    """The results: the name outside, and the value."""
    addends: tuple[tuple[str, str], ...]
    """Inputs with one tensor for each rank, and the operation that reduces them."""
    copies: frozenset[str]
    """Outputs that are written to one tensor for each rank."""
    targets: tuple[tuple[str, str], ...]
    """Outputs that replace a state, and which."""
    types: dict[str, Type]
    """The type of every value, by name."""
    defaults: tuple[tuple[str, float], ...]

    @cached_property
    def by_name(self) -> dict[str, Node]:
        """The nodes that compute."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def host_names(self) -> frozenset[str]:
        """Values that are numbers on the host."""
        return frozenset([*self.scalars, *(node.name for node in self.host)])

    @cached_property
    def consts(self) -> dict[str, float]:
        """The numbers that are written in the program; they stand in the text of a kernel."""
        return {node.name: node.attr("value") for node in self.host if node.op == "const"}

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the results."""
        return tuple(name for name, _ in self.stores)

    @cached_property
    def full(self) -> tuple[int, ...]:
        """The shape of the whole of which a block is a part."""
        shapes = [self.types[name].shape for name in [*self.inputs, *self.by_name]]
        return max(shapes, key=lambda s: (len(s), math.prod(s)), default=())

    @cached_property
    def reach(self) -> dict[str, str]:
        """The reach of each value; empty for a loose kernel."""
        return _reaches(self)

    @cached_property
    def kind(self) -> str:
        """Flat, rows or loose."""
        if not self.reach or not self.full:
            return "loose"
        has_rows = not set(self.reach.values()) <= {"full", "one", "host"}
        if not has_rows and not any(node.op == "softmax" for node in self.nodes):
            return "flat"
        # A sum over everything and one for each row would need two ways of cutting the block.
        return "loose" if any(self.is_total(node) for node in self.nodes) else "rows"

    def is_total(self, node: Node) -> bool:
        """Whether a node reduces the whole block to one value."""
        return OPS[node.op].kind == "reduce" and self.reach[node.name] == "one"

    @cached_property
    def numbers(self) -> tuple[str, ...]:
        """The numbers of the host that are passed to a kernel, a seed as two halves, in order."""
        seeds = {node.inputs[1] for node in self.nodes if node.op == "dropout"}
        read = {i for n in self.nodes for i in (n.inputs[:1] if n.op == "dropout" else n.inputs)}
        read |= {value for _, value in self.stores}
        out: list[str] = []
        for name in [*self.scalars, *(node.name for node in self.host)]:
            if name in seeds:
                out += [f"{name} low", f"{name} high"]
            if name in read and name not in self.consts:
                out.append(name)
        return tuple(out)

    @cached_property
    def has_dropout(self) -> bool:
        """Whether it has to know the position of its block in the whole value."""
        return any(node.op == "dropout" for node in self.nodes)

    @cached_property
    def strays(self) -> tuple[str, ...]:
        """Results of dropout with another shape than the block, in which they have no position."""
        drops = [node for node in self.nodes if node.op == "dropout"]
        return tuple(node.name for node in drops if node.type.shape != self.full)

    @cached_property
    def is_wide(self) -> bool:
        """Whether tensors of 64-bit floats are computed."""
        names = [*self.inputs, *self.by_name]
        return any(self.types[name].dtype == "f64" and self.types[name].ndim for name in names)

    def value_of(self, load: str) -> str:
        """Return the value that a load is: an input, or what an earlier pass has stored."""
        return load if load in self.reach else dict(self.stores)[load]

    def dtype(self, name: str) -> str:
        """Return the element type in which a value is computed."""
        made = self.types[name]
        # Numbers do not widen tensors, and a sum of a narrow tensor is a number in that sense.
        if made.dtype == "f64" and not made.ndim and not self.is_wide:
            return "f32"
        return computed(made.dtype)


# -- from a program ----------------------------------------------------------------------------


def body_of(
    program: Program, nodes: Sequence[str], outputs: Sequence[str] | None = None
) -> KernelBody:
    """Return what some nodes of a program compute together.

    `outputs` are its results; by default the values that other nodes read, that the program returns
    and that replace states.
    """
    return _Maker(program, nodes, outputs).body()


class _Maker:
    """A body being made."""

    def __init__(
        self, program: Program, nodes: Sequence[str], outputs: Sequence[str] | None
    ) -> None:
        self._program = program
        inside = {program[name].name for name in nodes}
        self._inside = [node for node in program.nodes if node.name in inside]
        self._names = inside
        self._outputs = tuple(outputs) if outputs is not None else self._leaving()
        self._numbers = _numbers(program)
        self._source: dict[str, str] = {}
        self._addends: dict[str, str] = {}
        self._copies: set[str] = set()
        for name in self._outputs:
            if name not in inside:
                raise ProgramError(f"a kernel of {', '.join(nodes)} cannot return {name}")

    def _leaving(self) -> tuple[str, ...]:
        program, out = self._program, []
        for node in self._inside:
            users = [user for user in program.users[node.name] if user not in self._names]
            if users or node.op == "update" or node.name in program.outputs:
                out.append(node.name)
        return tuple(out)

    def body(self) -> KernelBody:
        kept = [kept for node in self._inside if (kept := self._kept(node)) is not None]
        stores = tuple((name, self._resolved(name)) for name in self._outputs)
        kept = _needed(kept, [value for _, value in stores])
        read = {name for node in kept for name in node.inputs} | {value for _, value in stores}
        made = {node.name for node in kept}
        host = self._host_of(read)
        outside = read - made - self._numbers
        order = [node.name for node in self._program.nodes]
        scalars = (read & self._numbers) | {i for node in host for i in node.inputs}
        return KernelBody(
            name=self._program.name,
            inputs=tuple(name for name in order if name in outside),
            scalars=tuple(n for n in order if n in scalars and self._op(n) == "scalar"),
            host=host,
            nodes=tuple(kept),
            stores=stores,
            addends=tuple(self._addends.items()),
            copies=frozenset(name for name in self._outputs if name in self._copies),
            targets=tuple(
                (name, str(self._program[name].attr("target")))
                for name in self._outputs
                if self._op(name) == "update"
            ),
            types={name: self._program[name].type for name in read | made | set(self._outputs)},
            defaults=self._program.defaults,
        )

    def _op(self, name: str) -> str:
        return self._program[name].op

    def _resolved(self, name: str) -> str:
        return self._source.get(name, name)

    def _kept(self, node: Node) -> Node | None:
        """Return a node on the values that it reads; None if it only renames a value."""
        if node.name in self._numbers:
            return None
        inputs = tuple(self._resolved(name) for name in node.inputs)
        if node.op in _NAMES_ONLY or (node.op == "cast" and self._is_same(node)):
            value = inputs[1] if node.op == "update" else inputs[0]
            self._source[node.name] = value
            if node.inputs[1 if node.op == "update" else 0] in self._copies:
                self._copies.add(node.name)
            return None
        if OPS[node.op].kind == "move":
            self._edge(node, inputs[0])
            return None
        if OPS[node.op].kind not in ("pointwise", "reduce") and node.op not in _LOOSE:
            raise ProgramError(f"{node.op} ({node.name}) cannot be part of a kernel; leave it out")
        for name in node.inputs:
            if name in self._copies:
                raise ProgramError(
                    f"{node.name} reads {name}, which is complete only when all ranks have "
                    "gathered it; a kernel may gather at its end only"
                )
        return Node(name=node.name, op=node.op, inputs=inputs, attrs=node.attrs, type=node.type)

    def _is_same(self, node: Node) -> bool:
        """Whether a cast changes nothing inside a kernel: narrow floats are computed wide."""
        before = self._program[node.inputs[0]].type.dtype
        return computed(before) == computed(node.type.dtype)

    def _edge(self, node: Node, value: str) -> None:
        self._source[node.name] = value
        if node.op in _REDUCING and value == node.inputs[0] and value not in self._names:
            self._addends[value] = str(node.attr("op"))
        elif node.op in _GATHERING:
            self._copies.add(node.name)
        else:
            raise ProgramError(
                f"{node.op} ({node.name}) inside a kernel: it may begin with a reduction of "
                "what goes in and end with a gather"
            )

    def _host_of(self, read: set[str]) -> tuple[Node, ...]:
        wanted = {name for name in read if name in self._numbers}
        out = []
        for node in reversed(self._program.nodes):
            if node.name in wanted and node.op != "scalar":
                out.append(node)
                wanted.update(node.inputs)
        return tuple(reversed(out))


def _numbers(program: Program) -> set[str]:
    """Return the values of a program that depend on scalars only."""
    out: set[str] = set()
    for node in program.nodes:
        is_leaf = node.op in ("scalar", "const")
        is_made = OPS[node.op].kind == "pointwise" and all(name in out for name in node.inputs)
        if is_leaf or (is_made and not node.type.ndim):
            out.add(node.name)
    return out


def _needed(nodes: list[Node], roots: list[str]) -> list[Node]:
    wanted, out = set(roots), []
    for node in reversed(nodes):
        if node.name in wanted:
            out.append(node)
            wanted.update(node.inputs)
    return out[::-1]


# -- reaches -----------------------------------------------------------------------------------


def _reaches(body: KernelBody) -> dict[str, str]:
    out: dict[str, str] = dict.fromkeys(body.host_names, "host")
    for name in body.inputs:
        out[name] = _input_reach(body.types[name].shape, body.full)
    for node in body.nodes:
        out[node.name] = _node_reach(node, [out[name] for name in node.inputs], body)
    return {} if "loose" in out.values() else out


def _input_reach(shape: tuple[int, ...], full: tuple[int, ...]) -> str:
    if shape == full:
        return "full"
    if not shape or math.prod(shape) == 1:
        return "one" if not shape else "loose"
    if len(full) >= 2 and shape == (*full[:-1], 1):
        return "row"
    if len(full) >= 2 and shape[-1] == full[-1] and math.prod(shape[:-1]) == 1:
        return "col"
    return "loose"


def _node_reach(node: Node, reaches: list[str], body: KernelBody) -> str:
    full, shape = body.full, node.type.shape
    if "loose" in reaches or node.op in _LOOSE:
        return "loose"
    if OPS[node.op].kind == "reduce":
        return _reduced_reach(node, reaches[0], body)
    counted = {reach for reach in reaches if reach != "host"}
    if node.op == "dropout":
        counted = {reaches[0]}
        if reaches[0] != "full":
            return "loose"
    if "full" in counted or counted == {"row", "col"}:
        # A row value without its dimension of 1 would be broadcast along columns.
        lost = [n for n, r in zip(node.inputs, reaches, strict=True) if r == "row"]
        kept = all(body.types[name].ndim == len(full) for name in lost)
        return "full" if shape == full and kept else "loose"
    if counted <= {"one"}:
        return "one"
    counted -= {"one"}
    # Rows with their dimension of 1 and rows without it broadcast to a square, not to rows.
    rows = [body.types[n].shape for n, r in zip(node.inputs, reaches, strict=True) if r == "row"]
    return counted.pop() if len(counted) == 1 and {*rows} <= {shape} else "loose"


def _reduced_reach(node: Node, reach: str, body: KernelBody) -> str:
    last = len(body.full) - 1
    if reach != "full":
        return "loose"
    if node.op == "softmax":
        return "full" if node.attr("dim") == last else "loose"
    dims = tuple(node.attr("dims"))
    if dims == tuple(range(last + 1)):
        return "one" if not node.attr("keep") else "loose"
    return "row" if dims == (last,) else "loose"
