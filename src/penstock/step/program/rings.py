"""Rings carried out literally: in each step every rank multiplies what it has and passes it on.

That is what a region of kind ring means. It computes the same as its nodes one after the other; the
order in which blocks come, and in which a sum is made, is that of the ring.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.step.program.loops import Loop, loops_of
from penstock.step.program.nodes import Node, Program, Region
from penstock.step.program.ops import Array

__all__ = ["run_ring"]

Held = list[Array]
Run = tuple[int, int]


def run_ring(program: Program, region: Region, values: dict[str, Held]) -> dict[str, Held]:
    """Return what the nodes of a ring make of values that are there."""
    nodes = [program[name] for name in region.nodes]
    form, by = dict(region.attrs)["form"], int(dict(region.attrs)["by"])  # type: ignore[arg-type]
    assert region.axis is not None
    if form == "gather":
        gather = next(node for node in nodes if node.op == "all_gather")
        products = [node for node in nodes if node.op == "matmul"]
        return _gathered(program, gather, products, values, by)
    product, scatter = nodes
    return {scatter.name: _scattered(program, product, scatter, values, by)}


@dataclass(frozen=True, slots=True)
class _RingNode:
    """A node on one rank."""

    program: Program
    node: Node
    rank: int

    def bounds(self, name: str) -> tuple[Run, ...]:
        return self.program[name].type.bounds(self.program.mesh, self.rank)

    def room(self) -> Array:
        return np.zeros(self.node.type.local_shape(self.program.mesh, self.rank))


def _gathered(
    program: Program, gather: Node, products: list[Node], values: dict[str, Held], by: int
) -> dict[str, Held]:
    mesh, part = program.mesh, program[gather.inputs[0]]
    axis, ranks = gather.axes[0], range(program.mesh.num_ranks)
    dim = part.type.layout(axis).dim
    out = {n.name: [_RingNode(program, n, r).room() for r in ranks] for n in (gather, *products)}
    # Who made the part that a rank has just now.
    of = list(ranks)
    moving = list(values[part.name])
    for _ in range(mesh.size(axis)):
        for rank in ranks:
            here = part.type.bounds(mesh, of[rank])[dim]
            _place(
                _RingNode(program, gather, rank), out[gather.name][rank], moving[rank], dim, here
            )
            for node in products:
                at, ring = node.inputs.index(gather.name), _RingNode(program, node, rank)
                loop = next(o for o in loops_of(node, program) if o.operands[at] == dim)
                other = values[node.inputs[1 - at]][rank]
                args = [moving[rank], other] if at == 0 else [other, moving[rank]]
                block = _product(ring, loop, args, here, skip=at)
                _place(ring, out[node.name][rank], block, loop.out, here)
        moving = [moving[_neighbour(program, rank, axis, -by)] for rank in ranks]
        of = [of[_neighbour(program, rank, axis, -by)] for rank in ranks]
    return out


def _scattered(
    program: Program, product: Node, scatter: Node, values: dict[str, Held], by: int
) -> Held:
    mesh, axis = program.mesh, scatter.axes[0]
    ranks, size = range(mesh.num_ranks), mesh.size(axis)
    dim = int(scatter.attr("dim"))
    loop = next(o for o in loops_of(product, program) if o.out == dim)
    sums: list[Array | None] = [None] * mesh.num_ranks
    for step in range(size):
        if step:
            sums = [sums[_neighbour(program, rank, axis, -by)] for rank in ranks]
        for rank in ranks:
            # The sum that a rank has now ends its way at its owner in the last step.
            owner = _neighbour(program, rank, axis, by * (size - 1 - step))
            here = scatter.type.bounds(mesh, owner)[dim]
            args = [values[name][rank] for name in product.inputs]
            block = _product(_RingNode(program, product, rank), loop, args, here)
            before = sums[rank]
            sums[rank] = block if before is None else before + block
    done = [held for held in sums if held is not None]
    return [held / size for held in done] if scatter.attr("op") == "mean" else done


def _neighbour(program: Program, rank: int, axis: str, by: int) -> int:
    group = program.mesh.group(rank, axis)
    return group[(program.mesh.coordinate(rank, axis) + by) % len(group)]


def _product(ring: _RingNode, loop: Loop, args: list[Array], here: Run, skip: int = -1) -> Array:
    """Return the block of a product that some of the loop gives; one operand may be cut already."""
    cut = []
    for place, (arg, dim) in enumerate(zip(args, loop.operands, strict=True)):
        if dim is None or place == skip:
            cut.append(arg)
            continue
        first, _ = ring.bounds(ring.node.inputs[place])[dim]
        cut.append(np.take(arg, np.arange(here[0] - first, here[1] - first), axis=dim))
    out: Array = np.matmul(*cut)
    return out


def _place(ring: _RingNode, whole: Array, block: Array, dim: int, here: Run) -> None:
    """Write a block where it belongs in what a rank has."""
    first, _ = ring.bounds(ring.node.name)[dim]
    where = [slice(None)] * whole.ndim
    where[dim] = slice(here[0] - first, here[1] - first)
    whole[tuple(where)] = block
