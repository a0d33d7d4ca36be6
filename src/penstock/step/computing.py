"""Compute tasks: nodes of a program as calls of torch, prepared once and made every step.

Work element by element and row by row is a kernel (`regions`); products, reshapes and the like are
torch's own. If a rank has all of an operand and computes a part of the result, the operand is
narrowed to that part here: the slicing that the layout rules allow without communication.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import product

import torch

from penstock.errors import ProgramError
from penstock.step.dtypes import torch_dtype
from penstock.step.kernels.body import KernelBody
from penstock.step.kernels.regions import Kernel, kernel_of
from penstock.step.memory import Block, RankMemory, block_of, chunk_of, shape_of
from penstock.step.program.nodes import Node, Program
from penstock.step.program.ops import OPS
from penstock.step.program.plan import Task

__all__ = ["Prepared", "Scalars", "blocks_of", "prepared"]

Scalars = Mapping[str, float | int]
Prepared = Callable[[Scalars], None]
_ALIGNED = ("pointwise", "state")


def prepared(task: Task, memory: RankMemory, *, host: tuple[str, ...], backend: str) -> Prepared:
    """Return what a compute task does."""
    nodes = [memory.program[name] for name in task.nodes]
    is_update = len(nodes) == 1 and nodes[0].op == "update"
    if is_update and memory.are_one(nodes[0].name, nodes[0].inputs[1]):
        return lambda scalars: None  # The new value lies in the place of the state already.
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
    task: Task,
    memory: RankMemory,
    name: str,
    consumer: Node | None = None,
    *,
    rank: int | None = None,
) -> Block:
    """Return the block of a value that a task writes, or reads for `consumer`."""
    program, rank = memory.program, memory.rank if rank is None else rank
    made = program[name].type
    region = None if task.region is None else program.region(task.region)
    if region is not None and task.chunk is not None:
        own = chunk_of(region, name, program, rank, task.chunk)
    else:
        own = block_of(made, program, rank)
    if consumer is None or OPS[consumer.op].kind not in _ALIGNED or consumer.op == "recv":
        return own
    result = blocks_of(task, memory, consumer.name, rank=rank)
    shift = len(result) - len(own)
    shape = consumer.type.shape
    return tuple(
        runs if made.shape[dim] == 1 != shape[dim + shift] else result[dim + shift]
        for dim, runs in enumerate(own)
    )


# -- kernels -----------------------------------------------------------------------------------


def _kernel_call(
    task: Task, memory: RankMemory, *, host: tuple[str, ...], backend: str
) -> Prepared:
    program = memory.program
    inside = tuple(n for n in (*host, *task.nodes) if n in _needed(program, task.nodes))
    leaving = tuple(access.value for access in task.writes)
    if not leaving:
        return lambda scalars: None  # Nobody reads the results.
    how = backend if len(task.nodes) > 1 else "eager"
    kernel = kernel_of(program, inside, outputs=leaving, backend=how)
    if _is_apart(kernel.body, task, memory):
        return _OneByOne(task, memory, host)
    reads = {name: _read_block(task, memory, name) for name in kernel.inputs}
    writes = {name: blocks_of(task, memory, name) for name in kernel.outputs}
    whole = _whole_block(kernel.body, task, memory) or max(writes.values(), key=len)
    num_runs = _num_runs([whole, *reads.values(), *writes.values()])

    def call(scalars: Scalars) -> None:
        for run in range(num_runs):
            tensors = [memory.piece(n, _one_run(block, run)) for n, block in reads.items()]
            out = [memory.piece(n, _one_run(block, run)) for n, block in writes.items()]
            kernel(tensors, scalars, out=out, starts=_starts(_one_run(whole, run)))

    return call


def _whole_block(
    body: KernelBody, task: Task, memory: RankMemory, rank: int | None = None
) -> Block | None:
    """Return the block that a kernel covers, in the coordinates of a value of full shape."""
    made = [n for n in task.nodes if memory.program[n].type.shape == body.full]
    if made:
        return blocks_of(task, memory, made[0], rank=rank)
    given = [n for n in body.inputs if body.types[n].shape == body.full]
    return _read_block(task, memory, given[0], rank) if given else None


def _needed(program: Program, nodes: tuple[str, ...]) -> set[str]:
    out = set(nodes)
    for node in reversed(program.nodes):
        if node.name in out:
            out.update(node.inputs)
    return out


def _read_block(task: Task, memory: RankMemory, name: str, rank: int | None = None) -> Block:
    readers = (memory.program[n] for n in task.nodes)
    reader = next(n for n in readers if name in n.inputs)
    return blocks_of(task, memory, name, reader, rank=rank)


def _num_runs(blocks: Iterable[Block]) -> int:
    return max((len(runs) for block in blocks for runs in block), default=1)


def _one_run(block: Block, run: int) -> Block:
    return tuple(runs if len(runs) == 1 else (runs[run],) for runs in block)


def _starts(block: Block) -> tuple[int, ...]:
    return tuple(runs[0][0] for runs in block)


# -- nodes one by one ----------------------------------------------------------------------------


def _is_apart(body: KernelBody, task: Task, memory: RankMemory) -> bool:
    """Whether no single pass covers everything that is computed.

    One node may read all of a value and another a slice of it; where slices run out, a rank has
    elements of one value and none of another. The answer is the same on all ranks, whatever they
    have, because the last bit of values that they share depends on it.
    """
    if len(task.nodes) > 1 and (body.strays or (body.kind == "loose" and body.has_dropout)):
        return True
    mesh = memory.program.mesh
    corners = map(sum, product(*((0, mesh.group(0, axis)[-1]) for axis in mesh.names)))
    checks = (_has_other_parts, _is_partly_empty)
    return any(
        is_so(body, task, memory, rank) for rank in {*corners, memory.rank} for is_so in checks
    )


def _has_other_parts(body: KernelBody, task: Task, memory: RankMemory, rank: int) -> bool:
    """Whether nodes work on different parts, such as a sum of all and a product with a slice."""
    read: dict[str, set[Block]] = {
        name: {blocks_of(task, memory, name, rank=rank)} for name in task.nodes
    }
    for node in (memory.program[name] for name in task.nodes):
        for name in node.inputs:
            if name in read or name in body.inputs:
                read.setdefault(name, set()).add(blocks_of(task, memory, name, node, rank=rank))
    if any(len(blocks) > 1 for blocks in read.values()):
        return True
    whole = _whole_block(body, task, memory, rank) or ()
    reach = body.reach and body.reach | {name: body.reach[value] for name, value in body.stores}
    return not all(_lies_in(whole, block, reach.get(n, "")) for n, (block,) in read.items())


def _lies_in(whole: Block, block: Block, reach: str) -> bool:
    """Whether a value's part is the one that belongs to a kernel's block."""
    if reach == "row":
        return block[: len(whole) - 1] == whole[:-1]
    if reach == "col":
        return block[-1] == whole[-1]
    return reach != "full" or block == whole


def _is_partly_empty(body: KernelBody, task: Task, memory: RankMemory, rank: int) -> bool:
    names = (*task.nodes, *body.inputs, *body.outputs)
    blocks = {name: blocks_of(task, memory, name, rank=rank) for name in names}
    for run in range(_num_runs(blocks.values())):
        sizes = {n: math.prod(shape_of(_one_run(block, run))) for n, block in blocks.items()}
        if not all(sizes.values()) and any(sizes[name] for name in body.outputs):
            return True
    return False


class _OneByOne:
    """A kernel node by node, each by itself; states change when all are computed."""

    def __init__(self, task: Task, memory: RankMemory, host: tuple[str, ...]) -> None:
        self._memory = memory
        self._leaving = [access.value for access in task.writes]
        self._blocks = {name: blocks_of(task, memory, name) for name in task.nodes}
        self._kernels: dict[str, Kernel] = {}
        self._reads: dict[str, dict[str, Block]] = {}
        """By node, the blocks of what it reads."""
        program = memory.program
        for name in task.nodes:
            inside = [n for n in (*host, name) if n in _needed(program, (name,))]
            kernel = kernel_of(program, inside, outputs=(name,), backend="eager")
            self._kernels[name] = kernel
            self._reads[name] = {
                n: blocks_of(task, memory, n, program[name]) for n in kernel.inputs
            }
        read = (block for blocks in self._reads.values() for block in blocks.values())
        self._num_runs = _num_runs([*self._blocks.values(), *read])

    def __call__(self, scalars: Scalars) -> None:
        for run in range(self._num_runs):
            made: dict[str, torch.Tensor] = {}
            for name in self._kernels:
                made[name] = self._computed(name, run, made, scalars)
            for name in self._leaving:
                self._memory.piece(name, _one_run(self._blocks[name], run)).copy_(made[name])

    def _computed(
        self, name: str, run: int, made: dict[str, torch.Tensor], scalars: Scalars
    ) -> torch.Tensor:
        node, block = self._memory.program[name], _one_run(self._blocks[name], run)
        dtype = torch_dtype(node.type.dtype)
        out = torch.empty(shape_of(block), dtype=dtype, device=self._memory.device)
        tensors = [
            self._operand(n, _one_run(read, run), run, made)
            for n, read in self._reads[name].items()
        ]
        if node.op in ("max", "min") and not tensors[0].numel():
            return out.fill_(_nothing(node.op, dtype))
        self._kernels[name](tensors, scalars, out=[out], starts=_starts(block))
        return out

    def _operand(
        self, name: str, block: Block, run: int, made: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        if name not in made:
            return self._memory.piece(name, block)
        out, own = made[name], _starts(_one_run(self._blocks[name], run))
        for dim, (((start, stop),), first) in enumerate(zip(block, own, strict=True)):
            out = out.narrow(dim, start - first, stop - start)
        return out


def _nothing(op: str, dtype: torch.dtype) -> float | int:
    """Return the largest, or smallest, of no elements: the neutral element of max, or min."""
    if dtype.is_floating_point:
        return -math.inf if op == "max" else math.inf
    return torch.iinfo(dtype).min if op == "max" else torch.iinfo(dtype).max


# -- torch's own operations ----------------------------------------------------------------------


def _torch_call(task: Task, memory: RankMemory, host: tuple[str, ...]) -> Prepared:
    (name,) = task.nodes
    program = memory.program
    node = program[name]
    numbers = {n for n in node.inputs if n in host or program[n].op in ("scalar", "const")}
    reads = {n: _operand_block(task, memory, n, node) for n in node.inputs}
    block = blocks_of(task, memory, name)
    shape = shape_of(block)

    def call(scalars: Scalars) -> None:
        operands = [
            _number(program[n], scalars) if n in numbers else memory.piece(n, reads[n])
            for n in node.inputs
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


def _operand_block(task: Task, memory: RankMemory, name: str, node: Node) -> Block:
    own = blocks_of(task, memory, name, node)
    if node.op != "matmul":
        return own
    # This rank may have all batches of one operand and a slice of the other.
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
