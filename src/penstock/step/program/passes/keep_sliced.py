"""Keep sliced: a state of which every rank reads a slice is a slice on every rank.

After the gather of the gradient has sunk below Adam, its moments are read in slices and computed in
slices, and gathered only to be kept. They are kept as they are computed: a W-th of the memory, and
no gather. Weights too; where something reads those whole, they are gathered for it, once, and that
gather may be moved over the end of the iteration (`rotate`).
"""

from __future__ import annotations

from penstock.errors import ProgramError
from penstock.step.program.layouts import S
from penstock.step.program.nodes import Attr, Node, Program
from penstock.step.program.passes.dead import without_unread
from penstock.step.program.passes.draft import Draft, below_all, renamed
from penstock.step.program.passes.sink import Sinking
from penstock.step.program.types import Type

__all__ = ["keep_sliced"]

_TEMPORARY = "kept state"
"""What the gather of a state is called until the names of dead gathers are free."""


def keep_sliced(
    program: Program, *names: str, axis: str | None = None, dim: int | None = None
) -> Program:
    """Return the program with some states kept in slices.

    Axis and dimension are those in which their new values are there; where those are whole, say
    them. What is returned of such a state is its slice.
    """
    if not names:
        raise ProgramError("keep_sliced needs the names of states")
    for name in names:
        program = _kept(program, name, axis, dim)
    return program


def _kept(program: Program, name: str, axis: str | None, dim: int | None) -> Program:
    if name not in program.states:
        raise ProgramError(
            f"keep_sliced of {name}, which is no state; states are what is updated: "
            f"{', '.join(program.states) or 'none here'}"
        )
    state = program[name]
    axes, at = _how(program, state, axis, dim)
    out = _updated_sliced(program, state, _sliced(state.type, axes, at))
    out = _absorbed(out)
    # The gathers for updates go first, so that the one for readers can have their name.
    out = without_unread(out, among=_gathers(out) - {_TEMPORARY})
    if _TEMPORARY not in out:
        return out
    return renamed(out, {_TEMPORARY: out.fresh(f"{name}.gather")})


def _sliced(made: Type, axes: tuple[str, ...], dim: int) -> Type:
    for axis in axes:
        made = made.with_layout(axis, S(dim))
    return made


def _gathers(program: Program) -> set[str]:
    return {node.name for node in program.nodes if node.op == "all_gather"}


def _how(
    program: Program, state: Node, axis: str | None, dim: int | None
) -> tuple[tuple[str, ...], int]:
    """Return the axes and the dimension that a state is to be sliced along."""
    value = program[program[program.states[state.name]].inputs[1]]
    if axis is None and value.op == "all_gather":
        source = program[value.inputs[0]].type
        dims = {source.layout(one).dim for one in value.axes}
        found = (value.axes, dims.pop() if dim is None else dim)
    else:
        if axis is None and len(program.mesh.axes) > 1:
            raise ProgramError(
                f"keep_sliced of {state.name}: its new value {value.name} is whole, so nothing "
                "says how; sink a gather below its update, or say axis= and dim="
            )
        found = ((axis or program.mesh.names[0],), dim or 0)
    axes, at = found
    program.mesh.size(*axes)
    for one in axes:
        if state.type.layout(one).kind != "R":
            raise ProgramError(
                f"keep_sliced of {state.name} on axis {one!r}: it is held as "
                f"{state.type.layout(one)} there; only what all ranks have can be sliced"
            )
    if not 0 <= at < state.type.ndim:
        raise ProgramError(
            f"keep_sliced of {state.name} along dimension {at}; it has {state.type.ndim}"
        )
    return axes, at


def _updated_sliced(program: Program, state: Node, made: Type) -> Program:
    """Write the state in slices; readers read a value that gathers it, for now."""
    draft = Draft(program, f"keep_sliced of {state.name}")
    axes = tuple(a for a in program.mesh.names if made.layout(a) != state.type.layout(a))
    attrs: dict[str, Attr] = {"axis": axes if len(axes) > 1 else axes[0]}
    updates = {state.name}
    for node in program.nodes:
        if node.name == state.name:
            draft.copy(node.with_attrs(type=made))
            gather = draft.add("all_gather", [state.name], _TEMPORARY, of=node, **attrs)
            draft.renamed[state.name] = gather
        elif node.op == "update" and node.attr("target") == state.name:
            value = draft.now(node.inputs[1])
            draft.copy(node, [node.inputs[0], _as_sliced(draft, value, made, axes)])
            updates.add(node.name)
            # What the state is now is what it was updated with, which is there whole.
            is_same = draft.type(value) == node.type
            draft.renamed[node.name] = (
                value
                if is_same
                else draft.add("all_gather", [node.name], f"{node.name}.gather", of=node, **attrs)
            )
        else:
            draft.copy(node)
    outputs = [o if o in updates else draft.now(o) for o in program.outputs]
    return draft.finished(outputs)


def _as_sliced(draft: Draft, value: str, made: Type, axes: tuple[str, ...]) -> str:
    """Return the slices that a value was gathered from, if they are the right ones."""
    node = draft.nodes[value]
    if node.op == "all_gather" and set(node.axes) == set(axes):
        source = node.inputs[0]
        if all(draft.type(source).layout(a) == made.layout(a) for a in axes):
            return source
    return value


def _absorbed(program: Program) -> Program:
    """Let what reads the gather of the state read slices instead, unless a gather follows anyway.

    A node whose result somebody needs whole is left whole, and so on upwards: at the end there is
    one gather, of the state itself, or none.
    """
    gather = program[_TEMPORARY]
    passed = below_all(program, [gather.name])
    while True:
        work = Sinking(program, [gather], f"keep_sliced of {gather.label}")
        out = work.run(passed)
        if not work.needed:
            return out
        passed -= work.needed
