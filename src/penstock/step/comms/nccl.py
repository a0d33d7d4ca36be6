"""Collectives of NCCL on a stream of the lane's own, in order by events instead of waits.

Nothing here blocks the host. An operation begins on the lane's stream once the caller's stream has
reached the point where it was asked for; `Handle.wait` makes the caller's stream wait for its end;
`Handle.then` calls at once, with the lane's stream as the current one, so that kernels it launches
follow the operation. Gloo's Comm has a thread for that, a GPU has streams.

NCCL's own collectives send what `comm.payload_bytes` says. Where they need even parts, or would
add what was rounded for the wire, parts go to their owners by grouped sends and are added there.

Its tests need a GPU and use one rank on it. It has not been tried on several GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

from penstock.errors import OptionError
from penstock.step.comms.comm import Collective, Comm, Handle, parts_of
from penstock.step.comms.native import all_gather_flat, reduce_scatter_flat
from penstock.step.program.layouts import part
from penstock.step.streams import current_stream

__all__ = ["NcclComm"]

_HALVES = (torch.bfloat16, torch.float16)


class StreamHandle:
    """An operation on a lane's stream, identified by the event at its end."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._event = stream.record_event()

    def wait(self) -> None:
        """Make the current stream wait; the host goes on."""
        current_stream(self._stream.device).wait_event(self._event)

    def is_done(self) -> bool:
        """Whether the GPU has reached its end."""
        return bool(self._event.query())

    def then(self, work: Callable[[], None]) -> None:
        """Call now; what it launches comes after the operation, on the lane's stream."""
        with torch.cuda.stream(self._stream):
            work()


class NcclComm(Comm):
    """One axis, one lane. Without a group the axis has one rank, and everything is a copy."""

    device_type = "cuda"

    def __init__(self, group: distributed.ProcessGroup | None, *, axis: str) -> None:
        rank, size = (0, 1) if group is None else (group.rank(), group.size())
        super().__init__(axis, rank=rank, size=size)
        self.keeps_memory = True
        """Whether tensors keep their memory until the lane is done with them. A caller that orders
        this itself, by events, turns it off."""
        self._group = group
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def begin(self, collective: Collective) -> Handle:
        """Put a collective on the lane's stream, after what the caller's stream has so far."""
        if collective.algo not in (None, "native"):
            raise OptionError(
                f"{collective.kind}: NCCL chooses its own way; leave out algo={collective.algo!r}"
            )
        self._stream.wait_stream(current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            self._carry_out(collective)
        if self.keeps_memory:
            for tensor in (collective.tensor, collective.out):
                if tensor is not None:
                    tensor.record_stream(self._stream)  # in use there until the operation ends
        self._sent_bytes += collective.sent_bytes(self.rank, self.size)
        return StreamHandle(self._stream)

    def barrier(self) -> None:
        """Return when all ranks have come here and the lane's stream is empty."""
        self._stream.synchronize()
        if self._group is not None:
            distributed.barrier(group=self._group)

    def close(self) -> None:
        """Wait for what is under way."""
        self._stream.synchronize()

    # -- one branch for each kind, on the lane's stream --------------------------------------

    def _carry_out(self, collective: Collective) -> None:
        kind, op, sent = collective.kind, collective.op, collective.sent
        tensor, out = collective.tensor, collective.out
        if kind == "reduce_scatter":
            assert out is not None
            self._scatter(out, collective.whole, op, sent)
        elif kind == "all_gather":
            assert tensor is not None
            self._gather(collective.whole, tensor, sent)
        elif kind == "all_to_all":
            self._exchange(list(collective.receipts().values()), list(collective.sends().values()))
        elif kind == "shift":
            self._shift(collective)
        else:
            assert kind in ("all_reduce", "reduce", "broadcast"), kind
            if self.size > 1:
                self._reduce(collective)

    def _reduce(self, collective: Collective) -> None:
        """Carry out all_reduce, reduce or broadcast, which leave a single rank's tensor alone."""
        row, op, sent = collective.whole, collective.op, collective.sent
        options: dict[str, Any] = {"group": self._group, "async_op": True}
        if collective.kind == "broadcast":
            _wait(distributed.broadcast(row, self._global(collective.root), **options))
        elif collective.kind == "reduce":
            root = self._global(collective.root)
            _wait(distributed.reduce(row, root, op=_op(op), **options))
        elif sent == row.dtype:
            _wait(distributed.all_reduce(row, op=_op(op), **options))
        else:
            mine = parts_of(row, self.size)[self.rank]
            self._scatter(mine, row, op, sent)
            self._gather(row, mine, sent)

    def _shift(self, collective: Collective) -> None:
        sends, receipts = collective.sends(), collective.receipts()
        if self.rank in receipts:
            receipts[self.rank].copy_(sends[self.rank])
            return
        calls: list[tuple[Any, torch.Tensor, int]]
        calls = [(distributed.isend, row, peer) for peer, row in sends.items()]
        calls += [(distributed.irecv, row, peer) for peer, row in receipts.items()]
        if calls:
            ops = [
                distributed.P2POp(call, row, self._global(peer), self._group)
                for call, row, peer in calls
            ]
            _wait(*distributed.batch_isend_irecv(ops))

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

    def _global(self, rank: int) -> int:
        """Return the number that torch's default group gives a rank of the axis."""
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
