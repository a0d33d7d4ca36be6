"""Rewrites: programs that mean the same and run differently.

Each is a pure function from a program and some arguments to a program. Its conditions are checked,
and what it returns is verified, before anybody sees it; a rewrite that would change the meaning is
refused with the reason. `PASSES` has them by name; a schedule is a list of names and arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from penstock.errors import ProgramError
from penstock.program.nodes import Program, Step
from penstock.program.verify import verified

__all__ = ["PASSES", "rewritten"]

Pass = Callable[..., Program]

PASSES: dict[str, Pass] = {}


def rewritten(program: Program, step: Step) -> Program:
    """Return a program after one rewrite, which joins its history."""
    found = PASSES.get(step.name)
    if found is None:
        raise ProgramError(f"there is no rewrite {step.name!r}; there are {', '.join(PASSES)}")
    out = verified(found(program, *step.args, **dict(step.options)), program)
    return replace(out, history=(*program.history, step))
