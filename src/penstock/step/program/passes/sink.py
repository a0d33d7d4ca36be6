"""Sink: communication moves below the computations that read its result.

Below an all-gather everything works on whole values. If its readers can work on slices as well, the
gather can wait: each rank computes its slice, and the results are gathered.

    y = f(all_gather(x), r)       ->      y = all_gather(f(x, r))

The rules of layouts decide which operations can. Replicated operands are sliced for nothing,
dropout is drawn by the place in the whole value, and a reduction over the sliced dimension becomes
partial and gets a small all-reduce of its own. Every value that is still needed whole gets its own
gather.

An all-reduce sinks below linear operations, by the same rules: f(all_reduce(x)) is
all_reduce(f(x)). Where two all-reduces are added, both have to sink at once; one replaces the two.
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

    They sink as far as the rules of layouts allow, or just below one value or state, past
    everything in between.
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
    """Return the node that `below` names: the last update of a state, or a value.

    Of several nodes that were assigned to one variable it is the last.
    """
    if name in program.states:
        return program[program.states[name]]
    called = [node for node in program.nodes if node.label == name]
    return program[name] if name in program or not called else called[-1]


def _alike(moves: list[Node]) -> list[Node]:
    """Return moves that sink together, if they are of one kind."""
    kinds = dict.fromkeys((node.op, node.axes, node.attr("op")) for node in moves)
    if len(kinds) > 1:
        shown = " and ".join(f"{op} along {'+'.join(axes)}" for op, axes, _ in kinds)
        raise ProgramError(f"sink of {shown} at once; what sinks together is of one kind")
    return moves


class Sinking(Draft):
    """One walk over a program, in which some moves go down."""

    def __init__(self, program: Program, moves: Sequence[Node], rewrite: str) -> None:
        super().__init__(program, rewrite)
        self._moves = {node.name for node in moves}
        self._move = moves[0]
        self._is_gather = self._move.op == "all_gather"
        self._low: dict[str, str] = {}
        """By value below the move: the value above it, which is sliced or partial."""
        self._whole: dict[str, str] = {}
        """By value: the result of a move that was put below it."""
        self.sunk: set[str] = set()
        """The nodes that the moves have passed."""
        self.needed: set[str] = set()
        """Sunk nodes whose results are moved again, because some reader needs them whole."""
        self.reasons: list[str] = []

    def run(self, passed: set[str], *, strict: str | None = None) -> Program:
        """Return the program in which the moves have passed what they can of some nodes.

        `strict` is the name below which the moves must be: then they have to pass all of them.
        """
        for node in self.program.nodes:
            if node.name in self._moves:
                self._low[node.name] = self._whole_of(node.inputs[0])
            elif not any(i in self._low for i in node.inputs):
                self.copy(node)
            elif node.name not in passed or not self._pass(node, strict):
                self.copy(node, [self._whole_of(i) for i in node.inputs])
        return self.finished([self._whole_of(out) for out in self.program.outputs])

    # -- one node ------------------------------------------------------------------------------

    def _pass(self, node: Node, strict: str | None) -> bool:
        """Write a node above the move, if that is possible; else leave the draft as it was."""
        written = len(self.nodes)
        try:
            self._write_low(node)
        except ProgramError as error:
            # What was written for this node, such as slices of its operands, goes again.
            for name in list(self.nodes)[written:]:
                del self.nodes[name]
            if strict is not None:
                raise ProgramError(
                    f"{self.rewrite} below {strict}: {node.name} stands between and cannot "
                    f"go above it: {error}"
                ) from None
            self.reasons.append(f"{node.name}: {error}")
            return False
        self.sunk.add(node.name)
        return True

    def _write_low(self, node: Node) -> None:
        if OPS[node.op].kind in ("call", "io") and node.op != "store":
            raise ProgramError(f"{node.op} is not defined on slices")
        if node.op == "update":
            self._write_update(node)
        elif node.op == "slice" and self._is_gather and node.axes == self._move.axes:
            self._slice_again(node)
        else:
            inputs = self._operands(node)
            self._put(node, inputs, self.inferred(node, inputs))

    def _put(self, node: Node, inputs: list[str], made: Type) -> None:
        """Write a node on operands above the move, and the move below it where that is needed."""
        axes = self._move.axes
        kinds = {made.layout(axis).kind for axis in axes}
        is_same_elsewhere = made.with_layout(axes, R) == node.type.with_layout(axes, R)
        if made == node.type and self._is_gather:
            self.copy(node, inputs)  # it worked on slices before, beside another sliced value
        elif kinds == {"S" if self._is_gather else "P"} and is_same_elsewhere:
            self._low[node.name] = self.copy(node, inputs)
        elif kinds == {"P"} and is_same_elsewhere:
            self._reduce(node, inputs, made)
        else:
            raise ProgramError(f"it would be {made}")

    def _reduce(self, node: Node, inputs: list[str], made: Type) -> None:
        """Write a reduction over slices, and the all-reduce that completes it."""
        axes = self._move.axes
        ops = {made.layout(axis).op for axis in axes}
        name = stem(node)
        low = self.add(node.op, inputs, f"{name}.part", of=node, **dict(node.attrs))
        how: dict[str, Attr] = {"axis": self._move.attr("axis"), "op": ops.pop()}
        total = self.add("all_reduce", [low], f"{name}.reduce", of=node, **how)
        self.renamed[node.name] = total

    def _write_update(self, node: Node) -> None:
        state, value = node.inputs
        if not self._is_gather:
            raise ProgramError("a state cannot be left partial")
        held = self.program[state].type
        if value not in self._low or held.with_layout(self._move.axes, R) != held:
            # The state is kept in slices already, or its value does not sink.
            self.copy(node, [self._whole_of(state), self._low.get(value, value)])
            return
        whole = self._whole_of(value, str(node.attr("target")))
        self.copy(node, [self._whole_of(state), whole])
        # Readers of the new state read the slice of its value; the state itself is whole.
        self._low[node.name] = self._low[value]
        self._whole[node.name] = node.name

    def _slice_again(self, node: Node) -> None:
        """Replace a slice of a gathered value: by the value above it, or by an exchange."""
        low = self._low[node.inputs[0]]
        (axis,) = node.axes
        if self.type(low).layout(axis) == node.type.layout(axis):
            self.renamed[node.name] = low
            return
        self.renamed[node.name] = self.add(
            "all_to_all", [low], f"{stem(node)}.exchange", of=node, axis=axis, dim=node.attr("dim")
        )

    # -- operands ------------------------------------------------------------------------------

    def _operands(self, node: Node) -> list[str]:
        """Return the operands of a node above the move; replicated ones are sliced if need be."""
        inputs = [self._low.get(i, self.now(i)) for i in node.inputs]
        if node.op not in ("matmul", "recv") or not self._is_gather or len(self._move.axes) > 1:
            return inputs
        (axis,) = self._move.axes
        for dim in range(node.type.ndim):
            wanted = operand_dims(node, dim, self.program)
            held = [(k, self.type(i).layout(axis)) for k, i in enumerate(inputs)]
            if not any(lay.kind == "S" and lay.dim == wanted[k] for k, lay in held):
                continue
            for k, layout in held:
                if wanted[k] is not None and layout.kind == "R":
                    of = self.program[node.inputs[k]]
                    inputs[k] = self.add(
                        "slice", [inputs[k]], f"{stem(of)}.slice", of=of, axis=axis, dim=wanted[k]
                    )
            break
        return inputs

    def _whole_of(self, name: str, called: str = "") -> str:
        """Return a value below the move; write the move there if it is not yet."""
        if name not in self._low:
            return self.now(name)
        if name not in self._whole:
            self._whole[name] = self._move_below(self.program[name], called)
        return self._whole[name]

    def _move_below(self, node: Node, called: str) -> str:
        if node.name in self._moves:
            return self.copy(node, [self._low[node.name]])
        self.needed.add(node.name)
        attrs: dict[str, Attr] = {"axis": self._move.attr("axis"), **carried(self._move)}
        if not self._is_gather:
            attrs["op"] = self._move.attr("op")
        ending = "gather" if self._is_gather else "reduce"
        name = f"{called or stem(node)}.{ending}"
        return self.add(self._move.op, [self._low[node.name]], name, of=node, **attrs)
