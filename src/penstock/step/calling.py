"""Calls of the user's functions: their operands as this rank has them, and their results stored.

A result stays where the function has put it, unless that is memory of an operand, or memory that
the function may reuse while the result is still read: then it is copied. A result that is cut into
chunks has memory of its own, into which each chunk is copied. A function that overwrites its
operands is refused: others read them. Numbers on the host are passed as numbers. A value that only
the backward of a call reads is freed after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.step.computing import blocks_of
from penstock.step.dtypes import torch_dtype
from penstock.step.memory import RankMemory, shape_of
from penstock.step.program.calls import function_of
from penstock.step.program.nodes import Node
from penstock.step.program.plan import Task

__all__ = ["call_of"]


def call_of(
    task: Task,
    calls: Mapping[str, Callable[..., Any]],
    memory: RankMemory,
    *,
    value: Callable[[str], Any],
    checked: Callable[[Node, Any], torch.Tensor],
) -> Callable[[], None]:
    """Return what a task does that calls a function.

    Args:
        task: with the call.
        calls: the user's functions by name.
        memory: of this rank.
        value: returns a value by its name.
        checked: returns a result if it fits its node, or raises.
    """
    program = memory.program
    node = program[task.nodes[0]]
    function = function_of(node, calls)

    def read(name: str) -> Any:
        return program[name].attr("value") if program[name].op == "const" else value(name)

    picks = [program[n] for n in program.users[node.name] if program[n].op == "pick"]
    if task.chunk is not None:
        return _in_chunks(task, node, function, memory, read)
    done = [n for n in dict.fromkeys(node.inputs) if _is_last(memory, n, node)]
    lasting = [pick.name for pick in picks if _may_outlast(memory, node, pick, function)]

    def call() -> None:
        given = [read(n) for n in node.inputs]
        results = _results(node, function, given)
        theirs = _places(given)
        for pick in picks:
            found = checked(pick, results[int(pick.attr("index"))])
            if pick.name in lasting or _places([found]) & theirs:
                found = found.clone()
            memory.give(pick.name, found)
        for name in done:
            memory.give_away(name)

    return call


def _results(node: Node, function: Callable[..., Any], given: Sequence[Any]) -> tuple[Any, ...]:
    """Call a function; return its results, as many as there should be."""
    before = _versions(given)
    out = function(*given)
    results = out if isinstance(out, tuple) else (out,)
    name, count = node.attr("function"), len(node.attr("outs"))
    if len(results) != count:
        raise ProgramError(
            f"{node.where}: {name!r} returns {len(results)} values, the program says {count}; "
            "return a tensor, or a tuple of them"
        )
    changed = [n for n, a, b in zip(node.inputs, before, _versions(given), strict=True) if a != b]
    if changed:
        raise ProgramError(
            f"{node.where}: {name!r} writes over its operand {changed[0]}, which others may read; "
            "let it return a new tensor"
        )
    return results


def _versions(given: Iterable[Any]) -> list[int]:
    """Return how often each value has been overwritten, as far as torch can tell.

    Torch counts writes by memory, so not for a part of one: other parts may be written meanwhile.
    """
    return [one._version if _is_alone(one) else 0 for one in given]


def _is_alone(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.is_inference():
        return False
    return value.nbytes == value.untyped_storage().nbytes()


def _places(values: Iterable[Any]) -> set[int]:
    """Return the addresses of tensors; those without elements have none."""
    tensors = (one for one in values if isinstance(one, torch.Tensor) and one.numel())
    return {one.untyped_storage().data_ptr() for one in tensors}


def _may_outlast(memory: RankMemory, node: Node, pick: Node, function: Callable[..., Any]) -> bool:
    """Whether a result is read after the next call of its function, which may reuse its memory.

    Captured functions make new results in each call.
    """
    program, name = memory.program, node.attr("function")
    calls = [n for n in program.nodes if n.op == "call" and n.attr("function") == name]
    is_ours = getattr(function, "digest", None) is not None
    return not is_ours and (len(calls) > 1 or pick.name in program.outputs)


def _is_last(memory: RankMemory, name: str, node: Node) -> bool:
    """Whether a value is a result of a call that only this call reads."""
    program = memory.program
    is_cut = bool(program.regions_of(name, "chunk"))
    alone = program.users[name] == (node.name,) and name not in program.outputs
    return program[name].op == "pick" and alone and not is_cut


def _in_chunks(
    task: Task,
    node: Node,
    function: Callable[..., Any],
    memory: RankMemory,
    read: Callable[[str], Any],
) -> Callable[[], None]:
    program = memory.program
    reads = [(name, blocks_of(task, memory, name)) for name in node.inputs]
    picks = [program[n] for n in program.users[node.name] if program[n].op == "pick"]
    writes = [(pick, blocks_of(task, memory, pick.name)) for pick in picks]

    def call() -> None:
        # A number has no pieces, and may be on the host.
        given = [memory.piece(name, block) if block else read(name) for name, block in reads]
        results = _results(node, function, given)
        for pick, block in writes:
            found = results[int(pick.attr("index"))]
            wanted = (shape_of(block), torch_dtype(pick.type.dtype))
            is_tensor = isinstance(found, torch.Tensor)
            if not is_tensor or (tuple(found.shape), found.dtype) != wanted:
                got = (tuple(found.shape), found.dtype) if is_tensor else type(found).__name__
                raise ProgramError(
                    f"{node.where}: {pick.name} in chunk {task.chunk} is {got}, should be {wanted}"
                )
            memory.put(pick.name, block, found)

    return call
