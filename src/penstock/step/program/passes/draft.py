"""A program on its way to another one: nodes are written again, one after the other.

Rewrites of the graph all go the same way. They walk over the nodes in their order and copy most of
them; where a value gets another layout they write other nodes, and readers of the old value read
the new one. Types are inferred anew, so a wrong rewrite stops here.

Rewrites of the graph come first, those that say how it is carried out come later: a graph rewrite
may change neither the nodes of a region nor those moved over the end of an iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from penstock.errors import ProgramError
from penstock.step.program.infer import infer
from penstock.step.program.nodes import Attr, Node, Program, free_name
from penstock.step.program.types import Type
from penstock.step.program.ways import fitting

__all__ = ["Draft", "above", "below_all", "carried", "renamed", "stem"]

_HOW = ("wire", "algo", "priority")
"""How a move is carried out. The moves that replace it inherit what can apply to them."""


class Draft:
    """The nodes of the program that a rewrite makes, so far."""

    def __init__(self, program: Program, rewrite: str) -> None:
        self.program = program
        self.mesh = program.mesh
        self.rewrite = rewrite
        """Its name in errors."""
        self.nodes: dict[str, Node] = {}
        self.renamed: dict[str, str] = {}
        """By name in the old program: the name in the new one, where that differs."""

    def now(self, name: str) -> str:
        """Return the name in the new program of a value of the old one."""
        return self.renamed.get(name, name)

    def type(self, name: str) -> Type:
        """Return the type of a value of the new program."""
        return self.nodes[name].type

    def inferred(self, node: Node, inputs: Sequence[str]) -> Type:
        """Return the type that a node would have with other operands."""
        return infer(node.op, [self.type(i) for i in inputs], dict(node.attrs), self.mesh)

    def copy(self, node: Node, inputs: Sequence[str] | None = None) -> str:
        """Write a node of the old program again, with its operands in the new program."""
        read = [self.now(i) for i in node.inputs] if inputs is None else list(inputs)
        made = self.inferred(node, read)
        self.nodes[node.name] = replace(node, inputs=tuple(read), type=made)
        return node.name

    def add(self, op: str, inputs: Sequence[str], name: str, /, *, of: Node, **attrs: Attr) -> str:
        """Write a new node and return its name, which has a number where it was taken."""
        made = infer(op, [self.type(i) for i in inputs], attrs, self.mesh)
        free = free_name(name, self.nodes, self.program)
        node = Node(
            name=free,
            op=op,
            inputs=tuple(inputs),
            attrs=tuple(attrs.items()),
            type=made,
            label=stem(of),
            where=of.where,
        )
        self.nodes[free] = fitting(node)
        return free

    def replace(self, name: str, write: Callable[[Node], str]) -> Program:
        """Return the program with one node written in another way, all others copied."""
        for node in self.program.nodes:
            if node.name == name:
                self.renamed[name] = write(node)
            else:
                self.copy(node)
        return self.finished()

    def finished(self, outputs: Iterable[str] | None = None, gone: Collection[str] = ()) -> Program:
        """Return the new program, if its regions and what is done ahead are as they were."""
        returned = map(self.now, self.program.outputs) if outputs is None else outputs
        out = replace(
            self.program, nodes=tuple(self.nodes.values()), outputs=tuple(returned), mesh=self.mesh
        )
        return _scheduled_alike(out, self.program, self.rewrite, set(gone))


def renamed(program: Program, names: Mapping[str, str]) -> Program:
    """Return the program with other names for some values."""
    nodes = [
        replace(node, name=names.get(node.name, node.name), inputs=_called(node.inputs, names))
        for node in program.nodes
    ]
    return program.with_nodes(nodes, outputs=_called(program.outputs, names))


def _called(values: tuple[str, ...], names: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(names.get(value, value) for value in values)


def stem(node: Node) -> str:
    """Return the beginning of the names of values that replace a node."""
    return node.label or node.name


def carried(node: Node) -> dict[str, Attr]:
    """Return the attributes of a move that the moves which replace it inherit."""
    return {key: value for key, value in node.attrs if key in _HOW}


def above(program: Program, name: str) -> set[str]:
    """Return a value and everything that it is made of."""
    out = {name}
    for node in reversed(program.nodes):
        if node.name in out:
            out.update(node.inputs)
    return out


def below_all(program: Program, names: Iterable[str]) -> set[str]:
    """Return some values and everything that is made of them."""
    out = set(names)
    for node in program.nodes:
        if any(i in out for i in node.inputs):
            out.add(node.name)
    return out


def _scheduled_alike(out: Program, before: Program, rewrite: str, gone: set[str]) -> Program:
    """Refuse to change nodes of a region, or nodes that are done ahead of their iteration."""
    # Kernels, chunks and buckets were checked for these nodes and types when they were made.
    regions = [
        replace(region, nodes=tuple(n for n in region.nodes if n not in gone))
        for region in before.regions
    ]
    for region in regions:
        read = {i for name in region.nodes for i in before[name].inputs}
        for name in sorted({*region.nodes, *read}):
            if not _is_same(name, out.by_name, before):
                raise ProgramError(
                    f"{rewrite} would change {name}, which the {region.kind} region {region.name} "
                    "has or reads; rewrite the graph first, then say how it is carried out"
                )
    for node in before.nodes:
        if node.attr("ahead") and node.name not in gone and out.by_name.get(node.name) != node:
            raise ProgramError(
                f"{rewrite} would change {node.name}, which is done {node.attr('ahead')} "
                "iterations ahead; rewrite the graph first, then rotate"
            )
    return replace(out, regions=tuple(region for region in regions if region.nodes))


def _is_same(name: str, now: Mapping[str, Node], before: Program) -> bool:
    then, node = before[name], now.get(name)
    return node is not None and (node.op, node.inputs, node.type) == (
        then.op,
        then.inputs,
        then.type,
    )
