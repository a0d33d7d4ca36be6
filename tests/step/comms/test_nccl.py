"""Collectives on a lane's stream, as far as one GPU can show: order by events, and one rank."""

import pytest
import torch

from penstock.errors import OptionError
from penstock.step.groups import Groups
from penstock.step.program.mesh import mesh

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_one_rank_copies_on_its_stream() -> None:
    with Groups(mesh(dp=1), backend="nccl") as groups:
        comm = groups.comm("dp", "net")
        value = torch.arange(1000.0, device="cuda")
        outs = [torch.zeros_like(value) for _ in range(4)]
        counts = {"out_counts": [1000], "counts": [1000]}
        comm.reduce_scatter(outs[0], value, op="mean").wait()
        comm.all_gather(outs[1], value).wait()
        comm.shift(outs[2], value, wrap=True).wait()
        comm.all_to_all(outs[3], value, **counts).wait()
        assert all(torch.equal(out, value) for out in outs)
        comm.all_reduce(value, op="max").wait()
        comm.reduce(value, root=0).wait()
        comm.broadcast(value, root=0).wait()
        assert value.tolist() == list(range(1000))
        comm.barrier()
        assert comm.sent_bytes == 0


def test_what_is_gathered_for_the_wire_is_rounded_on_its_owner_too() -> None:
    with Groups(mesh(dp=1), backend="nccl") as groups:
        comm = groups.comm("dp")
        value = torch.randn(1001, device="cuda")
        out = torch.empty_like(value)
        comm.all_gather(out, value, wire="bf16").wait()
        assert torch.equal(out, value.bfloat16().float())


def test_streams_are_in_order_without_the_host_waiting() -> None:
    with Groups(mesh(dp=1), backend="nccl") as groups:
        comm = groups.comm("dp")
        big = torch.randn(4096, 4096, device="cuda")
        value, out = torch.zeros(4096, 4096, device="cuda"), torch.zeros(4096, 4096, device="cuda")
        for _ in range(10):
            torch.mm(big, big, out=value)  # the copy below must wait for it
        handle = comm.all_gather(out, value)
        handle.then(lambda: out.mul_(2))
        comm.barrier()
        handle.wait()
        assert handle.is_done()
        assert torch.equal(out, 2 * value)


def test_tensors_of_the_host_and_ways_of_others_are_refused() -> None:
    with Groups(mesh(dp=1), backend="nccl") as groups:
        comm = groups.comm("dp")
        with pytest.raises(OptionError, match="carries cuda tensors"):
            comm.all_reduce(torch.zeros(3))
        with pytest.raises(OptionError, match="chooses its own way"):
            comm.all_reduce(torch.zeros(3, device="cuda"), algo="ring")
