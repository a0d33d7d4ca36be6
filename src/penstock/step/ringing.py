"""Rings: a product and its communication in as many steps as there are ranks.

In each step a rank multiplies with the part it has while the next part is on its way to it. The
order is that of `program.rings`, which defines what a ring means. The network never waits for the
last product, and no product waits for the first transfer.
"""

from __future__ import annotations

import torch

from penstock.step.comms.comm import Comm, Handle
from penstock.step.memory import RankMemory
from penstock.step.moving import padded
from penstock.step.program.loops import loops_of
from penstock.step.program.nodes import Node, Region

__all__ = ["run_ring"]


def run_ring(region: Region, memory: RankMemory, comm: Comm) -> None:
    """Carry out a ring, on the calling thread."""
    program = memory.program
    nodes = [program[name] for name in region.nodes]
    how = dict(region.attrs)
    by = how["by"]
    assert isinstance(by, int)
    if how["form"] == "gather":
        gather = next(node for node in nodes if node.op == "all_gather")
        products = [node for node in nodes if node.op == "matmul"]
        _RingParts(memory, comm, by).gather(gather, products)
    else:
        product, scatter = nodes
        _RingParts(memory, comm, by).scatter(product, scatter)


class _RingParts:
    """Parts that go around."""

    def __init__(self, memory: RankMemory, comm: Comm, by: int) -> None:
        self._memory, self._comm, self._by = memory, comm, by
        self._program, self._rank = memory.program, memory.rank

    # -- a gather and its products ---------------------------------------------------------------

    def gather(self, gather: Node, products: list[Node]) -> None:
        """Multiply with each rank's part as it comes by."""
        source = self._program[gather.inputs[0]]
        axis = gather.axes[0]
        dim = source.type.layout(axis).dim
        group = self._program.mesh.group(self._rank, axis)
        bounds = [source.type.bounds(self._program.mesh, rank)[dim] for rank in group]
        longest = max(stop - start for start, stop in bounds)
        moving = _rows(self._memory.whole(source.name), dim, longest)
        # Two, used in turns: one is sent while the other receives. This rank's own part is not one
        # of them, since it may be the user's memory.
        rooms = [torch.empty_like(moving), torch.empty_like(moving)]
        of = self._comm.rank
        for step in range(self._comm.size):
            handle: Handle | None = None
            coming = rooms[step % 2]
            if step < self._comm.size - 1:
                handle = self._comm.shift(coming, moving, by=self._by, wrap=True)
            start, stop = bounds[of]
            part = moving[: stop - start].movedim(0, dim)
            self._memory.whole(gather.name).narrow(dim, start, stop - start).copy_(part)
            for node in products:
                self._multiply(node, gather.name, part, dim, (start, stop))
            if handle is not None:
                handle.wait()
                moving = coming
            of = (of - self._by) % self._comm.size

    def _multiply(
        self, node: Node, gathered: str, part: torch.Tensor, dim: int, here: tuple[int, int]
    ) -> None:
        at = node.inputs.index(gathered)
        loop = next(o for o in loops_of(node, self._program) if o.operands[at] == dim)
        other = self._memory.whole(node.inputs[1 - at])
        along = loop.operands[1 - at]
        if along is not None:
            other = self._narrowed(other, node.inputs[1 - at], along, here)
        a, b = (part, other) if at == 0 else (other, part)
        out = self._memory.whole(node.name)
        first = self._first(node.name, loop.out)
        out.narrow(loop.out, here[0] - first, here[1] - here[0]).copy_(a @ b)

    # -- a product and its scatter ---------------------------------------------------------------

    def scatter(self, product: Node, scatter: Node) -> None:
        """Add each rank's block of a product to a sum that travels to its owner."""
        axis, dim = scatter.axes[0], int(scatter.attr("dim"))
        mesh = self._program.mesh
        group = mesh.group(self._rank, axis)
        bounds = [scatter.type.bounds(mesh, rank)[dim] for rank in group]
        longest = max(stop - start for start, stop in bounds)
        size = self._comm.size
        # The block that has furthest to travel goes first, this rank's own last.
        owners = [(self._comm.rank + self._by * (size - 1 - step)) % size for step in range(size)]
        block = _rows(self._block(product, dim, bounds[owners[0]]), dim, longest)
        for owner in owners[1:]:
            coming = torch.empty_like(block)
            handle = self._comm.shift(coming, block, by=self._by, wrap=True)
            mine = _rows(self._block(product, dim, bounds[owner]), dim, longest)
            handle.wait()
            block = mine.add_(coming)
        start, stop = bounds[self._comm.rank]
        total = block[: stop - start].movedim(0, dim)
        if scatter.attr("op") == "mean":
            total = total / size
        self._memory.whole(scatter.name).copy_(total)

    def _block(self, product: Node, dim: int, here: tuple[int, int]) -> torch.Tensor:
        loop = next(o for o in loops_of(product, self._program) if o.out == dim)
        args = []
        for name, along in zip(product.inputs, loop.operands, strict=True):
            whole = self._memory.whole(name)
            args.append(whole if along is None else self._narrowed(whole, name, along, here))
        return args[0] @ args[1]

    def _narrowed(
        self, whole: torch.Tensor, name: str, dim: int, here: tuple[int, int]
    ) -> torch.Tensor:
        return whole.narrow(dim, here[0] - self._first(name, dim), here[1] - here[0])

    def _first(self, name: str, dim: int) -> int:
        return self._program[name].type.bounds(self._program.mesh, self._rank)[dim][0]


def _rows(tensor: torch.Tensor, dim: int, longest: int) -> torch.Tensor:
    return padded(tensor.movedim(dim, 0), longest).contiguous()
