"""Narrow: a value of which only slices are read is computed in slices.

After an all-gather has sunk, a replicated value may be read by slices alone: `b1 * m` in Adam. All
ranks would compute all of it and use a part. It is computed on a slice of `m` instead, which costs
nothing to take; and where only slices of a state are read, the state can be kept sliced.
"""

from __future__ import annotations

from penstock.errors import ProgramError
from penstock.step.program.loops import Dims, loops_of
from penstock.step.program.nodes import Node, Program
from penstock.step.program.ops import OPS
from penstock.step.program.passes.draft import Draft, stem

__all__ = ["narrowed", "operand_dims"]

_KINDS = ("pointwise", "matmul", "reduce")
_OPS = ("transpose", "recv", "store", "all_reduce", "all_gather", "broadcast", "send")
"""Operations whose slices are the operations of slices."""


def narrowed(program: Program, readers: set[str], axes: tuple[str, ...]) -> Program:
    """Return the program in which values that only slices of some readers need are sliced too."""
    for axis in program.mesh.names:
        if axis in axes:
            program = _narrowed(program, readers, axis)
    return program


def _narrowed(program: Program, readers: set[str], axis: str) -> Program:
    left_whole: set[str] = set()
    while True:
        dims = _candidates(program, readers, axis, left_whole)
        if not dims:
            return program
        stuck, out = _rewritten(program, dims, axis)
        if out is not None:
            return out
        # A value that stays whole may force others to: the candidates are found once more.
        left_whole |= stuck


def _candidates(
    program: Program, readers: set[str], axis: str, left_whole: set[str]
) -> dict[str, int]:
    """Return the values that are read in slices only, and along which dimension."""
    dims: dict[str, int] = {}
    for node in reversed(program.nodes):
        sliced = node.type.layout(axis)
        if node.name in readers and sliced.kind == "S" and OPS[node.op].kind == "pointwise":
            dims[node.name] = sliced.dim
        fits = OPS[node.op].kind == "pointwise" and sliced.kind == "R"
        if not fits or node.name in program.outputs or node.name in left_whole:
            continue
        wanted = {
            dim
            for user in program.users[node.name]
            for dim in _wanted(program, node, program[user], dims)
        }
        if len(wanted) == 1 and (dim := wanted.pop()) is not None:
            dims[node.name] = dim
    return {name: dim for name, dim in dims.items() if program[name].type.layout(axis).kind == "R"}


def _wanted(program: Program, node: Node, user: Node, dims: dict[str, int]) -> Dims:
    """Return along which dimensions a reader slices a value; None where it wants it whole."""
    if user.name not in dims:
        return (None,)
    wanted = operand_dims(user, dims[user.name], program)
    return tuple(dim for i, dim in zip(user.inputs, wanted, strict=True) if i == node.name)


def _rewritten(
    program: Program, dims: dict[str, int], axis: str
) -> tuple[set[str], Program | None]:
    draft = Draft(program, "sink")
    slices: dict[tuple[str, int], str] = {}
    for node in program.nodes:
        if node.name not in dims:
            draft.copy(node)
            continue
        try:
            inputs = [
                i if dim is None else _slice_of(draft, i, axis, dim, slices)
                for i, dim in zip(
                    node.inputs, operand_dims(node, dims[node.name], program), strict=True
                )
            ]
            draft.copy(node, inputs)
        except ProgramError:
            return {node.name}, None
        if draft.type(node.name).layout(axis).kind != "S":
            return {node.name}, None
    try:
        return set(), draft.finished(program.outputs)
    except ProgramError:
        return set(dims), None


def _slice_of(
    draft: Draft, name: str, axis: str, dim: int, slices: dict[tuple[str, int], str]
) -> str:
    node = draft.nodes[name]
    if node.type.layout(axis).kind == "S":
        return name
    if node.op == "all_gather" and node.axes == (axis,):
        source = node.inputs[0]
        if draft.type(source).layout(axis).dim == dim:
            return source
    if (name, dim) not in slices:
        slices[name, dim] = draft.add(
            "slice", [name], f"{stem(node)}.slice", of=node, axis=axis, dim=dim
        )
    return slices[name, dim]


def operand_dims(node: Node, dim: int, program: Program) -> Dims:
    """Return which dimension of each operand has to be sliced to get a slice of the result.

    None where an operand is the same for all slices.
    """
    if OPS[node.op].kind not in _KINDS and node.op not in _OPS:
        raise ProgramError(f"{node.name}: {node.op} is not defined on slices")
    for loop in loops_of(node, program):
        if loop.out == dim:
            return loop.operands
    raise ProgramError(f"{node.name}: {node.op} needs all of dimension {dim}")
