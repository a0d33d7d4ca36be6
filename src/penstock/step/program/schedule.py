"""Schedules: the rewrites that make a program fast, as data.

A schedule is a list of steps, each the name of a rewrite and its arguments. It prints as text, one
rewrite a line, and reads back; so it can be kept in a file, compared, sent to all ranks, and made
again from what the user wrote:

    split('g')
    sink('g.gather', below='w')
    keep_sliced('m', 'v')

Text is data: it is parsed, never run. A line is one call of a rewrite by name, with names, numbers
and tuples of them as arguments; empty lines and those that begin with # are skipped.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable
from typing import Any

from penstock.errors import ProgramError
from penstock.step.program.nodes import Attr, Program, Rewrite
from penstock.step.program.passes import PASSES, rewritten
from penstock.step.program.rewrites import as_method

__all__ = ["LINE_CHARS_MAX", "STEPS_MAX", "Schedule", "apply", "read_schedule", "schedule_text"]

Schedule = tuple[Rewrite, ...]

STEPS_MAX = 10_000
"""Rewrites in one schedule."""
LINE_CHARS_MAX = 100_000
"""A line names a few nodes; all those of a large program at most."""


def apply(program: Program, schedule: Iterable[Rewrite] | str) -> Program:
    """Return a program after all rewrites of a schedule; an error names the one that fails."""
    steps = read_schedule(schedule) if isinstance(schedule, str) else tuple(schedule)
    for number, step in enumerate(steps, 1):
        try:
            program = rewritten(program, step)
        except ProgramError as error:
            raise ProgramError(f"step {number} of {len(steps)}, {step}: {error}") from None
    return program


@as_method
def schedule_text(schedule: Iterable[Rewrite]) -> str:
    """Return a schedule as text that reads back as the same.

    >>> schedule_text([Rewrite(name="sink", args=("g.gather",), options=(("below", "w"),))])
    "sink('g.gather', below='w')\\n"
    """
    lines = []
    for step in schedule:
        for value in (*step.args, *(value for _, value in step.options)):
            _check_value(value, str(step))
        lines.append(f"{step}\n")
    return "".join(lines)


def read_schedule(text: str) -> Schedule:
    """Return the schedule of a text.

    >>> [str(step) for step in read_schedule("split('g', dim=1)")]
    ["split('g', dim=1)"]
    """
    lines = text.splitlines()
    steps = [
        _read_step(line.strip(), number)
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.strip().startswith("#")
    ]
    if len(steps) > STEPS_MAX:
        raise ProgramError(f"a schedule of {len(steps)} rewrites; at most {STEPS_MAX} are read")
    return tuple(steps)


def _read_step(line: str, number: int) -> Rewrite:
    where = f"line {number} of the schedule"
    if len(line) > LINE_CHARS_MAX:
        raise ProgramError(f"{where} has {len(line)} characters; at most {LINE_CHARS_MAX} are read")
    try:
        call = ast.parse(line, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ProgramError(f"{where} cannot be read: {error}; write split('g')") from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ProgramError(f"{where} is no rewrite: {line[:80]!r}; write split('g')")
    if call.func.id not in PASSES:
        raise ProgramError(
            f"{where}: there is no rewrite {call.func.id!r}; there are {', '.join(PASSES)}"
        )
    args = tuple(_read_value(arg, where) for arg in call.args)
    options = []
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ProgramError(f"{where}: options are written one by one, as below='w'")
        options.append((keyword.arg, _read_value(keyword.value, where)))
    return Rewrite(name=call.func.id, args=args, options=tuple(options))


def _read_value(node: ast.expr, where: str) -> Attr:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError, SyntaxError):
        raise ProgramError(
            f"{where}: {ast.unparse(node)[:80]!r} is no argument; {_ARGUMENTS}"
        ) from None
    return _check_value(value, where)


_ARGUMENTS = "arguments are strings, numbers, True, False, None, and tuples of those"


def _check_value(value: Any, where: str) -> Attr:
    if isinstance(value, tuple):
        return tuple(_check_value(one, where) for one in value)
    is_plain = value is None or isinstance(value, str | bool | int | float)
    if not is_plain or (isinstance(value, float) and not math.isfinite(value)):
        raise ProgramError(f"{where}: {value!r} is no argument; {_ARGUMENTS}")
    found: Attr = value
    return found
