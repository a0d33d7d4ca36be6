"""Attached models on GPUs train as one process does there, and no host waits for its device."""

import pytest
import torch
from tests.step.attached.gpu_work import PLACES, WORKS, work
from tests.step.ranks import run_ranks


@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="needs a GPU: NOTHING of attach on CUDA is tested here but the order of its streams",
)
@pytest.mark.parametrize("name", WORKS)
@pytest.mark.parametrize(("size", "over"), PLACES)
def test_an_attached_model_on_a_gpu_trains_as_a_plain_one(size: int, over: str, name: str) -> None:
    assert run_ranks(work, size, over, name) == [[]] * size


@pytest.mark.parametrize("name", ["ways", "sliced ways"])
def test_the_checks_for_gpus_hold_on_the_host(name: str) -> None:
    assert run_ranks(work, 2, "gloo", name) == [[]] * 2
