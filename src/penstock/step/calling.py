"""Calls of the user's functions: their operands as this rank has them, and their results put away.

A result lies where the function has put it; one that is cut into chunks has its own memory, and
each chunk is copied there. What only the backward of a call reads is let go after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from penstock.errors import ProgramError
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
    function = _function(node, calls)
    picks = [program[n] for n in program.users[node.name] if program[n].op == "pick"]
    if task.chunk is not None:
        return _in_chunks(task, node, function, memory, picks)
    done = [n for n in dict.fromkeys(node.inputs) if _is_last(memory, n, node)]

    def call() -> None:
        out = function(*(value(n) for n in node.inputs))
        results = out if isinstance(out, tuple) else (out,)
        for pick in picks:
            memory.give(pick.name, checked(pick, results[int(pick.attr("index"))]))
        for name in done:
            memory.give_away(name)

    return call


def _function(node: Node, calls: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    name = str(node.attr("function"))
    if name not in calls:
        raise ProgramError(f"no function called {name!r} was given; compile(..., calls=...)")
    found, said = getattr(calls[name], "digest", None), node.attr("digest")
    if said and found and said != found:
        raise ProgramError(
            f"the function given as {name!r} ({found[:8]}) is not the one that the program was "
            f"written with ({said[:8]}); give the calls of the same capture"
        )
    return calls[name]


def _is_last(memory: Memory, name: str, node: Node) -> bool:
    """Whether a value is a result of a call that nobody reads but this one."""
    program = memory.program
    is_cut = bool(program.regions_of(name, "chunk"))
    alone = program.users[name] == (node.name,) and name not in program.outputs
    return program[name].op == "pick" and alone and not is_cut


def _in_chunks(
    task: Task, node: Node, function: Callable[..., Any], memory: Memory, picks: list[Node]
) -> Callable[[], None]:
    reads = [(name, blocks_of(task, memory, name)) for name in node.inputs]
    writes = [(pick, blocks_of(task, memory, pick.name)) for pick in picks]

    def call() -> None:
        out = function(*(memory.piece(name, block) for name, block in reads))
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
