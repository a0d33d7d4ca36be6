"""Along which dimension every value of a region is cut, found from one of them.

A cut of one value cuts its operands and its readers, through the loops of the operations between
them. A value that an operation needs whole stays whole, and so do its operands. Where two paths to
a value disagree, or an operation mixes the dimension, there is no such cut.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.errors import ProgramError
from penstock.step.program.loops import Loop, loops_of
from penstock.step.program.nodes import Node, Program
from penstock.step.program.ops import OPS

__all__ = ["Cut", "cut_along"]

Cut = dict[str, int | None]
"""By value: the dimension, or None for a whole value."""


class _NoCutError(Exception):
    """Why values cannot be cut along a dimension."""


def cut_along(program: Program, nodes: tuple[str, ...], dim: int | None, pieces: int) -> Cut:
    """Return how the values of a region are cut, its last node along one dimension.

    By default that is the first dimension along which everything can be cut.
    """
    finder = _Finder(program, nodes, pieces)
    last = next((n for n in reversed(nodes) if program[n].type.ndim), None)
    if last is None:
        raise ProgramError(f"{', '.join(nodes)} are numbers; there is nothing to cut")
    ndim = program[last].type.ndim
    if dim is not None and not 0 <= dim < ndim:
        raise ProgramError(f"{last} has {ndim} dimensions, there is no dimension {dim} to cut")
    cut = finder.with_one({}, last, range(ndim) if dim is None else [dim])
    for name in reversed(nodes):
        if name not in cut and program[name].type.ndim:
            cut = finder.with_one(cut, name, [*range(program[name].type.ndim), None])
    return cut


class _Finder:
    """Finds the cut of all values of one region."""

    def __init__(self, program: Program, nodes: tuple[str, ...], pieces: int) -> None:
        self._program = program
        self._inside = set(nodes)
        self._pieces = pieces
        self._loops = {name: loops_of(program[name], program) for name in nodes}

    def with_one(self, cut: Cut, name: str, dims: Iterable[int | None]) -> Cut:
        """Return a cut with one more value, along the first dimension that is possible."""
        reasons = []
        for dim in dims:
            try:
                return self._with(cut, name, dim)
            except _NoCutError as error:
                along = "whole" if dim is None else f"along dimension {dim}"
                reasons.append(f"{along}: {error}")
        raise ProgramError(f"{name} cannot be cut into chunks, {'; '.join(reasons)}")

    def _with(self, cut: Cut, name: str, dim: int | None) -> Cut:
        out = dict(cut)
        waiting: list[tuple[str, int | None, str]] = [(name, dim, name)]
        while waiting:
            value, at, by = waiting.pop()
            if not self._program[value].type.ndim:
                continue
            if value in out:
                if out[value] != at:
                    raise _NoCutError(_disagreement(value, out[value], at, by))
                continue
            out[value] = at
            waiting += self._follows(value, at)
        return out

    def _follows(self, value: str, dim: int | None) -> list[tuple[str, int | None, str]]:
        """Return the cuts that follow for other values, each with the node that connects them."""
        out: list[tuple[str, int | None, str]] = []
        if value in self._inside:
            node = self._program[value]
            if dim is None:
                out += [(name, None, value) for name in node.inputs]
            else:
                out += self._all_of(node, self._loop(node, dim, None))
        if dim is None:
            return out
        for user in self._program.users[value]:
            if user in self._inside:
                node = self._program[user]
                for place, name in enumerate(node.inputs):
                    if name == value:
                        out += self._all_of(node, self._loop(node, dim, place))
        return out

    def _all_of(self, node: Node, loop: Loop) -> list[tuple[str, int | None, str]]:
        pairs = zip(node.inputs, loop.operands, strict=True)
        return [(node.name, loop.out, node.name), *((n, d, node.name) for n, d in pairs)]

    def _loop(self, node: Node, dim: int, place: int | None) -> Loop:
        """Return the loop of a node that goes through a dimension of its result or an operand."""
        for loop in self._loops[node.name]:
            if dim == (loop.out if place is None else loop.operands[place]):
                if loop.divides % self._pieces:
                    raise _NoCutError(
                        f"{node.op} ({node.name}) has {loop.divides} there, which "
                        f"{self._pieces} equal pieces do not divide"
                    )
                return loop
        if OPS[node.op].kind in ("io", "call") or node.op == "pick":
            raise _NoCutError(f"{node.op} ({node.name}) comes whole; leave it out")
        of = "its result" if place is None else node.inputs[place]
        raise _NoCutError(f"{node.op} ({node.name}) mixes dimension {dim} of {of}")


def _disagreement(value: str, one: int | None, other: int | None, by: str) -> str:
    if one is None or other is None:
        return f"{value} is needed whole and in chunks, one of them by {by}"
    return f"{value} is cut along dimension {one} and, by {by}, along {other}"
