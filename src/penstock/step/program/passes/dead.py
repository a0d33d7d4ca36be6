"""Dead: values that nobody reads are not computed, loaded or sent.

All ranks have the same program, so a collective that is dropped is dropped everywhere. Updates,
stores and outputs stay, and so do calls of the user's functions, which may have other effects.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from penstock.errors import ProgramError
from penstock.step.program.nodes import Program
from penstock.step.program.passes.draft import Draft

__all__ = ["dead", "unread", "without_unread"]

# Calls stay: the user's function may print, count or draw random numbers.
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


def unread(program: Program) -> set[str]:
    """Return the values that nothing needs: no output, no state, nothing that is stored."""
    needed, out = set(program.outputs), set()
    for node in reversed(program.nodes):
        if node.name in needed or node.op in _KEPT:
            needed.update(node.inputs)
        else:
            out.add(node.name)
    return out


def without_unread(program: Program, *, among: Collection[str] | None = None) -> Program:
    """Return the program without nodes that nothing needs: some of them, or all."""
    gone = unread(program)
    gone = gone if among is None else _ends(program, gone & {*among})
    if not gone:
        return program
    draft = Draft(program, "dead")
    for node in program.nodes:
        if node.name not in gone:
            draft.nodes[node.name] = replace(node)
    return draft.finished(program.outputs, gone=gone)


def _ends(program: Program, names: set[str]) -> set[str]:
    """Return those of some unread values whose readers, if any, are dropped as well."""
    out: set[str] = set()
    for node in reversed(program.nodes):
        if node.name in names and out.issuperset(program.users[node.name]):
            out.add(node.name)
    return out
