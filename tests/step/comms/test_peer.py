"""Peer pointers: ranks as processes, all on the GPUs of one host, which may be one GPU."""

import pytest
import torch
from tests.step.comms.peer_work import fused, no_gpu, operations, programs
from tests.step.ranks import run_ranks

import penstock.step as ps
from penstock.errors import ProgramError

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="needs a GPU: NOTHING of step/comms/peer.py and of steps on CUDA is tested here",
)
WITH_KERNELS = ["adam, fused", "adam, overlapped", "lamb, sharded", "mlp, sharded"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("size", [1, 2])
def test_without_a_gpu_all_ranks_are_told_so(size: int) -> None:
    for said in run_ranks(no_gpu, size):
        assert "there is no GPU here" in said
        assert "shm" in said


@needs_gpu
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_everything_a_comm_can_do_is_right(size: int, waits: bool) -> None:
    assert run_ranks(operations, size, waits) == [[]] * size


@needs_gpu
@pytest.mark.parametrize("size", [2, 4])
def test_every_schedule_gives_the_values_of_the_interpreter(size: int) -> None:
    assert run_ranks(programs, size, "peer", "eager", []) == [[]] * size
    assert run_ranks(programs, size, "peer", "auto", WITH_KERNELS) == [[]] * size


@needs_gpu
@pytest.mark.parametrize("over", ["", "nccl", "peer"])
def test_one_rank_needs_no_group_and_has_the_same_values(over: str) -> None:
    assert programs(0, 1, over, "eager", []) == []
    assert programs(0, 1, over, "auto", WITH_KERNELS) == []


@needs_gpu
@pytest.mark.parametrize(("size", "n"), [(1, 100), (2, 100_003), (3, 1003), (4, 2)])
def test_a_fused_update_is_one_kernel(size: int, n: int) -> None:
    for found in run_ranks(fused, size, n, "triton"):
        assert set(found) == {"w", "m", "v"}
        assert max(found.values()) < 3e-6


@needs_gpu
def test_a_tensor_of_the_host_is_refused_by_a_step_on_the_gpu() -> None:
    @ps.program
    def twice(x: ps.R["n"]):
        return x + x

    program = twice.on(ps.mesh(dp=1), n=4)
    with ps.Groups(program.mesh) as groups, ps.compile(program, groups, device="cuda") as step:
        with pytest.raises(ProgramError, match="x is on cpu, the step on cuda:0"):
            step(x=torch.ones(4))
        assert step(x=torch.ones(4, device="cuda"))[0].tolist() == [2.0] * 4
