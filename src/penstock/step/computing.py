"""Compute tasks: nodes of a program as calls of torch, prepared once and made every step.

Element by element and row by row work is a kernel (`regions`); products and other views of values
are torch's own. An operand that a rank has all of, beside a result of which it makes a part, is
narrowed to that part here: that is the free slice of the layout rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from penstock.errors import ProgramError
from penstock.program.nodes import Node, Program
from penstock.program.ops import OPS
from penstock.program.plan import Task
from penstock.step.dtypes import torch_dtype
from penstock.step.memory import Block, Memory, block_of, chunk_of
from penstock.step.regions import kernel_of

__all__ = ["Prepared", "Scalars", "blocks_of", "prepared"]

Scalars = Mapping[str, float | int]
Prepared = Callable[[Scalars], None]
_ALIGNED = ("pointwise", "state")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A value that a task reads or writes, and which block of it."""

    name: str
    block: Block


def prepared(task: Task, memory: Memory, *, host: tuple[str, ...], backend: str) -> Prepared:
    """Return what a compute task does."""
    nodes = [memory.program[name] for name in task.nodes]
    is_update = len(nodes) == 1 and nodes[0].op == "update"
    if is_update and memory.are_one(nodes[0].name, nodes[0].inputs[1]):
        return lambda scalars: None  # What it is made of lies there already.
    if all(_is_kernels(node) for node in nodes):
        return _kernel_call(task, memory, host=host, backend=backend)
    if len(nodes) > 1:
        odd = next(node for node in nodes if not _is_kernels(node))
        raise ProgramError(f"{odd.name} ({odd.op}) cannot be fused into one kernel; leave it out")
    return _torch_call(task, memory, host)


def _is_kernels(node: Node) -> bool:
    kind = OPS[node.op].kind
    rows = kind == "reduce" and node.attr("dim", node.type.ndim - 1) == node.type.ndim - 1
    return kind == "pointwise" or node.op in ("update", "slice") or rows


def blocks_of(
    task: Task, memory: Memory, name: str, consumer: Node | None = None, *, rank: int | None = None
) -> Block:
    """Return which block of a value a task touches; of what it reads, for which node."""
    program, rank = memory.program, memory.rank if rank is None else rank
    made = program[name].type
    region = None if task.region is None else program.region(task.region)
    if region is not None and task.chunk is not None:
        own = chunk_of(region, name, program, rank, task.chunk)
    else:
        own = block_of(made, program, rank)
    if consumer is None or OPS[consumer.op].kind not in _ALIGNED or consumer.op == "recv":
        return own
    result = blocks_of(task, memory, consumer.name)
    shift = len(result) - len(own)
    shape = consumer.type.shape
    return tuple(
        runs if made.shape[dim] == 1 != shape[dim + shift] else result[dim + shift]
        for dim, runs in enumerate(own)
    )


# -- kernels -----------------------------------------------------------------------------------


def _kernel_call(task: Task, memory: Memory, *, host: tuple[str, ...], backend: str) -> Prepared:
    program = memory.program
    inside = tuple(n for n in (*host, *task.nodes) if n in _needed(program, task.nodes))
    leaving = tuple(access.value for access in task.writes)
    if not leaving:
        return lambda scalars: None  # Nobody reads what it would make.
    how = backend if len(task.nodes) > 1 else "eager"
    kernel = kernel_of(program, inside, outputs=leaving, backend=how)
    reads = [_Piece(name=n, block=_read_block(task, memory, n)) for n in kernel.inputs]
    writes = [_Piece(name=n, block=blocks_of(task, memory, n)) for n in kernel.outputs]
    num_runs = max((len(r) for piece in (*reads, *writes) for r in piece.block), default=1)

    alone = program[task.nodes[0]].op if len(task.nodes) == 1 else ""
    extreme = alone if alone in ("max", "min") else None

    def call(scalars: Scalars) -> None:
        for run in range(num_runs):
            tensors = [memory.piece(p.name, _one_run(p.block, run)) for p in reads]
            blocks = [_one_run(p.block, run) for p in writes]
            out = [memory.piece(p.name, b) for p, b in zip(writes, blocks, strict=True)]
            if extreme is not None and not tensors[0].numel():
                out[0].fill_(_nothing(extreme, out[0].dtype))
                continue
            starts = tuple(runs[0][0] for runs in max(blocks, key=len))
            kernel(tensors, scalars, out=out, starts=starts)

    return call


def _nothing(op: str, dtype: torch.dtype) -> float | int:
    """Return the largest, or smallest, of no elements: what changes no other one."""
    if dtype.is_floating_point:
        return -math.inf if op == "max" else math.inf
    return torch.iinfo(dtype).min if op == "max" else torch.iinfo(dtype).max


def _needed(program: Program, nodes: tuple[str, ...]) -> set[str]:
    out = set(nodes)
    for node in reversed(program.nodes):
        if node.name in out:
            out.update(node.inputs)
    return out


def _read_block(task: Task, memory: Memory, name: str) -> Block:
    readers = (memory.program[n] for n in task.nodes)
    return blocks_of(task, memory, name, next(n for n in readers if name in n.inputs))


def _one_run(block: Block, run: int) -> Block:
    return tuple(runs if len(runs) == 1 else (runs[run],) for runs in block)


# -- what torch does itself ----------------------------------------------------------------------


def _torch_call(task: Task, memory: Memory, host: tuple[str, ...]) -> Prepared:
    (name,) = task.nodes
    node = memory.program[name]
    reads = [_Piece(name=n, block=_operand_block(task, memory, n, node)) for n in node.inputs]
    block = blocks_of(task, memory, name)
    shape = tuple(sum(stop - start for start, stop in runs) for runs in block)

    def call(scalars: Scalars) -> None:
        operands = [
            _number(memory.program[p.name], scalars)
            if p.name in host or memory.program[p.name].op in ("scalar", "const")
            else memory.piece(p.name, p.block)
            for p in reads
        ]
        if node.op == "matmul" and memory.is_view(block):
            target = memory.piece(name, block)
            if target.is_contiguous():
                torch.matmul(operands[0], operands[1], out=target)
                return
        memory.put(name, block, _evaluated(node, operands, shape))

    return call


def _number(node: Node, scalars: Scalars) -> torch.Tensor:
    value = node.attr("value") if node.op == "const" else scalars[node.name]
    return torch.tensor(value, dtype=torch_dtype(node.type.dtype))


def _operand_block(task: Task, memory: Memory, name: str, node: Node) -> Block:
    own = blocks_of(task, memory, name, node)
    if node.op != "matmul":
        return own
    # Batches of one operand that this rank has all of, beside slices of the other.
    result = blocks_of(task, memory, node.name)
    made, shift = memory.program[name].type, len(result) - len(own)
    return tuple(
        result[dim + shift] if dim < len(own) - 2 and made.shape[dim] != 1 else runs
        for dim, runs in enumerate(own)
    )


def _evaluated(node: Node, operands: list[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    if node.op == "matmul":
        return torch.matmul(operands[0], operands[1])
    if node.op == "transpose":
        return operands[0].permute(tuple(node.attr("dims")))
    if node.op in ("flatten", "unflatten"):
        return operands[0].reshape(shape)
    if node.op == "expand":
        dims = tuple(node.attr("dims"))
        ones = [1 if d in dims else n for d, n in enumerate(shape)]
        return operands[0].reshape(ones).expand(shape)
    if node.op == "softmax":
        return torch.softmax(operands[0], dim=int(node.attr("dim")))
    if node.op == "slice":
        return operands[0]
    raise ProgramError(f"nothing here computes {node.op} ({node.name})")
