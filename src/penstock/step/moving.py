"""Communication tasks: values packed as a `Comm` wants them, sent, and unpacked.

Some Comms take a list of parts: slices along the first dimension are passed as they are, whole or
in chunks, and others are copied part by part. The rest take a flat tensor of W even parts. Slices
of equal length along the first dimension are that already; others are packed, short ones padded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from penstock.step.comms.comm import Comm, Handle
from penstock.step.computing import blocks_of
from penstock.step.lanes import Begun
from penstock.step.memory import Block, RankMemory, both, shape_of
from penstock.step.program.nodes import Node
from penstock.step.program.plan import Task

__all__ = ["Move", "joined", "move_of", "packed", "padded", "part_lengths", "unpadded"]

_NATIVE = (torch.float32, torch.float64, torch.int64, torch.int32)
"""Element types that the library itself adds up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One communication: how it is begun, and what is left to do when it is over."""

    issue: Callable[[], Handle]
    finish: Callable[[], None]

    def begin(self) -> Begun:
        """Begin it."""
        return Begun(handle=self.issue(), finish=self.finish)


def move_of(node: Node, task: Task, memory: RankMemory, comm: Comm) -> Move:
    """Return what a node that communicates does for one task."""
    move = _BlockMove(node, task, memory, comm)
    # Each operation that communicates is a method of its own name.
    return Move(issue=getattr(move, node.op), finish=move.finish)


class _BlockMove:
    """A node, one block of it, and the tensors that are on their way."""

    def __init__(self, node: Node, task: Task, memory: RankMemory, comm: Comm) -> None:
        self._node, self._task = node, task
        self._memory, self._comm = memory, comm
        self._source = blocks_of(task, memory, node.inputs[0])
        self._target = blocks_of(task, memory, node.name)
        self._how = {"wire": node.attr("wire"), "algo": node.attr("algo")}
        self._parts: list[int] = []
        """The length of each rank's part, cached at first use."""
        self._made: torch.Tensor | None = None
        """What arrives, if it does not arrive where it belongs."""
        self._unpack: Callable[[torch.Tensor], torch.Tensor] = lambda made: made
        self._put: Callable[[], None] = lambda: None

    def finish(self) -> None:
        """Put what has arrived where it belongs."""
        self._put()
        made, self._made = self._made, None
        if made is not None:
            self._memory.put(self._node.name, self._target, self._unpack(made))

    # -- the same shape before and after -------------------------------------------------------

    def all_reduce(self) -> Handle:
        """Begin an all-reduce, in the place of its result."""
        held = self._in_place()
        # The library's own is the fastest. It ends the process where ranks differ in what they ask
        # for, but here all ranks have compared their plans.
        is_plain = not any(self._how.values()) and held.dtype in _NATIVE
        how = {"algo": "native"} if is_plain else self._how
        return self._comm.all_reduce(held, op=str(self._node.attr("op")), **how)

    def reduce(self) -> Handle:
        """Begin a reduce; all ranks but the root end with zeros."""
        held = self._in_place()
        root = int(self._node.attr("root"))
        if self._comm.rank != root:
            # A Comm may overwrite what a rank gives: give it a copy.
            self._made, held = torch.zeros_like(held), held.clone()
        return self._comm.reduce(held, root=root, op=str(self._node.attr("op")))

    def broadcast(self) -> Handle:
        """Begin a broadcast, in the place of its result."""
        return self._comm.broadcast(self._in_place(), root=int(self._node.attr("root")))

    def send(self) -> Handle:
        """Begin a shift along the axis; a rank to which nobody sends ends with zeros."""
        tensor = self._memory.piece(self._node.inputs[0], self._source).contiguous()
        self._made = torch.zeros_like(tensor)
        return self._comm.shift(self._made, tensor, by=int(self._node.attr("by")))

    def _in_place(self) -> torch.Tensor:
        """Return the place of the result, into which what is sent has been copied."""
        sent = self._memory.piece(self._node.inputs[0], self._source)
        held = self._memory.piece(self._node.name, self._target)
        if not (self._memory.is_view(self._target) and held.is_contiguous()):
            self._made = held = sent.clone(memory_format=torch.contiguous_format)
        elif held.data_ptr() != sent.data_ptr():
            held.copy_(sent)
        return held

    # -- between parts and the whole -----------------------------------------------------------

    def reduce_scatter(self) -> Handle:
        """Begin a reduce-scatter."""
        dim = int(self._node.attr("dim"))
        lengths = self._lengths(self._node.name, dim)
        if self._comm.takes_parts:
            parts = self._memory.parts(self._node.inputs[0], self._source, dim, lengths)
            if parts is not None:
                return self._scatter_parts(parts)
        tensor = self._memory.piece(self._node.inputs[0], self._source)
        flat = packed(tensor, dim, lengths)
        size = flat.numel() // self._comm.size
        out = self._place(dim, size)
        if out is None:
            out = torch.empty(size, dtype=flat.dtype, device=flat.device)
            self._made = out
            mine, rest = shape_of(self._target)[dim], self._rest(dim)
            self._unpack = partial(unpadded, dim=dim, longest=max(lengths), length=mine, rest=rest)
        return self._comm.reduce_scatter(
            out.view(-1), flat.view(-1), op=str(self._node.attr("op")), **self._how
        )

    def all_gather(self) -> Handle:
        """Begin an all-gather."""
        dim = self._dim_of_input()
        tensor = self._memory.piece(self._node.inputs[0], self._source)
        lengths = self._lengths(self._node.inputs[0], dim)
        if self._comm.takes_parts:
            places = self._memory.parts(self._node.name, self._target, dim, lengths)
            if places is not None:
                return self._gather_parts(places, tensor)
        mine = padded(tensor.movedim(dim, 0), max(lengths)).contiguous().view(-1)
        out = self._place(dim, mine.numel() * self._comm.size) if len(set(lengths)) == 1 else None
        if out is None:
            out = torch.empty(mine.numel() * self._comm.size, dtype=mine.dtype, device=mine.device)
            self._made = out
            self._unpack = partial(joined, dim=dim, lengths=lengths, rest=self._rest(dim))
        return self._comm.all_gather(out.view(-1), mine, **self._how)

    def _scatter_parts(self, parts: list[torch.Tensor]) -> Handle:
        out = self._memory.piece(self._node.name, self._target)
        if not (self._memory.is_view(self._target) and out.is_contiguous()):
            self._made = out = torch.empty_like(out, memory_format=torch.contiguous_format)
        rows = [each.contiguous().view(-1) for each in parts]
        op = str(self._node.attr("op"))
        return self._comm.reduce_scatter(out.view(-1), rows, op=op, **self._how)

    def _gather_parts(self, places: list[torch.Tensor], tensor: torch.Tensor) -> Handle:
        rows = [
            each if each.is_contiguous() else each.new_empty(tuple(each.shape)) for each in places
        ]
        apart = [(to, row) for to, row in zip(places, rows, strict=True) if row is not to]

        def put() -> None:
            for to, row in apart:
                to.copy_(row)

        self._put = put
        return self._comm.all_gather(
            [row.view(-1) for row in rows], tensor.contiguous().view(-1), **self._how
        )

    def all_to_all(self) -> Handle:
        """Begin an exchange of slices along one dimension for slices along another."""
        name, source = self._node.name, self._node.inputs[0]
        group = self._memory.program.mesh.group(self._memory.rank, *self._node.axes)
        sent, counts = [], []
        coming: list[Block] = []
        for peer in group:
            theirs = blocks_of(self._task, self._memory, name, rank=peer)
            piece = self._memory.piece(source, both(self._source, theirs)).reshape(-1)
            sent.append(piece)
            coming.append(
                both(blocks_of(self._task, self._memory, source, rank=peer), self._target)
            )
            counts.append(math.prod(shape_of(coming[-1])))
        flat = torch.cat(sent)
        made = torch.empty(sum(counts), dtype=flat.dtype, device=flat.device)
        parts = list(zip(coming, torch.split(made, counts), strict=True))

        def put() -> None:
            for block, arrived in parts:
                self._memory.put(name, block, arrived.view(shape_of(block)))

        self._put = put
        return self._comm.all_to_all(
            made, flat, out_counts=counts, counts=[piece.numel() for piece in sent]
        )

    def _lengths(self, name: str, dim: int) -> list[int]:
        if not self._parts:
            self._parts = part_lengths(self._task, self._memory, name, dim, self._node.axes)
        return self._parts

    def _dim_of_input(self) -> int:
        made = self._memory.program[self._node.inputs[0]].type
        return made.layout(self._node.axes[0]).dim

    def _place(self, dim: int, size: int) -> torch.Tensor | None:
        """Return the place of the result; None if it is not one run of what arrives."""
        if dim != 0 or not self._memory.is_view(self._target):
            return None
        out = self._memory.piece(self._node.name, self._target)
        return out if out.is_contiguous() and out.numel() == size else None

    def _rest(self, dim: int) -> tuple[int, ...]:
        """Return the shape of the result without one dimension."""
        shape = shape_of(self._target)
        return (*shape[:dim], *shape[dim + 1 :])


def part_lengths(
    task: Task, memory: RankMemory, name: str, dim: int, axes: tuple[str, ...]
) -> list[int]:
    """Return the length of each rank's part of a value sliced along these axes, in this chunk."""
    group = memory.program.mesh.group(memory.rank, *axes)
    blocks = (blocks_of(task, memory, name, rank=rank) for rank in group)
    return [sum(stop - start for start, stop in block[dim]) for block in blocks]


def packed(tensor: torch.Tensor, dim: int, lengths: list[int]) -> torch.Tensor:
    """Return parts along a dimension one after the other, all padded to the longest."""
    rows = tensor.movedim(dim, 0)
    if len(set(lengths)) > 1:
        longest = max(lengths)
        rows = torch.cat([padded(rows_of, longest) for rows_of in torch.split(rows, lengths)])
    return rows.contiguous()


def padded(rows: torch.Tensor, length: int) -> torch.Tensor:
    """Return rows, and zeros behind them up to a length."""
    if rows.shape[0] == length:
        return rows
    out = rows.new_zeros((length, *rows.shape[1:]))
    out[: rows.shape[0]] = rows
    return out


def unpadded(
    part: torch.Tensor, *, dim: int, longest: int, length: int, rest: tuple[int, ...]
) -> torch.Tensor:
    """Return one rank's part of what was `packed` in its shape; `rest` are other dimensions."""
    return part.view(longest, *rest)[:length].movedim(0, dim)


def joined(
    parts: torch.Tensor, *, dim: int, lengths: list[int], rest: tuple[int, ...]
) -> torch.Tensor:
    """Return the parts of all ranks, each `padded` to the longest, as one value."""
    rows = parts.reshape(len(lengths), max(lengths), *rest)
    if len(set(lengths)) == 1:
        return rows.flatten(0, 1).movedim(0, dim)
    return torch.cat([row[:n] for row, n in zip(rows, lengths, strict=True)]).movedim(0, dim)
