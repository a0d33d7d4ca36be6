"""Collectives of NCCL on a stream of the lane's own, in order by events instead of waits.

Nothing here blocks the host. An operation begins on the lane's stream once the caller's stream has
come to where it was asked; `Handle.wait` makes the caller's stream wait for its end; `Handle.then`
calls at once, with the lane's stream as the current one, so that kernels it launches follow the
operation. Gloo's Comm has a thread for that, a GPU has streams.

NCCL's own collectives send what `comm.payload_bytes` says. Where they ask for even parts, or would
add what was rounded for the wire, parts go to their owners by grouped sends and are added there.

Its tests need a GPU and go through one rank on it. Several ranks need several GPUs, and there have
been none to try that on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed

from penstock.errors import OptionError
from penstock.step.comms.checks import check_op, check_parts, check_runs, flat, wire_dtype
from penstock.step.comms.comm import Handle, parts_of, payload_bytes
from penstock.step.comms.native import all_gather_flat, reduce_scatter_flat
from penstock.step.program.layouts import part
from penstock.step.streams import current_stream

__all__ = ["NcclComm"]

_HALVES = (torch.bfloat16, torch.float16)


class StreamHandle:
    """An operation on a lane's stream, known by the event at its end."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._event = stream.record_event()

    def wait(self) -> None:
        """Make the current stream wait; the host goes on."""
        current_stream(self._stream.device).wait_event(self._event)

    def is_done(self) -> bool:
        """Whether the GPU has come to its end."""
        return bool(self._event.query())

    def then(self, work: Callable[[], None]) -> None:
        """Call now; what it launches comes after the operation, on the lane's stream."""
        with torch.cuda.stream(self._stream):
            work()


class NcclComm:
    """One axis, one lane. Without a group the axis has one rank, and everything is a copy."""

    def __init__(
        self, group: distributed.ProcessGroup | None, *, axis: str, lane: str = "net"
    ) -> None:
        self.axis, self.lane = axis, lane
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()
        self.sent_bytes = 0
        self.keeps_memory = True
        """Until the lane is done with it; not where the caller sees to it by events."""
        self._group = group
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def all_reduce(
        self,
        tensor: torch.Tensor,
        *,
        op: str = "sum",
        wire: str | None = None,
        algo: str | None = None,
    ) -> Handle:
        """Put the sum of all ranks' tensors in the place of each."""
        row = self._checked("all_reduce", tensor, algo)
        check_op("all_reduce", op, row)
        sent = wire_dtype("all_reduce", wire, row)

        def call() -> None:
            if sent == row.dtype:
                by = {"op": _op(op), "group": self._group, "async_op": True}
                _wait(distributed.all_reduce(row, **by))
            else:
                mine = parts_of(row, self.size)[self.rank]
                self._scatter(mine, row, op, sent)
                self._gather(row, mine, sent)

        return self._issue("all_reduce", call, [row], row.numel() * sent.itemsize)

    @property
    def in_parts(self) -> None:
        """The library takes parts in a row."""

    def reduce_scatter(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        *,
        op: str = "sum",
        wire: str | None = None,
        algo: str | None = None,
    ) -> Handle:
        """Put this rank's part of the sum in `out`."""
        mine = self._checked("reduce_scatter", out, algo)
        row = self._checked("reduce_scatter", tensor, algo)
        check_op("reduce_scatter", op, row)
        check_parts("reduce_scatter", mine, row, rank=self.rank, size=self.size)
        sent = wire_dtype("reduce_scatter", wire, row)

        def call() -> None:
            self._scatter(mine, row, op, sent)

        return self._issue("reduce_scatter", call, [mine, row], row.numel() * sent.itemsize)

    def all_gather(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        *,
        wire: str | None = None,
        algo: str | None = None,
    ) -> Handle:
        """Put all ranks' parts in `out`."""
        row = self._checked("all_gather", out, algo)
        mine = self._checked("all_gather", tensor, algo)
        check_parts("all_gather", mine, row, rank=self.rank, size=self.size)
        sent = wire_dtype("all_gather", wire, row)

        def call() -> None:
            self._gather(row, mine, sent)

        return self._issue("all_gather", call, [row, mine], row.numel() * sent.itemsize)

    def all_to_all(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        *,
        out_counts: Sequence[int],
        counts: Sequence[int],
    ) -> Handle:
        """Send each rank its run of elements; put what came from each in a row."""
        into, row = flat("all_to_all", out, "cuda"), flat("all_to_all", tensor, "cuda")
        outs = check_runs("all_to_all", into, out_counts, size=self.size)
        runs = check_runs("all_to_all", row, counts, size=self.size)
        handle = self._issue("", lambda: self._exchange(outs, runs), [into, row], 0)
        self.sent_bytes += (row.numel() - len(runs[self.rank])) * row.itemsize
        return handle

    def reduce(self, tensor: torch.Tensor, *, root: int, op: str = "sum") -> Handle:
        """Put the sum of all in the root's tensor."""
        row = flat("reduce", tensor, "cuda")
        check_op("reduce", op, row)
        to = self._global("reduce", root)

        def call() -> None:
            by = {"op": _op(op), "group": self._group, "async_op": True}
            _wait(distributed.reduce(row, to, **by))

        return self._issue("reduce", call, [row], row.numel() * row.itemsize, root)

    def broadcast(self, tensor: torch.Tensor, *, root: int) -> Handle:
        """Put the root's tensor in all."""
        row = flat("broadcast", tensor, "cuda")
        source = self._global("broadcast", root)

        def call() -> None:
            _wait(distributed.broadcast(row, source, group=self._group, async_op=True))

        return self._issue("broadcast", call, [row], row.numel() * row.itemsize, root)

    def shift(
        self,
        out: torch.Tensor | None,
        tensor: torch.Tensor | None,
        *,
        by: int = 1,
        wrap: bool = False,
    ) -> Handle:
        """Send to the rank `by` further, receive from the one `by` before; ends are left alone."""
        to, source = self.rank + by, self.rank - by
        ends: list[tuple[Any, torch.Tensor, int]] = []
        for name, peer, what, call in (
            ("tensor", to, tensor, distributed.isend),
            ("out", source, out, distributed.irecv),
        ):
            if wrap or 0 <= peer < self.size:
                if what is None:
                    raise OptionError(f"shift: rank {peer % self.size} is there: {name} is needed")
                ends.append((call, flat("shift", what, "cuda"), peer % self.size))

        def go() -> None:
            if ends and ends[0][2] == self.rank:
                ends[1][1].copy_(ends[0][1])
            elif ends:
                ops = [
                    distributed.P2POp(call, row, self._global("shift", peer), self._group)
                    for call, row, peer in ends
                ]
                _wait(*distributed.batch_isend_irecv(ops))

        handle = self._issue("", go, [row for _, row, _ in ends], 0)
        sent = [row for call, row, peer in ends if call is distributed.isend and peer != self.rank]
        self.sent_bytes += sum(row.numel() * row.itemsize for row in sent)
        return handle

    def barrier(self) -> None:
        """Return when all ranks have come here and the lane's stream is empty."""
        self._stream.synchronize()
        if self._group is not None:
            distributed.barrier(group=self._group)

    def close(self) -> None:
        """Wait for what is under way."""
        self._stream.synchronize()

    # -- what they have in common ------------------------------------------------------------

    def _checked(self, name: str, tensor: torch.Tensor, algo: str | None) -> torch.Tensor:
        if algo not in (None, "native"):
            raise OptionError(f"{name}: NCCL chooses its own way; leave out algo={algo!r}")
        return flat(name, tensor, "cuda")

    def _issue(
        self,
        kind: str,
        call: Callable[[], None],
        tensors: Sequence[torch.Tensor],
        size_bytes: int,
        root: int = 0,
    ) -> Handle:
        """Put an operation on the lane's stream, after what the caller's stream has so far."""
        self._stream.wait_stream(current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            if self.size > 1 or kind in ("", "reduce_scatter", "all_gather"):
                call()
        for tensor in tensors if self.keeps_memory else ():
            tensor.record_stream(self._stream)  # its memory is in use there until the end
        if kind:
            far = (self.rank - root) % self.size
            self.sent_bytes += payload_bytes(kind, size_bytes, 1, size=self.size, rank=far)
        return StreamHandle(self._stream)

    def _scatter(self, mine: torch.Tensor, row: torch.Tensor, op: str, sent: torch.dtype) -> None:
        if self.size == 1:
            _copy(mine, row)
        elif sent == row.dtype and row.numel() % self.size == 0:
            work = reduce_scatter_flat(mine, row, op=_op(op), group=self._group, async_op=True)
            _wait(work)
        else:
            runs = parts_of(row.to(sent), self.size)
            arrived = torch.empty(self.size, len(mine), dtype=sent, device=row.device)
            self._exchange(list(arrived), runs)
            wide = torch.float32 if row.dtype in _HALVES else row.dtype
            total = arrived.to(wide)
            total[self.rank] = parts_of(row, self.size)[self.rank]  # its own is not rounded
            mine.copy_(_reduced(total, op))

    def _gather(self, row: torch.Tensor, mine: torch.Tensor, sent: torch.dtype) -> None:
        packed = mine.to(sent)
        out = row if sent == row.dtype else torch.empty_like(row, dtype=sent)
        if self.size == 1:
            _copy(out, packed)
        elif row.numel() % self.size == 0:
            _wait(all_gather_flat(out, packed, group=self._group, async_op=True))
        else:
            bounds = (part(row.numel(), self.size, rank) for rank in range(self.size))
            self._exchange([out[a:b] for a, b in bounds], [packed] * self.size)
        if out is not row:
            row.copy_(out)

    def _exchange(self, outs: list[torch.Tensor], runs: list[torch.Tensor]) -> None:
        if self.size == 1:
            _copy(outs[0], runs[0])
        else:
            _wait(distributed.all_to_all(outs, runs, group=self._group, async_op=True))

    def _global(self, name: str, rank: int) -> int:
        if not 0 <= rank < self.size:
            raise OptionError(f"{name}: rank {rank} of an axis with {self.size} ranks")
        return 0 if self._group is None else distributed.get_global_rank(self._group, rank)


def _wait(*works: distributed.Work | None) -> None:
    """Make the lane's stream wait for NCCL's own."""
    for work in works:
        if work is not None:
            work.wait()


def _op(op: str) -> Any:
    kinds = distributed.ReduceOp
    return {"sum": kinds.SUM, "mean": kinds.AVG, "max": kinds.MAX, "min": kinds.MIN}[op]


def _reduced(all_: torch.Tensor, op: str) -> torch.Tensor:
    if op in ("sum", "mean"):
        return all_.sum(0) if op == "sum" else all_.mean(0)
    return all_.amax(0) if op == "max" else all_.amin(0)


def _copy(out: torch.Tensor, data: torch.Tensor) -> None:
    if out.data_ptr() != data.data_ptr():
        out.copy_(data)
