"""A GradScaler makes the steps of an attached optimizer that it makes of DDP's, on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.step.attached.cases import OPTIMIZERS, attach, batches, mlp, train, weights
from tests.step.ranks import run_ranks
from torch import nn
from torch.amp import GradScaler

from penstock.errors import OptionError

NUM_STEPS = 6
WAYS = ("step", "unscale", "clip")


def scaled(rank: int, size: int, way: str, options: dict[str, Any] | None) -> list[Any]:
    """Return weights, scales, and which steps were made, attached or, without options, by DDP."""
    model = mlp(torch.float32)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    wrapped, attached = model, None
    if options is None:
        wrapped = nn.parallel.DistributedDataParallel(model)
    else:
        attached = attach(model, optimizer, buckets=512, **options)
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales, made = [], []
    for number, (x, y) in enumerate(batches(NUM_STEPS, rank, size, dtype=torch.float32)):
        optimizer.zero_grad()
        loss = (wrapped(x) - y).square().mean()
        # Two steps are spoilt, on one rank alone, the first one among them.
        scaler.scale(loss * (float("inf") if number in {0, 3} and rank == 1 else 1.0)).backward()
        if way != "step":
            scaler.unscale_(optimizer)
        if way == "clip" and attached is not None:
            attached.clip_grad_norm_(0.1)
        elif way == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    if attached is not None:
        with attached.whole():
            made = [weights(model)]
        attached.close()
    else:
        made = [weights(model)]
    (state, *_) = optimizer.state_dict()["state"].values()
    return [*made, scales, int(state["step"])]


def every_way(rank: int, size: int, ways: tuple[dict[str, Any] | None, ...]) -> list[Any]:
    return [[scaled(rank, size, way, options) for way in WAYS] for options in ways]


def test_a_scaler_does_what_it_does_with_ddp_and_all_ranks_leave_out_the_same_steps() -> None:
    ways = (None, {}, {"over": "memory"}, {"reshard": True})
    for expected, *found in run_ranks(every_way, 2, ways):
        for each in found:
            for way, (values, *said), (theirs, *wanted) in zip(WAYS, each, expected, strict=True):
                assert said == wanted, f"{way}: scales and steps are {said}, DDP's {wanted}"
                assert wanted[1] == NUM_STEPS - 2
                apart = (values - theirs).abs().max().item()
                assert apart <= (1e-6 if way == "clip" else 0), f"{way}: {apart} apart"


def test_a_scaler_is_as_it_was_where_nothing_is_attached() -> None:
    plain = GradScaler._unscale_grads_
    model, other = mlp(torch.float32), mlp(torch.float32)
    optimizer, beside = (OPTIMIZERS["adam"](each.parameters()) for each in (model, other))
    attached = attach(model, optimizer)
    scaler = GradScaler("cpu")
    for x, y in batches(1, dtype=torch.float32):
        scaler.scale((other(x) - y).square().mean()).backward()
        scaler.step(beside)  # of a model that is not attached
        scaler.update()
    off = GradScaler("cpu", enabled=False)
    train(model, optimizer, batches(1, dtype=torch.float32))
    off.step(optimizer)
    attached.close()
    assert GradScaler._unscale_grads_ is plain
    assert not optimizer._step_supports_amp_scaling
    with attach(other, beside, dtype=torch.float16), pytest.raises(OptionError, match="cast"):
        scaler.unscale_(beside)
