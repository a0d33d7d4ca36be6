"""Reshard: drop a gathered value after use and gather it again for a later reader.

This trades bytes for memory: between its two uses a layer's weights are held in slices only. The
source must be unchanged: a state that is updated in between cannot be gathered again.
"""

from __future__ import annotations

from penstock.errors import ProgramError
from penstock.step.program.nodes import Node, Program
from penstock.step.program.passes.draft import Draft, carried, stem

__all__ = ["reshard"]


def reshard(program: Program, name: str, *, at: str | None = None) -> Program:
    """Return the program with a second gather, for one reader and those after it.

    By default it is for the last reader alone.
    """
    node = program.find(name, "all_gather")
    readers = program.users[node.name]
    if len(readers) < 2:
        raise ProgramError(
            f"reshard of {node.name}, which has {len(readers)} readers; it needs two: after the "
            "last one a value is dropped anyway"
        )
    second = program.find(at).name if at is not None else readers[-1]
    if second not in readers[1:]:
        raise ProgramError(
            f"reshard of {node.name} at {second}; it can be gathered again for one of "
            f"{', '.join(readers[1:])}"
        )
    _still_there(program, node, second)
    later = set(readers[readers.index(second) :])
    draft = Draft(program, f"reshard of {node.name}")
    again = ""
    for other in program.nodes:
        if other.name == second:
            attrs = {"axis": node.attr("axis"), **carried(node)}
            source = node.inputs[0]
            again = draft.add("all_gather", [source], f"{stem(node)}.gather", of=node, **attrs)
        renamed = {node.name: again} if other.name in later else {}
        draft.copy(other, [renamed.get(i, i) for i in other.inputs])
    return draft.finished(program.outputs)


def _still_there(program: Program, gather: Node, second: str) -> None:
    source = program[gather.inputs[0]]
    state = source.attr("target") if source.op == "update" else source.name
    seen = False
    for node in program.nodes:
        if node.name == second:
            return
        seen = seen or node.name == source.name
        if seen and node.op == "update" and node.attr("target") == state and node is not source:
            raise ProgramError(
                f"reshard of {gather.name} at {second}: {source.name} has been changed by then, by "
                f"{node.name}"
            )
