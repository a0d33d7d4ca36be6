"""Comms of GPUs without one: what NcclComm and PeerComm move and count, on tensors of the host.

Streams are faked, gloo stands in for NCCL, and shared memory of the host for that of GPUs. So this
shows values and bytes, not the order on a device: that is for test_nccl and test_peer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from tests.step.ranks import run_ranks
from torch import distributed

from penstock.step.comms import nccl
from penstock.step.comms.comm import Comm, parts_of, payload_bytes
from penstock.step.comms.nccl import NcclComm
from penstock.step.comms.peer import PeerComm
from penstock.step.comms.shm_memory import HostArena, Meet, meeting

LENGTHS = (1, 7, 1000, 5001, 6000)
REDUCED = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax, "min": torch.amin}


class HostEvent:
    def query(self) -> bool:
        return True


class HostStream:
    """A stream on which everything is done at once."""

    device = torch.device("cpu")

    def __init__(self, device: object = None) -> None: ...

    def record_event(self) -> HostEvent:
        return HostEvent()

    def wait_event(self, event: HostEvent) -> None: ...

    def wait_stream(self, stream: HostStream) -> None: ...

    def synchronize(self) -> None: ...


_here = threading.local()


@contextmanager
def on(stream: HostStream) -> Iterator[None]:
    before = current()
    _here.stream = stream
    try:
        yield
    finally:
        _here.stream = before


def current(device: object = None) -> HostStream:
    return getattr(_here, "stream", None) or HostStream()


class HostPeerArena(HostArena):
    device = torch.device("cpu")

    @property
    def meet(self) -> Meet:
        return self._meet


def exchanged(comm: NcclComm, outs: list[torch.Tensor], runs: list[torch.Tensor]) -> None:
    """Do what NCCL's all_to_all does, which gloo has not."""
    outs[comm.rank].copy_(runs[comm.rank])
    others = [peer for peer in range(comm.size) if peer != comm.rank]
    works = [distributed.irecv(outs[peer], peer) for peer in others if outs[peer].numel()]
    works += [
        distributed.isend(runs[peer].contiguous(), peer) for peer in others if runs[peer].numel()
    ]
    for work in works:
        work.wait()


@contextmanager
def comm_of(kind: str, rank: int, size: int) -> Iterator[Comm]:
    with ExitStack() as stack:
        for name, fake in (
            ("torch.cuda.Stream", HostStream),
            ("torch.cuda.current_stream", current),
            ("torch.cuda.stream", on),
            ("torch.Tensor.record_stream", lambda *_: None),
        ):
            stack.enter_context(mock.patch(name, fake))
        if kind == "nccl":
            stack.enter_context(mock.patch.object(NcclComm, "device_type", "cpu"))
            stack.enter_context(mock.patch.object(NcclComm, "_exchange", exchanged))
            sums = {op: getattr(distributed.ReduceOp, op.upper()) for op in ("sum", "max", "min")}
            stack.enter_context(mock.patch.object(nccl, "_op", sums.__getitem__))
            yield NcclComm(distributed.group.WORLD, axis="dp")
            return
        stack.enter_context(mock.patch.object(PeerComm, "device_type", "cpu"))
        made: dict[str, Any] = {"rank": rank, "size": size, "size_bytes": "4MB"}
        arena: Any = stack.enter_context(HostPeerArena(meeting(), **made))
        with PeerComm(arena, stage_bytes=4096, waits=True) as comm:
            yield comm


def values(rank: int, length: int) -> torch.Tensor:
    """Small whole numbers: sums are the same in any order and type."""
    return ((torch.arange(length) * (rank + 3)) % 11 - 5).float()


def reduced(op: str, size: int, length: int) -> torch.Tensor:
    every = torch.stack([values(rank, length) for rank in range(size)])
    return REDUCED[op](every, dim=0)


def all_verbs(rank: int, size: int, kind: str) -> None:
    with comm_of(kind, rank, size) as comm:
        for length in LENGTHS:
            check_sums(comm, length, [op for op in REDUCED if kind == "peer" or op != "mean"])
            check_parts(comm, length)
            check_passes(comm, length)
        counts = [rank + peer for peer in range(size)]
        out, before = torch.empty(sum(counts)), comm.sent_bytes
        given = [values(10 * peer + rank, rank + peer) for peer in range(size)]
        comm.all_to_all(out, torch.cat(given), out_counts=counts, counts=counts).wait()
        wanted = [values(10 * rank + peer, rank + peer) for peer in range(size)]
        assert torch.equal(out, torch.cat(wanted))
        assert comm.sent_bytes - before == 4 * (sum(counts) - counts[rank])
        handle, said = comm.all_reduce(torch.ones(3)), []
        handle.then(lambda: said.append("then"))
        handle.wait()
        comm.barrier()
        assert said == ["then"]


def check_sums(comm: Comm, length: int, ops: list[str]) -> None:
    rank, size = comm.rank, comm.size
    for op in ops:
        comm.all_reduce(tensor := values(rank, length), op=op).wait()
        assert torch.allclose(tensor, reduced(op, size, length))
    comm.all_reduce(tensor := values(rank, length), wire="bf16").wait()
    assert torch.equal(tensor, reduced("sum", size, length))
    comm.reduce(tensor := values(rank, length), root=size - 1).wait()
    assert rank != size - 1 or torch.equal(tensor, reduced("sum", size, length))


def check_parts(comm: Comm, length: int) -> None:
    rank, size = comm.rank, comm.size
    total, before = reduced("sum", size, length), comm.sent_bytes
    mine = torch.empty_like(parts_of(total, size)[rank])
    comm.reduce_scatter(mine, values(rank, length)).wait()
    assert torch.equal(mine, parts_of(total, size)[rank])
    wanted = payload_bytes("reduce_scatter", length, 4, size=size, rank=rank)
    assert comm.sent_bytes - before == wanted
    comm.all_gather(whole := torch.zeros(length), mine).wait()
    assert torch.equal(whole, total)


def check_passes(comm: Comm, length: int) -> None:
    rank, size = comm.rank, comm.size
    comm.broadcast(tensor := values(rank, length), root=size - 1).wait()
    assert torch.equal(tensor, values(size - 1, length))
    for by, wrap in ((1, False), (-1, False), (size - 1, False), (1, True), (size, True)):
        untouched = torch.full((length,), -7.0)
        out = untouched.clone()
        comm.shift(out, values(rank, length), by=by, wrap=wrap).wait()
        source = (rank - by) % size if wrap else rank - by
        assert torch.equal(out, values(source, length) if 0 <= source < size else untouched)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", ["nccl", "peer"])
def test_values_and_bytes_are_right_without_a_device(kind: str, size: int) -> None:
    run_ranks(all_verbs, size, kind)
