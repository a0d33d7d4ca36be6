"""Memory that values share: a result may lie in the memory of a value that is no longer needed.

An update lies in the memory of its state. So does the update's value, if nobody reads the old state
after the value is computed: then the update costs nothing. An all-reduce overwrites its operand, if
nobody else reads that; an input is overwritten only if the user donates it.

Slices lie in the memory of the whole: the operand of a gather in its own part of the result, and
the result of a reduce-scatter in its part of the operand.
"""

from __future__ import annotations

from collections.abc import Collection

from penstock.step.program.layouts import S
from penstock.step.program.nodes import Node, Program
from penstock.step.program.ops import is_pointwise

__all__ = ["shared"]

_GIVEN = ("input", "update", "pick", "load", "const", "scalar")
_VIEWS = ("slice", "transpose", "flatten", "unflatten", "expand", "recv", "store", "call")


def shared(program: Program, donate: Collection[str] = ()) -> dict[str, str]:
    """Return the values that lie in the memory of another one, each with that one."""
    places = {node.name: number for number, node in enumerate(program.nodes)}
    out: dict[str, str] = {}
    for node in program.nodes:
        if node.op == "update":
            state = str(node.attr("target"))
            out[node.name] = state
            value = program[node.inputs[1]]
            if _may_lie_in(program, value, node, state, places):
                out[value.name] = state
        elif node.op == "all_reduce":
            source = program[node.inputs[0]]
            if _is_free(program, source, node, donate) and node.name not in out:
                out[node.name] = source.name
    # Slices come second: they may lie in memory that an update has given to a value above.
    for node in program.nodes:
        source = program[node.inputs[0]] if node.inputs else node
        if node.op == "reduce_scatter" and node.name not in (*out, *program.outputs):
            if _is_part(program, node, source, node) and _is_free(program, source, node, donate):
                out[node.name] = source.name
        elif node.op == "all_gather" and source.name not in (*out, *program.outputs):
            is_part = _is_part(program, source, node, node)
            if is_part and _may_wait_in(program, source, node, out, places):
                out[source.name] = node.name
    return {name: _root(out, name) for name in out}


def _may_lie_in(
    program: Program, value: Node, update: Node, state: str, places: dict[str, int]
) -> bool:
    if value.op in _GIVEN or value.op in _VIEWS or value.type != update.type:
        return False
    if any(user.op == "update" for user in _users(program, value) if user.name != update.name):
        return False
    if state in value.inputs and not is_pointwise(value.op):
        return False  # It would overwrite elements of the state that it still reads.
    readers = [n for n in program.users[state] if n != update.name]
    earlier = [n.name for n in program.nodes if n.op == "update" and n.attr("target") == state]
    if earlier != [update.name]:
        return False
    # The value itself may read the old state: it reads each element before it writes it.
    return all(places[reader] < places[value.name] for reader in readers if reader != value.name)


def _is_part(program: Program, part: Node, whole: Node, move: Node) -> bool:
    """Whether a rank's part is one run of the whole, and chunks of both are cut alike."""
    if any(part.type.layout(axis) != S(0) for axis in move.axes):
        return False
    cut = [(r.axis, r.dim(part.name), r.dim(whole.name)) for r in program.regions]
    return all(
        one == other == 0 and (axis,) == move.axes
        for axis, one, other in cut
        if one is not None or other is not None
    )


def _may_wait_in(
    program: Program, part: Node, gather: Node, out: dict[str, str], places: dict[str, int]
) -> bool:
    """Whether the operand of a gather may lie in the memory of the result."""
    if not _is_free(program, part, gather, ()):
        return False
    state = out.get(gather.name)
    if state is None:
        return True
    if state in part.inputs and not is_pointwise(part.op):
        return False
    readers = [node.name for node in _users(program, program[state]) if node.op != "update"]
    return all(places[reader] <= places[part.name] for reader in readers)


def _users(program: Program, node: Node) -> list[Node]:
    return [program[name] for name in program.users[node.name]]


def _is_free(program: Program, source: Node, reader: Node, donate: Collection[str]) -> bool:
    if source.op in _GIVEN and source.name not in donate:
        return False
    alone = program.users[source.name] == (reader.name,)
    return alone and source.op not in _VIEWS and source.name not in program.outputs


def _root(out: dict[str, str], name: str) -> str:
    while name in out:
        name = out[name]
    return name
