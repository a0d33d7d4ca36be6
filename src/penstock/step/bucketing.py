"""Buckets: several collectives carried out as one, their values side by side in one tensor.

In a reduce-scatter each rank's parts of all values lie together, so that it ends with one run; a
gather is the same the other way round. Short parts are padded, since a Comm cuts evenly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from penstock.step.comms.comm import Comm, Handle
from penstock.step.computing import blocks_of
from penstock.step.memory import RankMemory
from penstock.step.moving import Move, joined, packed, padded, part_lengths, unpadded
from penstock.step.program.nodes import Node
from penstock.step.program.plan import Task

__all__ = ["bucket_of"]


def bucket_of(task: Task, memory: RankMemory, comm: Comm) -> Move:
    """Return how the collectives of a bucket are carried out as one."""
    bucket = _Bucket([memory.program[name] for name in task.nodes], task, memory, comm)
    ops = {"reduce_scatter": bucket.scatter, "all_gather": bucket.gather}
    return Move(issue=ops.get(bucket.op, bucket.whole), finish=bucket.finish)


class _Bucket:
    """Values that move together."""

    def __init__(self, nodes: list[Node], task: Task, memory: RankMemory, comm: Comm) -> None:
        self._nodes, self._task, self._memory, self._comm = nodes, task, memory, comm
        self.op = nodes[0].op
        self._how = {"wire": nodes[0].attr("wire"), "algo": nodes[0].attr("algo")}
        self._made: list[Callable[[], torch.Tensor]] = []
        """How each value is made of what has arrived."""

    def finish(self) -> None:
        """Take apart what has arrived."""
        made, self._made = self._made, []
        for node, one in zip(self._nodes, made, strict=True):
            self._memory.put(node.name, blocks_of(self._task, self._memory, node.name), one())

    def whole(self) -> Handle:
        """Begin collectives whose results are as large as what goes in."""
        pieces = [self._piece(node) for node in self._nodes]
        flat = torch.cat([piece.reshape(-1) for piece in pieces])
        parts = torch.split(flat, [piece.numel() for piece in pieces])
        self._made = [
            partial(one.view, piece.shape) for one, piece in zip(parts, pieces, strict=True)
        ]
        first = self._nodes[0]
        if self.op == "all_reduce":
            return self._comm.all_reduce(flat, op=str(first.attr("op")), **self._how)
        root = int(first.attr("root"))
        if self.op == "broadcast":
            return self._comm.broadcast(flat, root=root)
        if self._comm.rank != root:
            self._made = [partial(torch.zeros_like, piece) for piece in pieces]
        return self._comm.reduce(flat, root=root, op=str(first.attr("op")))

    def scatter(self) -> Handle:
        """Begin reduce-scatters: one row for each rank, with its parts of all values."""
        rows, cuts = [], []
        for node in self._nodes:
            dim = int(node.attr("dim"))
            lengths = part_lengths(self._task, self._memory, node.name, dim, node.axes)
            flat = packed(self._piece(node), dim, lengths)
            rows.append(flat.reshape(self._comm.size, -1))
            longest, length = max(lengths), lengths[self._comm.rank]
            rest = flat.shape[1:]
            cuts.append(partial(unpadded, dim=dim, longest=longest, length=length, rest=rest))
        sent = torch.cat(rows, dim=1)
        out = torch.empty(sent.shape[1], dtype=sent.dtype, device=sent.device)
        parts = torch.split(out, [row.shape[1] for row in rows])
        self._made = [partial(cut, one) for one, cut in zip(parts, cuts, strict=True)]
        op = str(self._nodes[0].attr("op"))
        return self._comm.reduce_scatter(out, sent.view(-1), op=op, **self._how)

    def gather(self) -> Handle:
        """Begin gathers: one run from each rank, with its parts of all values."""
        runs, cuts = [], []
        for node in self._nodes:
            dim = self._memory.program[node.inputs[0]].type.layout(node.axes[0]).dim
            lengths = part_lengths(self._task, self._memory, node.inputs[0], dim, node.axes)
            mine = self._piece(node)
            flat = padded(mine.movedim(dim, 0), max(lengths)).contiguous()
            runs.append(flat.reshape(-1))
            cuts.append(partial(joined, dim=dim, lengths=lengths, rest=flat.shape[1:]))
        sent = torch.cat(runs)
        out = torch.empty(sent.numel() * self._comm.size, dtype=sent.dtype, device=sent.device)
        columns = torch.split(out.view(self._comm.size, -1), [r.numel() for r in runs], dim=1)
        self._made = [partial(cut, one) for one, cut in zip(columns, cuts, strict=True)]
        return self._comm.all_gather(out, sent, **self._how)

    def _piece(self, node: Node) -> torch.Tensor:
        source = blocks_of(self._task, self._memory, node.inputs[0])
        return self._memory.piece(node.inputs[0], source)
