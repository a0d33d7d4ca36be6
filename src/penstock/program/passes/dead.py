"""Dead: what nobody reads is not computed, loaded or sent.

All ranks have the same program, so a collective that goes, goes everywhere. States, what is stored
and what is returned are the ends; a function of the user stays, since nobody knows what it does.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from penstock.errors import ProgramError
from penstock.program.nodes import Program
from penstock.program.passes.draft import Draft

__all__ = ["dead", "without_unread"]

_KEPT = ("input", "scalar", "update", "store", "call")


def dead(program: Program, *names: str) -> Program:
    """Return the program without values that nobody reads: some, or all there are."""
    if not names:
        return without_unread(program)
    for name in names:
        node = program.find(name)
        if readers := [r for r in program.users[node.name] if r not in names]:
            raise ProgramError(f"{node.name} is not dead: {', '.join(readers)} reads it")
        if node.name in program.outputs:
            raise ProgramError(f"{node.name} is not dead: program {program.name} returns it")
        if node.op in _KEPT:
            raise ProgramError(f"{node.name} is not dead: {node.op} is an end of its own")
    return without_unread(program, among={program.find(name).name for name in names})


def without_unread(program: Program, *, among: Collection[str] | None = None) -> Program:
    """Return the program without nodes (of some, or of all) that nothing needs."""
    needed = set(program.outputs)
    gone = set()
    for node in reversed(program.nodes):
        is_candidate = node.op not in _KEPT and (among is None or node.name in among)
        if node.name not in needed and is_candidate:
            gone.add(node.name)
        else:
            needed.update(node.inputs)
    if not gone:
        return program
    draft = Draft(program, "dead")
    for node in program.nodes:
        if node.name not in gone:
            draft.nodes[node.name] = replace(node)
    return draft.finished(program.outputs, gone=gone)
