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


def _rewrite(name: str, does: str) -> Callable[..., Program]:
    """Return the method that applies one of `passes`, with its arguments as they are given."""

    def method(program: Program, *args: Any, **options: Any) -> Program:
        return program.apply(name, *args, **options)

    method.__name__ = method.__qualname__ = name
    method.__doc__ = f"{does}; `passes.{name}` has the arguments and the conditions."
    return method


class Rewrites:
    """The rewrites by name: `program.split("g")` is `program.apply("split", "g")`."""

    # -- what is computed where --------------------------------------------------------------

    split = _rewrite("split", "Split an all-reduce, a send or a load in two halves")
    sink = _rewrite("sink", "Move gathers or all-reduces below what reads them")
    hoist = _rewrite("hoist", "Move a gather, an all-reduce or a slice above what it moves")
    keep_sliced = _rewrite("keep_sliced", "Keep states in slices")
    dead = _rewrite("dead", "Drop values that nobody reads")
    hier = _rewrite("hier", "Do a collective along two axes one axis after the other")
    factor = _rewrite("factor", "Make several axes of one")
    reshard = _rewrite("reshard", "Gather again for a later reader, instead of holding the value")
    wire = _rewrite("wire", "Send fewer bits than values have; the program is approximate then")

    # -- how it is carried out -----------------------------------------------------------------

    fuse = _rewrite("fuse", "Carry nodes out as one kernel")
    chunk = _rewrite("chunk", "Carry nodes out chunk by chunk")
    overlap = _rewrite("overlap", "Let nodes that do not need each other run at the same time")
    bucket = _rewrite("bucket", "Send several small values as one")
    ring = _rewrite("ring", "Multiply matrices part by part while the parts go round")
    rotate = _rewrite("rotate", "Do something iterations ahead: load early, gather later")
    priority = _rewrite("priority", "Choose which communication goes first")
    priority_by_use = _rewrite("priority_by_use", "Order a lane by first use")
    algo = _rewrite("algo", "Choose the algorithm of collectives: direct, ring or native")
