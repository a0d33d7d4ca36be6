"""Rewrites as methods of a program: `adam.split("g").sink("g.gather", below="w")`.

What is done with programs needs `Program`, and a program has methods that do it. So that their
modules need not import each other, a function that is a method too enters itself here, with
`as_method`; a program finds it by name. The package imports all of them, so the table is full
before anybody can have a program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from penstock.step.program.nodes import Program

__all__ = ["METHODS", "Rewrites", "as_method"]

F = TypeVar("F", bound=Callable[..., Any])

METHODS: dict[str, Callable[..., Any]] = {}
"""By name: functions whose first argument is a program, or a part of one."""


def as_method(function: F) -> F:
    """Let a program find a function by its name."""
    METHODS[function.__name__] = function
    return function


def _rewrite(name: str) -> Callable[..., Program]:
    """Return the method that applies a rewrite; `passes` gives it its arguments and docstring."""

    def method(program: Program, *args: Any, **options: Any) -> Program:
        return program.apply(name, *args, **options)

    method.__name__ = method.__qualname__ = name
    return method


class Rewrites:
    """The rewrites by name: `program.split("g")` is `program.apply("split", "g")`."""

    # What is computed where.
    split, sink, hoist = _rewrite("split"), _rewrite("sink"), _rewrite("hoist")
    keep_sliced, dead, wire = _rewrite("keep_sliced"), _rewrite("dead"), _rewrite("wire")
    hier, factor, reshard = _rewrite("hier"), _rewrite("factor"), _rewrite("reshard")
    # How it is carried out.
    fuse, chunk, overlap = _rewrite("fuse"), _rewrite("chunk"), _rewrite("overlap")
    bucket, ring, rotate = _rewrite("bucket"), _rewrite("ring"), _rewrite("rotate")
    priority, priority_by_use = _rewrite("priority"), _rewrite("priority_by_use")
    algo = _rewrite("algo")
