"""Steps and collectives in the trace of a run."""

from __future__ import annotations

from pathlib import Path

import torch
from tests.step.attached.cases import OPTIMIZERS, attach, batches, mlp, train
from tests.step.ranks import run_ranks

from penstock.trace import Kind, read_trace, recorder_of

NUM_STEPS = 4


def trained(rank: int, size: int, folder: str) -> None:
    recorder_of(folder, role="train", rank=rank)
    torch.manual_seed(0)
    model = mlp()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    attach(model, optimizer)
    train(model, optimizer, batches(NUM_STEPS, rank, size))


def test_an_attached_model_records_its_steps_and_collectives(tmp_path: Path) -> None:
    run_ranks(trained, 2, str(tmp_path / "run"))
    trace = read_trace(tmp_path / "run")
    assert trace.ranks == (0, 1)
    for rank in range(2):
        assert len(trace.of(Kind.STEP, rank=rank)) == NUM_STEPS - 1
        spans = trace.of(Kind.COMMUNICATE, rank=rank)
        assert len(spans) >= 2 * NUM_STEPS  # A scatter and a gather, at least, in each step.
        assert (spans["duration_ns"] > 0).all()
        assert all(trace.names_of(spans["object"]))
