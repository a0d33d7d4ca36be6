"""Rewrites: programs that mean the same and run differently.

Each is a pure function from a program and some arguments to a program. `rewritten` checks its
arguments and verifies its result before anybody sees it; a rewrite that would change the meaning
is refused with the reason. Values that lose their last reader in a rewrite are dropped with it;
values that nobody read before stay until `dead`. `PASSES` has the rewrites by name; a schedule is a
list of names and arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from penstock.errors import ProgramError
from penstock.step.program.contract import check_old_values
from penstock.step.program.nodes import Program, Rewrite
from penstock.step.program.passes.algo import algo
from penstock.step.program.passes.bucket import bucket
from penstock.step.program.passes.chunk import chunk
from penstock.step.program.passes.dead import dead, unread, without_unread
from penstock.step.program.passes.fuse import fuse
from penstock.step.program.passes.hier import factor, hier
from penstock.step.program.passes.hoist import hoist
from penstock.step.program.passes.keep_sliced import keep_sliced
from penstock.step.program.passes.overlap import overlap
from penstock.step.program.passes.priority import priority, priority_by_use
from penstock.step.program.passes.reshard import reshard
from penstock.step.program.passes.ring import ring
from penstock.step.program.passes.rotate import rotate
from penstock.step.program.passes.sink import sink
from penstock.step.program.passes.split import split
from penstock.step.program.passes.wire import wire
from penstock.step.program.rewrites import Rewrites, as_method
from penstock.step.program.verify import verified

__all__ = ["PASSES", "rewritten"]

_ALL: tuple[Callable[..., Program], ...] = (
    *(split, sink, hoist, keep_sliced, dead, wire, hier, factor, reshard),
    *(fuse, chunk, overlap, bucket, ring, rotate, priority, priority_by_use, algo),
)
PASSES = {function.__name__: function for function in _ALL}

for _name, _function in PASSES.items():
    # So that `help(program.split)` shows the arguments and the docstring of the pass.
    _method = vars(Rewrites)[_name]
    _method.__doc__, _method.__signature__ = _function.__doc__, signature(_function)


@as_method
def rewritten(program: Program, step: Rewrite) -> Program:
    """Return a program after one rewrite, which joins its history."""
    found = PASSES.get(step.name)
    if found is None:
        raise ProgramError(f"there is no rewrite {step.name!r}; there are {', '.join(PASSES)}")
    _check_arguments(found, step)
    made = found(program, *step.args, **dict(step.options))
    # A gather whose readers have all moved below another gather would still be sent.
    made = without_unread(made, among=unread(made) - unread(program))
    out = verified(made, program)
    check_old_values(out, program)
    return replace(out, history=(*program.history, step))


def _check_arguments(function: Callable[..., Program], step: Rewrite) -> None:
    """Refuse arguments that a rewrite does not have, or of a wrong type."""
    form = signature(function)
    try:
        bound = form.bind(None, *step.args, **dict(step.options))
    except TypeError as error:
        raise ProgramError(f"{step}: {error}; it is {step.name}{_shown(form)}") from None
    hints = get_type_hints(function)
    for name, given in list(bound.arguments.items())[1:]:
        is_many = form.parameters[name].kind.name == "VAR_POSITIONAL"
        for value in given if is_many else (given,):
            if not _is(value, hints.get(name, Any)):
                raise ProgramError(
                    f"{step}: {value!r} is no {form.parameters[name].annotation}; "
                    f"it is {step.name}{_shown(form)}"
                )


def _shown(form: Any) -> str:
    parameters = [str(p) for p in list(form.parameters.values())[1:]]
    return f"({', '.join(parameters)})".replace("'", "")


def _is(value: Any, hint: Any) -> bool:
    if hint is None:
        return value is None
    parts = get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        return any(_is(value, part) for part in parts)
    if get_origin(hint) is tuple:
        if not isinstance(value, tuple):
            return False
        each = parts[:1] * len(value) if parts[1:] == (...,) else parts
        return len(each) == len(value) and all(map(_is, value, each))
    if not isinstance(hint, type):
        return True
    return isinstance(value, int | float if hint is float else hint)
