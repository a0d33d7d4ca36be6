"""Whether a rewrite can be called so: a schedule is data, and data may be wrong."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from penstock.errors import ProgramError
from penstock.step.program.nodes import Program, Rewrite

__all__ = ["check_arguments"]


def check_arguments(function: Callable[..., Program], step: Rewrite) -> None:
    """Refuse arguments that a rewrite does not have, or of another kind."""
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
