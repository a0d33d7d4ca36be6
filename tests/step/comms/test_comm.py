"""The verbs of a Comm check once for all transports, and make one value of their arguments."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from penstock.errors import OptionError
from penstock.step.comms.comm import Collective, Comm, Done, Handle, HostHandle, OneRankComm


class Noted(Comm):
    """A transport that carries nothing: all it needs is `begin`."""

    takes_parts = True

    def __init__(self, *, rank: int, size: int) -> None:
        super().__init__("dp", rank=rank, size=size)
        self.begun: list[Collective] = []

    def begin(self, collective: Collective) -> Handle:
        self.begun.append(collective)
        return Done()

    def barrier(self) -> None: ...

    def close(self) -> None: ...


def test_a_collective_knows_what_goes_where() -> None:
    comm, row = Noted(rank=1, size=3), torch.arange(6.0)
    comm.all_to_all(torch.zeros(5), row, counts=[1, 2, 3], out_counts=[0, 2, 3])
    comm.shift(torch.zeros(6), row)
    comm.shift(torch.zeros(6), row, by=2)
    comm.shift(torch.zeros(6), row, by=-1, wrap=True)
    exchange, on, past, back = comm.begun
    assert {peer: run.tolist() for peer, run in exchange.sends().items()} == {
        0: [0.0],
        1: [1.0, 2.0],
        2: [3.0, 4.0, 5.0],
    }
    assert [len(run) for run in exchange.receipts().values()] == [0, 2, 3]
    assert (list(on.sends()), list(on.receipts())) == ([2], [0])
    assert (past.sends(), past.receipts()) == ({}, {})
    assert (list(back.sends()), list(back.receipts())) == ([0], [2])
    assert [one.sent_bytes(1, 3) for one in comm.begun] == [16, 24, 0, 24]


def test_parts_may_be_one_tensor_or_a_list() -> None:
    comm, row = Noted(rank=0, size=2), torch.arange(5.0)
    comm.reduce_scatter(row[:3], row, wire="bf16")
    comm.all_gather([row[2:4], row[:1]], torch.zeros(2))
    scatter, gather = comm.begun
    assert [part.tolist() for part in scatter.parts(2)] == [[0.0, 1.0, 2.0], [3.0, 4.0]]
    assert [part.tolist() for part in gather.parts(2)] == [[2.0, 3.0], [0.0]]
    assert (scatter.sent, scatter.length, scatter.size_bytes) == (torch.bfloat16, 5, 20)
    assert (gather.dtype, gather.length, gather.size_bytes) == (torch.float32, 3, 12)
    assert scatter.sent_bytes(0, 2) == 4


@pytest.mark.parametrize("comm", [OneRankComm("dp"), Noted(rank=0, size=1)])
def test_a_mistake_is_refused_on_one_rank_as_on_many(comm: Comm) -> None:
    ten = torch.zeros(10)
    mistakes: dict[str, Callable[[], Handle]] = {
        "not contiguous": lambda: comm.all_reduce(torch.zeros(4, 4).T),
        "no reduction 'avg'": lambda: comm.all_reduce(ten, op="avg"),
        "no wire format 'int4'": lambda: comm.all_gather(ten, ten, wire="int4"),
        "has 10 of 10 elements, but its tensor has 4": lambda: comm.reduce_scatter(ten[:4], ten),
        "root 1 of an axis with 1 ranks": lambda: comm.broadcast(ten, root=1),
        "there is a rank 0, so out is needed": lambda: comm.shift(None, ten, wrap=True),
        "sends itself 10 elements of torch.float32 and has room for 10 of torch.int64": lambda: (
            comm.all_to_all(ten.long(), ten, counts=[10], out_counts=[10])
        ),
    }
    for message, call in mistakes.items():
        with pytest.raises(OptionError, match=message):
            call()


def test_one_rank_copies_and_sends_nothing() -> None:
    comm, row = OneRankComm("dp"), torch.arange(4.0)
    outs = [torch.zeros(4) for _ in range(3)]
    comm.reduce_scatter(outs[0], row, op="mean").wait()
    comm.all_gather(outs[1], row).wait()
    comm.shift(outs[2], row, wrap=True).wait()
    assert all(torch.equal(out, row) for out in outs)
    comm.shift(untouched := torch.zeros(4), row).wait()
    assert not untouched.any()
    assert comm.sent_bytes == 0


def test_what_follows_a_handle_is_called_once_and_not_after_an_error() -> None:
    good, bad, said = HostHandle(), HostHandle(), []
    for handle, name in ((good, "good"), (bad, "bad")):
        handle.then(lambda name=name: said.append(f"{name} before"))
    good.end()
    bad.end(ZeroDivisionError("no"))
    good.then(lambda: said.append("good after"))
    bad.then(lambda: said.append("bad after"))
    good.wait()
    assert good.is_done()
    assert bad.is_done()
    with pytest.raises(ZeroDivisionError, match="no"):
        bad.wait()
    assert said == ["good before", "good after"]
