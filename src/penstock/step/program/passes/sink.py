"""Sink: communication moves below the computations that read its result.

Below an all-gather everything works on whole values. If what reads it can as well work on slices,
the gather can wait: each rank computes its slice, and what leaves is gathered afterwards.

    y = f(all_gather(x), r)       ->      y = all_gather(f(x, r))

Which operations can, the rules of layouts say. Replicated operands are sliced for nothing, dropout
is drawn by the place in the whole, and a reduction over the sliced dimension becomes partial and
gets a small all-reduce of its own. Every value that is still needed whole gets its own gather.

An all-reduce sinks below what is linear, by the same rules: f(all_reduce(x)) is all_reduce(f(x)).
Where two are added, both have to sink at once; one all-reduce then takes the place of two.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import ProgramError
from penstock.step.program.layouts import R
from penstock.step.program.nodes import Attr, Node, Program
from penstock.step.program.ops import OPS
from penstock.step.program.passes.draft import Draft, above, below_all, carried, stem
from penstock.step.program.passes.narrow import narrowed, operand_dims
from penstock.step.program.types import Type

__all__ = ["Sinking", "sink", "value_named"]


def sink(program: Program, *names: str, below: str | None = None) -> Program:
    """Return the program with all-gathers or all-reduces below what reads them.

    They sink as far as the rules of layouts let them, or just below a value, or the update of a
    state, and everything in between goes with it.
    """
    if not names:
        raise ProgramError("sink needs the name of an all_gather or an all_reduce")
    moves = _alike([program.find(name, "all_gather", "all_reduce") for name in names])
    shown = " and ".join(node.name for node in moves)
    passed = below_all(program, [node.name for node in moves])
    if below is not None:
        target = value_named(program, below)
        if target.name not in passed:
            raise ProgramError(f"sink of {shown} below {below}, which does not depend on it")
        passed &= above(program, target.name)
    work = Sinking(program, moves, f"sink of {shown}")
    out = work.run(passed, strict=below)
    if not work.sunk:
        why = "; ".join(dict.fromkeys(work.reasons)) or "nothing reads it"
        raise ProgramError(f"sink of {shown}: nothing below it can go above it: {why}")
    return narrowed(out, work.sunk, moves[0].axes) if moves[0].op == "all_gather" else out


def value_named(program: Program, name: str) -> Node:
    """Return what a name stands for below which something goes: a state, as it is left, or a value.

    Of the nodes that a variable was given to it is the last.
    """
    if name in program.states:
        return program[program.states[name]]
    called = [node for node in program.nodes if node.label == name]
    return program[name] if name in program or not called else called[-1]


def _alike(moves: list[Node]) -> list[Node]:
    kinds = dict.fromkeys((node.op, node.axes, node.attr("op")) for node in moves)
    if len(kinds) > 1:
        shown = " and ".join(f"{op} along {'+'.join(axes)}" for op, axes, _ in kinds)
        raise ProgramError(f"sink of {shown} at once; what sinks together is of one kind")
    return moves


class Sinking:
    """One walk over a program, in which some moves go down."""

    def __init__(self, program: Program, moves: Sequence[Node], rewrite: str) -> None:
        self._program = program
        self._moves = {node.name for node in moves}
        self._move = moves[0]
        self._is_gather = self._move.op == "all_gather"
        self._draft = Draft(program, rewrite)
        self._low: dict[str, str] = {}
        """Values as they are above the move (slices, or partial), by what they are below it."""
        self._whole: dict[str, str] = {}
        self.sunk: set[str] = set()
        """The nodes that the moves have passed."""
        self.needed: set[str] = set()
        """Those of them that somebody needs whole all the same."""
        self.reasons: list[str] = []

    def run(self, passed: set[str], *, strict: str | None = None) -> Program:
        """Return the program in which the moves have passed what they can of some nodes.

        All of them where it is strict: the name below which the moves are to be.
        """
        draft = self._draft
        for node in self._program.nodes:
            if node.name in self._moves:
                self._low[node.name] = self._whole_of(node.inputs[0])
            elif not any(i in self._low for i in node.inputs):
                draft.copy(node)
            elif node.name not in passed or not self._pass(node, strict):
                draft.copy(node, [self._whole_of(i) for i in node.inputs])
        return draft.finished([self._whole_of(out) for out in self._program.outputs])

    # -- one node ------------------------------------------------------------------------------

    def _pass(self, node: Node, strict: str | None) -> bool:
        """Write a node as it is above the move, if it can be."""
        written = len(self._draft.nodes)
        try:
            self._write_low(node)
        except ProgramError as error:
            for name in list(self._draft.nodes)[written:]:
                del self._draft.nodes[name]
            if strict is not None:
                raise ProgramError(
                    f"{self._draft.rewrite} below {strict}: {node.name} stands between and cannot "
                    f"go above it: {error}"
                ) from None
            self.reasons.append(f"{node.name}: {error}")
            return False
        self.sunk.add(node.name)
        return True

    def _write_low(self, node: Node) -> None:
        if OPS[node.op].kind in ("call", "io") and node.op != "store":
            raise ProgramError(f"nobody knows what {node.op} of slices is")
        if node.op == "update":
            self._write_update(node)
        elif node.op == "slice" and self._is_gather and node.axes == self._move.axes:
            self._slice_again(node)
        else:
            inputs = self._operands(node)
            self._put(node, inputs, self._draft.inferred(node, inputs))

    def _put(self, node: Node, inputs: list[str], made: Type) -> None:
        """Write a node on what is above the move, and let the move follow where it has to."""
        draft, axes = self._draft, self._move.axes
        kinds = {made.layout(axis).kind for axis in axes}
        is_same_elsewhere = _elsewhere(made, axes) == _elsewhere(node.type, axes)
        if made == node.type and self._is_gather:
            draft.copy(node, inputs)  # it worked on slices before, beside another sliced value
        elif kinds == {"S" if self._is_gather else "P"} and is_same_elsewhere:
            self._low[node.name] = draft.copy(node, inputs)
        elif kinds == {"P"} and is_same_elsewhere:
            self._reduce(node, inputs, made)
        else:
            raise ProgramError(f"it would be {made}")

    def _reduce(self, node: Node, inputs: list[str], made: Type) -> None:
        """Write a reduction over slices, and the all-reduce that it needs to be what it was."""
        axes = self._move.axes
        ops = {made.layout(axis).op for axis in axes}
        name = stem(node)
        low = self._draft.add(node.op, inputs, f"{name}.part", of=node, **dict(node.attrs))
        self._draft.renamed[node.name] = self._draft.add(
            "all_reduce", [low], f"{name}.reduce", of=node, axis=self._move.attr("axis"),
            op=ops.pop(),
        )  # fmt: skip

    def _write_update(self, node: Node) -> None:
        state, value = node.inputs
        if not self._is_gather:
            raise ProgramError("a state cannot be left partial")
        held = self._program[state].type
        if value not in self._low or _elsewhere(held, self._move.axes) != held:
            # Kept in slices already, or its value is none of those that sink.
            self._draft.copy(node, [self._whole_of(state), self._low.get(value, value)])
            return
        whole = self._whole_of(value, str(node.attr("target")))
        self._draft.copy(node, [self._whole_of(state), whole])
        # Readers of the new state read the slice that it was made of; the state itself is whole.
        self._low[node.name] = self._low[value]
        self._whole[node.name] = node.name

    def _slice_again(self, node: Node) -> None:
        """A slice of what is gathered is there already, or is sent to where it is wanted."""
        low = self._low[node.inputs[0]]
        (axis,) = node.axes
        if self._draft.type(low).layout(axis) == node.type.layout(axis):
            self._draft.renamed[node.name] = low
            return
        self._draft.renamed[node.name] = self._draft.add(
            "all_to_all", [low], f"{stem(node)}.exchange", of=node, axis=axis, dim=node.attr("dim")
        )

    # -- operands ------------------------------------------------------------------------------

    def _operands(self, node: Node) -> list[str]:
        """Return what a node reads above the move; what others have whole is sliced for it."""
        draft = self._draft
        inputs = [self._low.get(i, draft.now(i)) for i in node.inputs]
        if node.op not in ("matmul", "recv") or not self._is_gather or len(self._move.axes) > 1:
            return inputs
        (axis,) = self._move.axes
        for dim in range(node.type.ndim):
            wanted = operand_dims(node, dim, self._program)
            held = [(k, draft.type(i).layout(axis)) for k, i in enumerate(inputs)]
            if not any(lay.kind == "S" and lay.dim == wanted[k] for k, lay in held):
                continue
            for k, layout in held:
                if wanted[k] is not None and layout.kind == "R":
                    of = self._program[node.inputs[k]]
                    inputs[k] = draft.add(
                        "slice", [inputs[k]], f"{stem(of)}.slice", of=of, axis=axis, dim=wanted[k]
                    )
            break
        return inputs

    def _whole_of(self, name: str, called: str = "") -> str:
        """Return a value as it is below the move, which is put there if it has to be."""
        if name not in self._low:
            return self._draft.now(name)
        if name not in self._whole:
            self._whole[name] = self._move_below(self._program[name], called)
        return self._whole[name]

    def _move_below(self, node: Node, called: str) -> str:
        if node.name in self._moves:
            return self._draft.copy(node, [self._low[node.name]])
        self.needed.add(node.name)
        attrs: dict[str, Attr] = {"axis": self._move.attr("axis"), **carried(self._move)}
        if not self._is_gather:
            attrs["op"] = self._move.attr("op")
        ending = "gather" if self._is_gather else "reduce"
        return self._draft.add(
            self._move.op, [self._low[node.name]], f"{called or stem(node)}.{ending}", of=node,
            **attrs,
        )  # fmt: skip


def _elsewhere(made: Type, axes: tuple[str, ...]) -> Type:
    """Return a type as the other axes see it."""
    for axis in axes:
        made = made.with_layout(axis, R)
    return made
