"""Attached models on GPUs train as one process does there, and no host waits for its device."""

import pytest
import torch
from tests.step.attach_gpu_work import everything
from tests.step.ranks import run_ranks


@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="needs a GPU: NOTHING of attach on CUDA is tested here but the order of its streams",
)
@pytest.mark.parametrize(("size", "over"), [(1, "nccl"), (1, "peer"), (2, "peer"), (3, "peer")])
def test_an_attached_model_on_a_gpu_trains_as_a_plain_one(size: int, over: str) -> None:
    assert run_ranks(everything, size, over) == [[]] * size


def test_the_checks_for_gpus_hold_on_the_host() -> None:
    names = ("norms", "accumulated", "odd")
    assert run_ranks(everything, 2, "gloo", names) == [[]] * 2
