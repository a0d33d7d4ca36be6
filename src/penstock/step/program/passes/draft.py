"""A program on its way to another one: nodes are written again, one after the other.

Rewrites of the graph all go the same way. They walk over the nodes in their order and copy most of
them; where a value is to be had in another layout they write something else, and whoever read the
old value reads the new one. Types are inferred anew, so a rewrite that is wrong stops here.

Rewrites of the graph come before those that say how it is carried out: what a region holds, and
what was moved over the end of an iteration, stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from penstock.errors import ProgramError
from penstock.step.program.infer import infer
from penstock.step.program.nodes import Attr, Node, Program
from penstock.step.program.types import Type
from penstock.step.program.ways import fitting

__all__ = ["Draft", "above", "below_all", "carried", "renamed", "stem"]

_HOW = ("wire", "algo", "priority")
"""Attributes that say how a move is carried out; the moves that it becomes have those that fit."""


class Draft:
    """The nodes of the program that a rewrite makes, so far."""

    def __init__(self, program: Program, rewrite: str) -> None:
        self.program = program
        self.mesh = program.mesh
        self.rewrite = rewrite
        """What it is called in errors."""
        self.nodes: dict[str, Node] = {}
        self.renamed: dict[str, str] = {}
        """Values of the old program that are called otherwise in the new one."""

    def now(self, name: str) -> str:
        """Return what a value of the old program is called in the new one."""
        return self.renamed.get(name, name)

    def type(self, name: str) -> Type:
        """Return the type of a value of the new program."""
        return self.nodes[name].type

    def inferred(self, node: Node, inputs: Sequence[str]) -> Type:
        """Return the type that a node would have on other values."""
        return infer(node.op, [self.type(i) for i in inputs], dict(node.attrs), self.mesh)

    def copy(self, node: Node, inputs: Sequence[str] | None = None) -> str:
        """Write a node of the old program again, on the values that it reads now."""
        read = [self.now(i) for i in node.inputs] if inputs is None else list(inputs)
        made = self.inferred(node, read)
        self.nodes[node.name] = replace(node, inputs=tuple(read), type=made)
        return node.name

    def add(self, op: str, inputs: Sequence[str], name: str, /, *, of: Node, **attrs: Attr) -> str:
        """Write a new node, named anew where the name is taken, and return its name."""
        made = infer(op, [self.type(i) for i in inputs], attrs, self.mesh)
        free = self.fresh(name)
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

    def fresh(self, name: str) -> str:
        """Return a name that no value has, before or after, like the one given."""
        number, free = 1, name
        while free in self.nodes or free in self.program:
            number += 1
            free = f"{name}.{number}"
        return free

    def finished(self, outputs: Iterable[str], gone: Collection[str] = ()) -> Program:
        """Return the new program, if regions and turns of the loop are what they were."""
        out = replace(
            self.program, nodes=tuple(self.nodes.values()), outputs=tuple(outputs), mesh=self.mesh
        )
        return _scheduled_alike(out, self.program, self.rewrite, set(gone))


def renamed(program: Program, names: Mapping[str, str]) -> Program:
    """Return the program with some values called otherwise."""
    nodes = [
        replace(node, name=names.get(node.name, node.name), inputs=_called(node.inputs, names))
        for node in program.nodes
    ]
    return program.with_nodes(nodes, outputs=_called(program.outputs, names))


def _called(values: tuple[str, ...], names: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(names.get(value, value) for value in values)


def stem(node: Node) -> str:
    """Return what the values that are made of a node are named after."""
    return node.label or node.name


def carried(node: Node) -> dict[str, Attr]:
    """Return the attributes that go over to the moves that a move becomes, where they fit."""
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
    """Refuse a change of what a region holds, or of what is done ahead of its iteration."""
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
                    "is about; rewrite the graph first, then say how it is carried out"
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
