"""Keep sliced: a state that every rank reads in slices is kept in slices.

After the gather of the gradient has sunk below Adam, the moments are read and computed in slices,
and gathered only to be kept. In slices they need a W-th of the memory and no gather. Weights can be
kept in slices too; readers that need them whole share one gather, which may be moved over the end
of the iteration (`rotate`).
"""

from __future__ import annotations

from penstock.errors import ProgramError
from penstock.step.program.layouts import S
from penstock.step.program.nodes import Attr, Node, Program, free_name
from penstock.step.program.passes.dead import without_unread
from penstock.step.program.passes.draft import Draft, below_all, renamed
from penstock.step.program.passes.sink import Sinking
from penstock.step.program.types import Type

__all__ = ["keep_sliced"]

_TEMPORARY = "kept state"
"""The name of the gather of a state until the names of dead gathers are free."""


def keep_sliced(
    program: Program, *names: str, axis: str | None = None, dim: int | None = None
) -> Program:
    """Return the program with some states kept in slices.

    Axis and dimension are by default those in which the new value of a state was gathered; name
    them where it is whole. The program returns slices of such states.
    """
    if not names:
        raise ProgramError("keep_sliced needs the names of states")
    for name in names:
        program = _kept(program, name, axis, dim)
    return program


def _kept(program: Program, name: str, axis: str | None, dim: int | None) -> Program:
    if name not in program.states:
        raise ProgramError(
            f"keep_sliced of {name}, which is no state; states are updated parameters: "
            f"{', '.join(program.states) or 'none here'}"
        )
    state = program[name]
    axes, at = _how(program, state, axis, dim)
    out = _updated_sliced(program, state, state.type.with_layout(axes, S(at)))
    out = _absorbed(out)
    # The gathers of new values are dropped first, so that the gather for readers gets their name.
    out = without_unread(out, among=_gathers(out) - {_TEMPORARY})
    if _TEMPORARY not in out:
        return out
    return renamed(out, {_TEMPORARY: free_name(f"{name}.gather", out)})


def _gathers(program: Program) -> set[str]:
    return {node.name for node in program.nodes if node.op == "all_gather"}


def _how(
    program: Program, state: Node, axis: str | None, dim: int | None
) -> tuple[tuple[str, ...], int]:
    """Return the axes and the dimension that a state is to be sliced along."""
    value = program[program[program.states[state.name]].inputs[1]]
    axes: tuple[str, ...] = (axis or program.mesh.names[0],)
    at = dim or 0
    if axis is None and value.op == "all_gather":
        axes = value.axes
        at = program[value.inputs[0]].type.layout(axes[0]).dim if dim is None else dim
    elif axis is None and len(program.mesh.axes) > 1:
        raise ProgramError(
            f"keep_sliced of {state.name}: its new value {value.name} is whole, so nothing "
            "says how; sink a gather below its update, or say axis= and dim="
        )
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
    """Write the state in slices; its readers read a gather of it, for now."""
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
            # Readers of the new state read its value, where that is whole.
            if draft.type(value) != node.type:
                name = f"{node.name}.gather"
                value = draft.add("all_gather", [node.name], name, of=node, **attrs)
            draft.renamed[node.name] = value
        else:
            draft.copy(node)
    outputs = [o if o in updates else draft.now(o) for o in program.outputs]
    return draft.finished(outputs)


def _as_sliced(draft: Draft, value: str, made: Type, axes: tuple[str, ...]) -> str:
    """Return the slices that a value was gathered from, if they are sliced in the same way."""
    node = draft.nodes[value]
    if node.op == "all_gather" and set(node.axes) == set(axes):
        source = node.inputs[0]
        if all(draft.type(source).layout(a) == made.layout(a) for a in axes):
            return source
    return value


def _absorbed(program: Program) -> Program:
    """Let readers of the state's gather read slices instead, unless a gather would follow them.

    A node whose result is needed whole stays whole, and so do the nodes above it: in the end there
    is one gather, that of the state itself, or none.
    """
    gather = program[_TEMPORARY]
    passed = below_all(program, [gather.name])
    while True:
        work = Sinking(program, [gather], f"keep_sliced of {gather.label}")
        out = work.run(passed)
        if not work.needed:
            return out
        # To gather a result is no better than to gather the state: such nodes stay whole.
        passed -= work.needed
