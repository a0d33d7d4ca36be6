"""Calls of the user's functions: their operands as this rank has them, and their results put away.

A result lies where the function has put it; one that is cut into chunks has its own memory, and
each chunk is copied there. Numbers that the host has are given as numbers. What only the backward
of a call reads is let go after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.program.calls import function_of
from penstock.program.nodes import Node
from penstock.program.plan import Task
from penstock.step.computing import blocks_of
from penstock.step.memory import Memory, shape_of

__all__ = ["call_of"]


def call_of(
    task: Task,
    calls: Mapping[str, Callable[..., Any]],
    memory: Memory,
    *,
    value: Callable[[str], Any],
    checked: Callable[[Node, Any], torch.Tensor],
) -> Callable[[], None]:
    """Return what a task does that calls a function, given how values are found and checked."""
    program = memory.program
    node = program[task.nodes[0]]
    function = function_of(node, calls)

    def read(name: str) -> Any:
        return program[name].attr("value") if program[name].op == "const" else value(name)

    picks = [program[n] for n in program.users[node.name] if program[n].op == "pick"]
    if task.chunk is not None:
        return _in_chunks(task, node, function, memory, read)
    done = [n for n in dict.fromkeys(node.inputs) if _is_last(memory, n, node)]

    def call() -> None:
        out = function(*(read(n) for n in node.inputs))
        results = out if isinstance(out, tuple) else (out,)
        for pick in picks:
            memory.give(pick.name, checked(pick, results[int(pick.attr("index"))]))
        for name in done:
            memory.give_away(name)

    return call


def _is_last(memory: Memory, name: str, node: Node) -> bool:
    """Whether a value is a result of a call that nobody reads but this one."""
    program = memory.program
    is_cut = bool(program.regions_of(name, "chunk"))
    alone = program.users[name] == (node.name,) and name not in program.outputs
    return program[name].op == "pick" and alone and not is_cut


def _in_chunks(
    task: Task,
    node: Node,
    function: Callable[..., Any],
    memory: Memory,
    read: Callable[[str], Any],
) -> Callable[[], None]:
    program = memory.program
    reads = [(name, blocks_of(task, memory, name)) for name in node.inputs]
    picks = [program[n] for n in program.users[node.name] if program[n].op == "pick"]
    writes = [(pick, blocks_of(task, memory, pick.name)) for pick in picks]

    def call() -> None:
        # A number has no pieces, and may be one of the host's.
        given = [memory.piece(name, block) if block else read(name) for name, block in reads]
        out = function(*given)
        results = out if isinstance(out, tuple) else (out,)
        for pick, block in writes:
            found = results[int(pick.attr("index"))]
            if tuple(found.shape) != shape_of(block):
                raise ProgramError(
                    f"{pick.name} in chunk {task.chunk} is {tuple(found.shape)}, should be "
                    f"{shape_of(block)}"
                )
            memory.put(pick.name, block, found)

    return call
