"""Gradients that a loop clips between backward and step, by the norm or the values of all ranks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.step.attached.cases import OPTIMIZERS, assert_same, attach, batches, mlp, train, weights
from tests.step.ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from penstock.errors import OptionError, StateError

FLOWS: dict[str, dict[str, Any]] = {
    "sockets": {},
    "memory": {"over": "memory"},
    "slices": {"reshard": True},
    "bf16": {"dtype": torch.bfloat16, "reshard": True},
}
WAYS: dict[str, tuple[float, ...]] = {
    "norm": (0.05,),
    "norm of order 3": (0.02, 3.0),
    "largest": (0.01, math.inf),
    "measured": (math.inf,),
    "value": (0.003,),
}


def beside_ddp(rank: int, size: int) -> dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Train in each flow and way of clipping, and return norms and weights of both."""
    made = {}
    for flow, options in FLOWS.items():
        for way, args in WAYS.items():
            if way not in ("norm", "value") and flow != "sockets":
                continue
            ours = clipped(rank, size, way, args, options)
            made[f"{flow}, {way}"] = ours, clipped(rank, size, way, args, None)
    return made


def clipped(
    rank: int, size: int, way: str, args: tuple[float, ...], options: dict[str, Any] | None
) -> list[torch.Tensor]:
    model: Any = mlp(torch.float32)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    call: Any = model
    if options is None:
        call = DistributedDataParallel(model)
        params = list(model.parameters())
        norm: Callable[..., Any] = partial(nn.utils.clip_grad_norm_, params)
        value: Callable[..., Any] = partial(nn.utils.clip_grad_value_, params)
    else:
        attached = attach(model, optimizer, buckets=512, **options)
        norm, value = attached.clip_grad_norm_, attached.clip_grad_value_
    norms = []
    for x, y in batches(4, rank, size, dtype=torch.float32):
        optimizer.zero_grad()
        (call(x) - y).float().square().mean().backward()
        if way == "value":
            value(*args)
        else:
            norms.append(norm(*args))
        optimizer.step()
    saved = copy.deepcopy(model.state_dict())
    if options is not None:
        attached.close()
    return [*norms, *(each.float() for each in saved.values())]


def test_gradients_are_clipped_by_the_norm_of_all_ranks_as_with_ddp() -> None:
    for found in run_ranks(beside_ddp, 2):
        for name, (ours, theirs) in found.items():
            for mine, other in zip(ours, theirs, strict=True):
                assert_same(mine, other, 2e-2 if "bf16" in name else 1e-5)


def around(rank: int, size: int, reshard: bool) -> torch.Tensor:
    """Clip in loops that throw gradients away, and add more of them."""
    model = mlp()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    attached = attach(model, optimizer, buckets=512, reshard=reshard)

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (model(x) - y).square().mean()

    for number, (x, y) in enumerate(batches(4, rank, size)):
        if number % 2:  # a step that is skipped for its norm
            loss(100 * x, y).backward()
            assert attached.clip_grad_norm_(0.01) > 1
            optimizer.zero_grad(set_to_none=True)
        (loss(x, y) / 2).backward()
        (loss(x, y) / 2).backward()
        attached.clip_grad_norm_(0.05)
        optimizer.step()
    optimizer.zero_grad()
    loss(x, y).backward()
    attached.clip_grad_norm_(0.05)
    loss(x, y).backward()
    if not reshard:
        with pytest.raises(StateError, match="after gradients were clipped"):
            optimizer.step()
        optimizer.zero_grad()
        loss(x, y).backward()
        attached.clip_grad_norm_(0.05)
    optimizer.step()
    with attached.whole():
        return torch.cat([param.detach().reshape(-1) for param in model.parameters()])


def apart(rank: int, size: int) -> list[str]:
    """Return what ranks are told that do different things; they go on afterwards."""
    model = mlp()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    attached = attach(model, optimizer, buckets=512)
    said = []

    def wrong() -> None:
        nonlocal optimizer
        with pytest.raises((StateError, OptionError)) as caught:
            if rank and len(said) == 0:
                attached.clip_grad_norm_(1.0)
            elif len(said) == 1:
                attached.clip_grad_norm_(1.0 + rank)
            else:
                optimizer.step()
        said.append(str(caught.value))

    def other_rates() -> None:
        wrong()
        wrong()
        optimizer.param_groups[0]["lr"] = 0.1 + rank
        wrong()
        optimizer.param_groups[0]["lr"] = 0.1

    train(model, optimizer, batches(1, rank, size), other_rates)
    train(model, optimizer, batches(1, rank, size))
    theirs = weights(model)
    torch.distributed.broadcast(theirs, 0)
    assert torch.equal(weights(model), theirs)
    return said


def all_around(rank: int, size: int) -> Any:
    return around(rank, size, False), around(rank, size, True), apart(rank, size)


def alone(is_added: bool) -> torch.Tensor:
    """Return what one process makes of `around`."""
    model = mlp()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    params = list(model.parameters())
    data = list(batches(4))
    for number, (x, y) in enumerate([*data, data[-1]]):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        nn.utils.clip_grad_norm_(params, 0.05)
        if is_added and number == 4:
            (model(x) - y).square().mean().backward()
        optimizer.step()
    return weights(model)


def test_clipping_goes_with_gradients_that_are_thrown_away_and_never_goes_unseen() -> None:
    for rank, (found, in_slices, said) in enumerate(run_ranks(all_around, 2)):
        assert_same(found, alone(False))
        assert_same(in_slices, alone(True))
        other = 1 - rank
        assert f"while rank {other} calls" in said[0]
        assert f"max_norm={1.0 + rank} on rank {rank}, max_norm={1.0 + other} on" in said[1]
        assert f"lr={0.1 + rank} on rank {rank}, lr={0.1 + other} on rank {other}" in said[2]


def test_norms_that_clip_all_or_nothing_are_refused() -> None:
    model = mlp()
    attached = attach(model, OPTIMIZERS["adam"](model.parameters()))
    with pytest.raises(OptionError, match=r"max_norm is float\('inf'\)"):
        attached.clip_grad_norm_(0.0)
    with pytest.raises(OptionError, match="at least 0"):
        attached.clip_grad_value_(-1.0)
    model(torch.full((1, 7), math.nan, dtype=torch.float64)).sum().backward()
    with pytest.raises(RuntimeError, match="the norm of order"):
        attached.clip_grad_norm_(1.0, error_if_nonfinite=True)
