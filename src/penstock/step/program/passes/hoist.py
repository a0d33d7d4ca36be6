"""Hoist: communication moves above the computations that made what it moves.

The inverse of sinking, and useful where fewer bytes are sent above: the gather of a cast to float32
sends twice the bytes of the cast of a gather, and images that were loaded as bytes grow fourfold
when they become numbers.

    y = all_gather(f(x, r))       ->      y = f(all_gather(x), r)
    y = all_reduce(f(x))          ->      y = f(all_reduce(x))          f linear
    y = slice(f(x))               ->      y = f(slice(x))

A slice goes above other computations and above moves along other axes, so that they compute and
send the slice only. Other readers of f(x) still read f(x).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from penstock.errors import ProgramError
from penstock.step.program.layouts import R
from penstock.step.program.nodes import Attr, Node, Program
from penstock.step.program.ops import OPS
from penstock.step.program.passes.dead import without_unread
from penstock.step.program.passes.draft import Draft, below_all, carried, renamed, stem
from penstock.step.program.passes.draft import above as all_above
from penstock.step.program.passes.narrow import operand_dims

__all__ = ["hoist"]


def hoist(program: Program, name: str, *, above: str | None = None) -> Program:
    """Return the program with an all-gather, all-reduce or slice above what made its operand.

    `above` is the first of the nodes that it goes above; by default it goes above one node.
    """
    move = program.find(name, "all_gather", "all_reduce", "slice")
    last = program[move.inputs[0]]
    first = last if above is None else program.find(above)
    passed = below_all(program, [first.name]) & all_above(program, last.name)
    if not passed:
        raise ProgramError(f"hoist of {move.name} above {first.name}, which it does not depend on")
    for node in program.nodes:
        if node.name in passed and OPS[node.op].kind in ("leaf", "io", "call"):
            raise ProgramError(
                f"hoist of {move.name} above {node.name}: nothing is above {node.op} of {node.type}"
            )
    if move.op == "slice":
        return _Slicing(program, move, passed).run()
    return _Gathering(program, move, passed).run()


class _Hoisting(Draft, ABC):
    """One walk over a program, in which a move goes up."""

    def __init__(self, program: Program, move: Node, passed: set[str]) -> None:
        super().__init__(program, f"hoist of {move.name}")
        self._move, self._passed = move, passed
        self._moved: dict[str, str] = {}
        """By value: its name as it is after the move."""

    @abstractmethod
    def _write_moved(self, node: Node) -> None:
        """Write a node once more, on moved values."""

    def run(self) -> Program:
        """Return the program; nodes that nobody reads any more are dropped."""
        for node in self.program.nodes:
            if node.name == self._move.name:
                self.renamed[node.name] = self._moved[node.inputs[0]]
                continue
            self.copy(node)
            if node.name in self._passed:
                self._write_moved(node)
        return _tidied(self.finished(), self.program, {n: self._moved[n] for n in self._passed})


class _Gathering(_Hoisting):
    """An all-gather or all-reduce goes up: nodes are computed on whole values."""

    def __init__(self, program: Program, move: Node, passed: set[str]) -> None:
        super().__init__(program, move, passed)
        self._kind = "S" if move.op == "all_gather" else "P"

    def _write_moved(self, node: Node) -> None:
        if node.op in ("update", "store"):
            raise ProgramError(
                f"hoist of {self._move.name} above {node.name}: an {node.op} is done once; "
                "gather what it returns"
            )
        if node.axes and set(node.axes) <= set(self._move.axes):
            self._moved[node.name] = self._undone(node)
            return
        inputs = [self._whole_of(i) for i in node.inputs]
        name = f"{stem(node)}.whole"
        made = self.add(node.op, inputs, name, of=node, **dict(node.attrs))
        wanted = node.type.with_layout(self._move.axes, R)
        if self.type(made) != wanted:
            raise ProgramError(
                f"hoist of {self._move.name} above {node.name}: on {self._move.op} of its operands "
                f"it would be {self.type(made)}, not {wanted}"
            )
        self._moved[node.name] = made

    def _undone(self, node: Node) -> str:
        """Return the operand of a move along the same axes, which does nothing to a whole value."""
        source = self._whole_of(node.inputs[0])
        is_whole = self.type(source).with_layout(node.axes, R) == self.type(source)
        same = node.op == "slice" or (node.op == "all_reduce" and node.attr("op") != "mean")
        if self._kind == "P" or not same or not is_whole:
            raise ProgramError(
                f"hoist of {self._move.name} above {node.name}: {node.op} along the same axis "
                "stands between"
            )
        return source

    def _whole_of(self, name: str) -> str:
        now = self.now(name)
        kinds = {self.type(now).layout(axis).kind for axis in self._move.axes}
        if name in self._moved:
            return self._moved[name]
        if kinds != {self._kind}:
            return now
        attrs: dict[str, Attr] = {"axis": self._move.attr("axis"), **carried(self._move)}
        if self._kind == "P":
            attrs["op"] = self._move.attr("op")
        ending = "gather" if self._kind == "S" else "reduce"
        of = self.nodes[now]
        self._moved[name] = self.add(self._move.op, [now], f"{stem(of)}.{ending}", of=of, **attrs)
        return self._moved[name]


class _Slicing(_Hoisting):
    """A slice goes up: nodes are computed on slices."""

    def __init__(self, program: Program, move: Node, passed: set[str]) -> None:
        super().__init__(program, move, passed)
        self._axis = move.axes[0]
        self._dims = self._wanted()
        # A value that is the same for all slices, such as a bias, is computed as it was.
        self._passed = passed & self._dims.keys()

    def _wanted(self) -> dict[str, int]:
        """Return the dimension along which each value that the slice passes or reads is sliced."""
        dims = {self._move.inputs[0]: int(self._move.attr("dim"))}
        for node in reversed(self.program.nodes):
            if node.name not in self._passed or node.name not in dims:
                continue
            if node.op in ("update", "store", "slice") or self._axis in node.axes:
                raise ProgramError(
                    f"hoist of {self._move.name} above {node.name}: it does not go above "
                    f"{node.op}" + (" along the same axis" if self._axis in node.axes else "")
                )
            for i, dim in zip(
                node.inputs, operand_dims(node, dims[node.name], self.program), strict=True
            ):
                if dim is not None and dims.setdefault(i, dim) != dim:
                    raise ProgramError(
                        f"hoist of {self._move.name} above {node.name}: {i} would be sliced along "
                        f"dimension {dims[i]} and along {dim}"
                    )
        return dims

    def _write_moved(self, node: Node) -> None:
        dims = operand_dims(node, self._dims[node.name], self.program)
        inputs = [
            self.now(i) if dim is None else self._slice_of(i, dim)
            for i, dim in zip(node.inputs, dims, strict=True)
        ]
        name = f"{stem(node)}.part"
        made = self.add(node.op, inputs, name, of=node, **dict(node.attrs))
        if self.type(made).layout(self._axis).kind != "S":
            raise ProgramError(
                f"hoist of {self._move.name} above {node.name}: none of what it reads can be sliced"
            )
        self._moved[node.name] = made

    def _slice_of(self, name: str, dim: int) -> str:
        now = self.now(name)
        if self.type(now).layout(self._axis).kind == "S":
            return now
        if name not in self._moved:
            of = self.nodes[now]
            self._moved[name] = self.add(
                "slice", [now], f"{stem(of)}.slice", of=of, axis=self._axis, dim=dim
            )
        return self._moved[name]


def _tidied(program: Program, before: Program, passed: dict[str, str]) -> Program:
    """Drop passed nodes that nobody reads any more, and give their names to what replaced them."""
    new = {node.name for node in program.nodes if node.name not in before}
    out = without_unread(program, among={*passed, *new})
    left = {node.name for node in out.nodes} & new
    names = {made: name for name, made in passed.items() if name not in out and made in left}
    return renamed(out, names)
