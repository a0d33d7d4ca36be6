"""Weights and gradients that users read or change around a step are those that DDP has."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.step.attached.cases import OPTIMIZERS, assert_same, attach, batches, mlp, train, weights
from tests.step.ranks import run_ranks
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from penstock.errors import OptionError, StateError

Loop = Callable[[nn.Module, Any, Any, list[float]], None]
WIDE = 500
"""Wide enough that the gathers of a step take a while."""


def both(loop: Loop, rank: int, size: int, **options: Any) -> None:
    """Check that a loop, and what it has looked at, is the same as with DDP."""
    found = []
    for is_attached in (True, False):
        model = mlp()
        optimizer = OPTIMIZERS["nesterov"](model.parameters())
        called = model if is_attached else DistributedDataParallel(model)
        if is_attached:
            attach(model, optimizer, buckets=512, **options)
        seen: list[float] = []
        for data in batches(5, rank, size):
            loop(called, optimizer, data, seen)
        found.append([weights(model), torch.tensor(seen, dtype=torch.float64)])
    for mine, theirs in zip(*found, strict=True):
        assert_same(mine, theirs)


def backward(model: nn.Module, data: Any) -> None:
    x, y = data
    (model(x) - y).square().mean().backward()


# -- gradients -----------------------------------------------------------------------------------


def logged(model: nn.Module, optimizer: Any, data: Any, seen: list[float]) -> None:
    optimizer.zero_grad()
    backward(model, data)
    grads = [param.grad for param in model.parameters()]
    copied = copy.deepcopy(grads[0])
    file = io.BytesIO()
    torch.save(grads[1], file)
    file.seek(0)
    assert type(copied) is type(torch.load(file)) is torch.Tensor
    seen += [float(copied.sum())]
    seen += [float(torch.stack([grad.norm() for grad in grads]).norm())]
    optimizer.step()


def clipped(model: nn.Module, optimizer: Any, data: Any, seen: list[float]) -> None:
    optimizer.zero_grad()
    backward(model, data)
    seen += [float(nn.utils.clip_grad_norm_(model.parameters(), 0.3))]
    nn.utils.clip_grad_value_(model.parameters(), 0.1)
    for param in model.parameters():
        param.grad.data.mul_(0.5)
    next(model.parameters()).grad *= 3
    optimizer.step()


def accumulated(model: nn.Module, optimizer: Any, data: Any, seen: list[float]) -> None:
    optimizer.zero_grad()
    for _ in range(2):
        backward(model, data)
        seen += [float(param.grad.sum()) for param in model.parameters()]
    optimizer.step()


def thrown_away(model: nn.Module, optimizer: Any, data: Any, seen: list[float]) -> None:
    optimizer.zero_grad(set_to_none=len(seen) % 2 == 0)
    backward(model, data)
    first = next(model.parameters())
    seen += [float(first.grad.norm())]
    first.grad = None
    if len(seen) == 2:
        optimizer.zero_grad(set_to_none=False)
        backward(model, data)
    optimizer.step()


def sharpness_aware(model: nn.Module, optimizer: Any, data: Any, seen: list[float]) -> None:
    """SAM: the step goes by the gradients of where the weights would be worse."""
    backward(model, data)
    params = list(model.parameters())
    before = [param.data.clone() for param in params]
    with torch.no_grad():
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        for param in params:
            param.add_(param.grad * 0.05 / norm)
    seen += [float(norm)]
    optimizer.zero_grad()
    backward(model, data)
    for param, kept in zip(params, before, strict=True):
        param.data = kept
    optimizer.step()
    optimizer.zero_grad()


def grads_of_all(rank: int, size: int) -> None:
    for loop in (logged, clipped, accumulated, thrown_away, sharpness_aware):
        for over in ("memory", "sockets"):
            both(loop, rank, size, over=over)


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_after_backward_are_means_to_read_and_to_change(size: int) -> None:
    run_ranks(grads_of_all, size)


def reads_alone(rank: int, size: int) -> str:
    model = mlp()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    attached = attach(model, optimizer)
    train(model, optimizer, batches(2, rank, size))
    backward(model, next(batches(1, rank, size)))
    with attached.accumulate():
        math.isfinite(float(model[0].weight.grad.sum()))  # own ones, as in DDP's no_sync
    with pytest.raises(StateError) as refused:
        if rank == 0:
            model[0].weight.grad.norm()
        else:
            optimizer.step()
    train(model, optimizer, batches(1, rank, size))
    return str(refused.value)


def test_a_rank_that_reads_gradients_alone_is_told_at_once_and_so_are_the_others() -> None:
    first, second = run_ranks(reads_alone, 2)
    assert "rank 0 calls for the values of param.grad" in first
    assert "while rank 1 calls optimizer.step()" in first
    assert "while rank 0 calls for the values of param.grad" in second


def test_gradients_of_resharded_models_are_not_read() -> None:
    model = mlp()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    attached = attach(model, optimizer, reshard=True)
    for _ in range(2):
        backward(model, next(batches(1)))
        with pytest.raises(StateError, match=r"attached.clip_grad_norm_\(\)"):
            model[0].weight.grad.norm()
        optimizer.step()
    attached.close()
    backward(model, next(batches(1)))
    assert float(model[0].weight.grad.norm()) > 0


# -- weights -------------------------------------------------------------------------------------


def clamped(model: nn.Module, optimizer: Any, data: Any, seen: list[float]) -> None:
    optimizer.zero_grad()
    backward(model, data)
    optimizer.step()
    net: Any = getattr(model, "module", model)
    seen += [float(net[0].weight.sum()), float(copy.deepcopy(net[3].bias).sum())]
    with torch.no_grad():
        net[0].weight.clamp_(-0.1, 0.1)
        net[3].weight.data.mul_(0.9)
        torch._foreach_mul_(optimizer.param_groups[0]["params"][-2:], 1.01)


def weights_of_all(rank: int, size: int) -> None:
    for over in ("memory", "sockets"):
        both(clamped, rank, size, over=over)
    read_at_once(rank)


def read_at_once(rank: int) -> None:
    """A kept parameter that is read right after a step is what all ranks have in the end."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDE, WIDE) for _ in range(4)])
    kept = [model[number].weight for number in (3, 0)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attached = attach(model, optimizer)
    for number in range(3):
        model(torch.full((2, WIDE), 0.1 * (rank + number))).square().mean().backward()
        optimizer.step()
        now = [kept[0].detach().clone(), kept[1] * 1]
        file = io.BytesIO()
        torch.save(model[2].weight, file)
        attached.synchronize()
        assert [type(param) for param in model.parameters()] == [nn.Parameter] * 8
        for mine, param in zip(now, kept, strict=True):
            assert torch.equal(mine, param)
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=False), model[2].weight)


def test_weights_that_were_kept_are_those_of_the_last_step_whenever_they_are_read() -> None:
    run_ranks(weights_of_all, 2)


def test_a_model_that_was_moved_to_another_type_is_refused_with_the_way_out() -> None:
    model = mlp(torch.float32)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    attach(model, optimizer)
    data = list(batches(3, dtype=torch.float32))
    train(model, optimizer, iter(data[:2]))
    model.to(torch.bfloat16)
    with pytest.raises(StateError, match=r"call model.to\(...\) before attach"):
        backward(model, [each.bfloat16() for each in data[2]])


# -- ranks that stop -----------------------------------------------------------------------------


def stops_early(rank: int, size: int) -> str:
    model = mlp()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    attached = attach(model, optimizer)
    with pytest.raises(OptionError, match="stop all ranks at the same step"), Join([attached]):
        pass
    with pytest.raises(StateError) as refused:
        train(model, optimizer, batches(4 + rank, rank, size))
        attached.close()
    attached.close()
    return str(refused.value)


def test_a_rank_that_closes_early_is_told_and_so_are_those_that_go_on() -> None:
    first, second = run_ranks(stops_early, 2)
    assert "rank 0 calls attached.close() while rank 1 calls optimizer.step()" in first
    assert "stop all of them at the same step" in second
