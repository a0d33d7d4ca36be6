"""Rings carried out literally: in each step every rank multiplies the part it has and passes it on.

This defines a region of kind ring. Its values are those of its nodes one after the other; blocks
are computed, and sums are made, in the order of the ring.
"""

from __future__ import annotations

import numpy as np

from penstock.step.program.loops import Loop, loops_of
from penstock.step.program.mesh import Mesh
from penstock.step.program.moves import Held
from penstock.step.program.nodes import Node, Program, Region
from penstock.step.program.ops import Array
from penstock.step.program.types import Type

__all__ = ["run_ring"]

Run = tuple[int, int]
"""Elements of the whole value along one dimension, from the first to behind the last."""


def run_ring(program: Program, region: Region, values: dict[str, Held]) -> dict[str, Held]:
    """Return the values of the nodes of a ring, given the values that they read."""
    nodes = [program[name] for name in region.nodes]
    form, by = dict(region.attrs)["form"], int(dict(region.attrs)["by"])  # type: ignore[arg-type]
    if form == "gather":
        gather = next(node for node in nodes if node.op == "all_gather")
        products = [node for node in nodes if node.op == "matmul"]
        return _gathered(program, gather, products, values, by)
    product, scatter = nodes
    return {scatter.name: _scattered(program, product, scatter, values, by)}


def _gathered(
    program: Program, gather: Node, products: list[Node], values: dict[str, Held], by: int
) -> dict[str, Held]:
    mesh, part = program.mesh, program[gather.inputs[0]]
    axis, ranks = gather.axes[0], range(mesh.num_ranks)
    dim = part.type.layout(axis).dim
    out = {
        node.name: [np.zeros(node.type.local_shape(mesh, rank)) for rank in ranks]
        for node in (gather, *products)
    }
    owners = list(ranks)  # By rank: the rank whose part it has in this step.
    moving = list(values[part.name])
    for _ in range(mesh.size(axis)):
        for rank in ranks:
            run = part.type.bounds(mesh, owners[rank])[dim]
            out[gather.name][rank][_index(gather.type, mesh, rank, dim, run)] = moving[rank]
            for node in products:
                at = node.inputs.index(gather.name)
                loop = next(loop for loop in loops_of(node, program) if loop.operands[at] == dim)
                held = values | {gather.name: moving}
                args = [held[name][rank] for name in node.inputs]
                block = _block(node, loop, args, run, program=program, rank=rank, is_cut=at)
                out[node.name][rank][_index(node.type, mesh, rank, loop.out, run)] = block
        senders = [_neighbour(mesh, rank, axis, -by) for rank in ranks]
        moving, owners = [moving[r] for r in senders], [owners[r] for r in senders]
    return out


def _scattered(
    program: Program, product: Node, scatter: Node, values: dict[str, Held], by: int
) -> Held:
    mesh, axis = program.mesh, scatter.axes[0]
    ranks, size = range(mesh.num_ranks), mesh.size(axis)
    dim = int(scatter.attr("dim"))
    loop = next(loop for loop in loops_of(product, program) if loop.out == dim)
    sums: Held = []
    for step in range(size):
        # The sum that a rank has in this step reaches its owner in the last step.
        owners = [_neighbour(mesh, rank, axis, by * (size - 1 - step)) for rank in ranks]
        blocks = []
        for rank in ranks:
            run = scatter.type.bounds(mesh, owners[rank])[dim]
            args = [values[name][rank] for name in product.inputs]
            blocks.append(_block(product, loop, args, run, program=program, rank=rank))
        senders = [_neighbour(mesh, rank, axis, -by) for rank in ranks]
        sums = [sums[senders[r]] + blocks[r] for r in ranks] if step else blocks
    return [held / size for held in sums] if scatter.attr("op") == "mean" else sums


def _neighbour(mesh: Mesh, rank: int, axis: str, by: int) -> int:
    group = mesh.group(rank, axis)
    return group[(mesh.coordinate(rank, axis) + by) % len(group)]


def _block(
    node: Node,
    loop: Loop,
    args: list[Array],
    run: Run,
    *,
    program: Program,
    rank: int,
    is_cut: int = -1,
) -> Array:
    """Return the block of a product for one run of a loop; one operand may be cut already."""
    operands = []
    for place, (arg, dim) in enumerate(zip(args, loop.operands, strict=True)):
        where: tuple[slice, ...] = ()
        if dim is not None and place != is_cut:
            where = _index(program[node.inputs[place]].type, program.mesh, rank, dim, run)
        # A copy: a view has another order in memory, and may be added up in that order.
        operands.append(np.ascontiguousarray(arg[where]))
    out: Array = np.matmul(*operands)
    return out


def _index(made: Type, mesh: Mesh, rank: int, dim: int, run: Run) -> tuple[slice, ...]:
    """Return where a run of the whole value lies within the part of a rank."""
    first, _ = made.bounds(mesh, rank)[dim]
    return (slice(None),) * dim + (slice(run[0] - first, run[1] - first),)
