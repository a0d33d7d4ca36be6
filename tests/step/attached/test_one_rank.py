"""One rank: `attach` leaves the model and the optimizer as they are, and keeps what it promises."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.step.attached.cases import OPTIMIZERS, attach_as_many, batches, mlp, train, weights
from torch import nn
from torch.optim import Optimizer

import penstock.step as ps
from penstock.errors import OptionError, StateError

CLIP = 0.05


def made(kind: str, *, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Optimizer]:
    model = mlp(dtype)
    return model, OPTIMIZERS[kind](model.parameters())


def hooks_of(model: nn.Module) -> list[Any]:
    """Return all that hangs on modules and parameters."""
    found: list[Any] = []
    for module in model.modules():
        found += [each for name, each in vars(module).items() if "hooks" in name and each]
        found += [name for name in vars(module) if callable(getattr(type(module), name, None))]
    for param in model.parameters():
        found += [param._backward_hooks, param._post_accumulate_grad_hooks]
    return [each for each in found if each]


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
@pytest.mark.parametrize(
    "options", [{}, {"reshard": True}, {"wire": "bf16"}, {"clip": CLIP}], ids=str
)
def test_steps_are_the_optimizers_own_to_the_bit(kind: str, options: dict[str, Any]) -> None:
    def clipped() -> None:
        if "clip" in options:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP))

    norms: list[torch.Tensor] = []
    model, optimizer = made(kind)
    train(model, optimizer, batches(5), clipped)
    mine, attached_optimizer = made(kind)
    places = [param.data_ptr() for param in mine.parameters()]
    attached = ps.attach(mine, attached_optimizer, **options)
    train(mine, attached_optimizer, batches(5))
    assert torch.equal(weights(mine), weights(model))
    assert [param.data_ptr() for param in mine.parameters()] == places
    assert hooks_of(mine) == []
    assert attached.sent_bytes == 0
    assert attached.grad_norm == (norms[-1] if norms else None)
    assert all(param.grad is None for param in mine.parameters())
    assert str(attached_optimizer.state_dict()) == str(optimizer.state_dict())
    attached.close()
    assert "step" not in vars(attached_optimizer)
    train(model, optimizer, batches(2, seed=2))
    train(mine, attached_optimizer, batches(2, seed=2))
    assert torch.equal(weights(mine), weights(model))


def test_narrow_weights_are_those_that_several_ranks_have() -> None:
    def trained(attach: Callable[..., Any]) -> list[Any]:
        """Train, change weights by hand, save, load, train, and close."""
        model, optimizer = made("nesterov", dtype=torch.float32)
        attached = attach(model, optimizer, dtype=torch.bfloat16)
        train(model, optimizer, batches(4, dtype=torch.float32))
        attached.synchronize()
        with torch.no_grad():
            model[0].weight[0, 0] = 2.0
        train(model, optimizer, batches(2, dtype=torch.float32, seed=2))
        saved = copy.deepcopy(optimizer.state_dict())
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        optimizer.load_state_dict(saved)
        assert saved["state"][0]["momentum_buffer"].dtype == torch.float32
        train(model, optimizer, batches(3, dtype=torch.float32, seed=3))
        dtypes = {param.dtype for param in model.parameters()}
        found = [weights(model), dtypes, optimizer.state_dict()["state"][1]["momentum_buffer"]]
        attached.close()
        return [*found, optimizer.state_dict()["state"][1]["momentum_buffer"]]

    mine, others = trained(ps.attach), trained(attach_as_many)
    for one, other in zip(mine, others, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    assert mine[1] == {torch.bfloat16}
    assert (mine[2].dtype, mine[3].dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("is_before", [True, False])
def test_closures_schedulers_scalers_and_step_hooks_work(is_before: bool) -> None:
    def run(is_attached: bool) -> tuple[torch.Tensor, float, int]:
        model, optimizer = made("adam", dtype=torch.float32)
        seen: list[Any] = []
        optimizer.register_step_post_hook(lambda *_: seen.append(1))
        make = lambda: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)  # noqa: E731
        scheduler = make() if is_before else None
        if is_attached:
            ps.attach(model, optimizer, clip=CLIP)
        scheduler = scheduler or make()
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        for x, y in batches(3, dtype=torch.float32):
            optimizer.zero_grad()
            scaler.scale((model(x) - y).square().mean()).backward()
            if not is_attached:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            if not is_attached:
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            return loss.detach()

        loss = optimizer.step(closure)
        return weights(model), float(loss), len(seen)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mine, plain = run(True), run(False)
    assert torch.equal(mine[0], plain[0])
    assert mine[1:] == plain[1:]
    assert mine[2] == 4


def test_what_several_ranks_refuse_at_once_is_refused_here_too() -> None:
    model, optimizer = made("adam")
    attached = ps.attach(model, optimizer)
    with pytest.raises(StateError, match="attached already"):
        ps.attach(model, optimizer)
    attached.close()
    ps.attach(model, optimizer).close()
    with pytest.raises(OptionError, match="no wire 'int3'"):
        ps.attach(model, optimizer, wire="int3")
    with pytest.raises(OptionError, match="cannot be attached"):
        ps.attach(model, torch.optim.LBFGS(model.parameters()))
    model.add_module("more", nn.Linear(5, 5, dtype=torch.float64))
    ps.attach(model, optimizer)
    with pytest.warns(UserWarning, match=r"'more\.weight', 'more\.bias' have gradients"):
        train(model, optimizer, batches(1))


def test_a_copy_of_the_optimizer_is_a_plain_one() -> None:
    model, optimizer = made("adam")
    ps.attach(model, optimizer)
    train(model, optimizer, batches(2))
    other = copy.deepcopy(optimizer)
    assert "step" not in vars(other)
    before = weights(model)
    for param in other.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    other.step()
    assert torch.equal(weights(model), before)
