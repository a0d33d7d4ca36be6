"""A fused region between ranks that share memory: one kernel over the tensors of all ranks.

The kernel reads every rank's gradients, which is the reduce-scatter, and writes every rank's
weights, which is the gather; in between nothing touches memory. Ranks meet before it, when all
gradients are written, and after it, when all weights are. On GPUs it is one launch, with pointers
to the memory of all ranks (`peer`). The tensors of both ends must lie in the arena (`Groups.take`);
if they do not, or if ranks stop for a norm, the region is carried out as a chain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from penstock.step.computing import Scalars, blocks_of
from penstock.step.kernels.regions import kernel_of
from penstock.step.lanes import Begun
from penstock.step.memory import Block, RankMemory
from penstock.step.program.layouts import part
from penstock.step.program.nodes import Node
from penstock.step.program.ops import OPS, is_move
from penstock.step.program.plan import Task

if TYPE_CHECKING:
    from penstock.step.comms.shm import ShmComm

__all__ = ["shared_pass"]


def shared_pass(
    task: Task, memory: RankMemory, comm: ShmComm, *, scalars: Scalars, backend: str
) -> Callable[[], Begun | None] | None:
    """Return how a fused task is begun as one kernel, or None if it has no such form.

    The function returned begins the task, or returns None if the tensors are not in the arena.
    """
    program = memory.program
    nodes = [program[name] for name in task.nodes]
    scatters = [node for node in nodes if node.op == "reduce_scatter"]
    gathers = [node for node in nodes if node.op == "all_gather"]
    flat = all(node.type.ndim <= 1 for node in nodes)
    # For a norm inside, all ranks stop and exchange it: no single pass does that.
    stops = any(is_move(node.op) and node not in (*scatters, *gathers) for node in nodes)
    if task.chunk is not None or not flat or len(scatters) != 1 or stops:
        return None
    if _is_odd(nodes, scatters[0], memory, comm):
        return None
    after = {user for node in gathers for user in program.users[node.name]}
    # An update with a gathered value lies where the gather has written it.
    inside = tuple(node.name for node in nodes if node.name not in after)
    leaving = [access.value for access in task.writes if access.value not in after]
    leaving += [node.name for node in gathers if node.name not in leaving]
    kernel = kernel_of(program, inside, outputs=leaving, backend=backend)
    mine = blocks_of(task, memory, scatters[0].name)
    source = scatters[0].inputs[0]
    gathered = {node.name for node in gathers}

    def pieces(name: str) -> torch.Tensor | list[torch.Tensor]:
        whole = memory.whole(name)
        if name == source or name in gathered:
            return [_cut(one, mine) for one in comm.everyones(whole)]
        return _cut(whole, mine) if whole.shape == memory.whole(source).shape else whole

    def work() -> None:
        comm.meet(task.name)  # the gradients of all ranks are written
        start = mine[0][0][0]
        inputs = [pieces(name) for name in kernel.inputs]
        outs = [pieces(name) for name in kernel.outputs]
        kernel(inputs, scalars, out=outs, starts=(start,))
        comm.flags.sync()  # the weights are, and no rank reads these gradients any more

    def begin() -> Begun | None:
        ends = [memory.whole(name) for name in (source, *gathered)]
        if any(comm.arena.offset_of(tensor) is None for tensor in ends):
            return None
        return Begun(handle=comm.start(work), finish=lambda: None)

    return begin


def _is_odd(nodes: list[Node], scatter: Node, memory: RankMemory, comm: ShmComm) -> bool:
    """Whether no single pass covers it: a rank has no part, or nodes are cut differently."""
    program = memory.program
    ((first, last),) = program[scatter.inputs[0]].type.bounds(program.mesh, memory.rank)
    begin, end = part(last - first, comm.size, comm.size - 1)
    if begin == end:
        return True
    whole = [program[n.inputs[0]] for n in nodes if OPS[n.op].kind == "reduce"]
    drops = [node for node in nodes if node.op == "dropout"]
    return any(node.type.layouts != scatter.type.layouts for node in whole) or any(
        node.type.shape != scatter.type.shape for node in drops
    )


def _cut(tensor: torch.Tensor, block: Block) -> torch.Tensor:
    ((start, stop),) = block[0]
    return tensor[start:stop]
