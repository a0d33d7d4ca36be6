"""Any optimizer that treats elements one by one can be attached, and makes the steps it makes."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.step.attached.cases import attach, mlp, weights
from tests.step.ranks import run_ranks
from torch import nn, optim
from torch.optim import Optimizer

from penstock.errors import OptionError
from penstock.step.attached.elementwise import rule_of

Make = Callable[[Any], Optimizer]


class Lion(Optimizer):
    """Written as users write them: no hooks, a loop over parameters, `data`."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: Any = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                p.data.add_(
                    torch.sign(state["exp_avg"].lerp(p.grad, 1 - beta1)), alpha=-group["lr"]
                )
                state["exp_avg"] = state["exp_avg"].lerp(p.grad, 1 - beta2)  # a new one each time


class Counting(Lion):
    """Counts its steps in the group and in itself, and has a list beside its groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.base_lrs = [group["lr"] for group in self.param_groups]
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group, lr in zip(self.param_groups, self.base_lrs, strict=True):
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=lr / group["count"] + 1e-3 * self.calls)


def in_groups(params: Any) -> list[dict[str, Any]]:
    params = list(params)
    return [{"params": params[:3], "lr": 0.02}, {"params": params[3:], "lr": 0.003}]


MAKES: dict[str, Make] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1, weight_decay=0.01, maximize=True),
    "momentum": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, foreach=True),
    "adam": lambda p: optim.Adam(in_groups(p), weight_decay=0.01),
    "adam of a tensor lr": lambda p: optim.Adam(p, lr=torch.tensor(0.01)),
    "adamw": lambda p: optim.AdamW(p, lr=0.01, foreach=True),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "nadam": lambda p: optim.NAdam(p, lr=0.01, weight_decay=0.01),
    "radam": lambda p: optim.RAdam(p, lr=0.01),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
    "adadelta": lambda p: optim.Adadelta(p, lr=0.5),
    "adamax": lambda p: optim.Adamax(p, lr=0.01),
    "asgd": lambda p: optim.ASGD(p, lr=0.01, t0=2),
    "rprop": lambda p: optim.Rprop(p, lr=0.01),
    "lion": Lion,
    "counting": lambda p: Counting(in_groups(p)),
}
FUSED: dict[str, Make] = {
    "momentum fused": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adam fused": lambda p: optim.Adam(in_groups(p), amsgrad=True, fused=True),
}
"""Kernels of the CPU that round the last elements of a run in another way than the others."""
NUM_STEPS = 6


class Partly(nn.Module):
    """A model of odd sizes, a part of which runs in some steps alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.extra = mlp(torch.float32), nn.Parameter(torch.linspace(-1, 1, 5))

    def forward(self, x: torch.Tensor, is_extra: bool) -> torch.Tensor:
        return self.body(x) + self.extra.cos() if is_extra else self.body(x)


def steps(model: nn.Module, optimizer: Optimizer, numbers: range, rank: int, size: int) -> None:
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        x, y = (torch.randn(12, n, generator=generator).chunk(size)[rank] for n in (7, 5))
        optimizer.zero_grad()
        (model(x, number % 3 == 1) - y).square().mean().backward()
        optimizer.step()


def packed(value: Any) -> bytes:
    """Return a value with tensors as bytes: each tensor would travel by a file of its own."""
    made = io.BytesIO()
    torch.save(value, made)
    return made.getvalue()


def unpacked(said: bytes) -> Any:
    return torch.load(io.BytesIO(said), weights_only=False)


def assert_close(found: Any, expected: Any, rtol: float, atol: float, name: str) -> None:
    torch.testing.assert_close(
        found, expected, rtol=rtol, atol=atol, msg=lambda said: f"{name}: {said}"
    )


def beside_ddp(rank: int, size: int, options: dict[str, Any], saved: bytes | None = None) -> bytes:
    """Return how far weights are from DDP's, and what both save."""
    found, loaded = {}, None if saved is None else unpacked(saved)
    for name, make in (MAKES | FUSED).items():
        # torch 2.13 cannot begin to use its fused momentum of one parameter after that of others.
        numbers = range(1, 3 * NUM_STEPS, 3) if name in FUSED else range(NUM_STEPS)
        ours, plain = Partly(), Partly()
        theirs, optimizer = make(plain.parameters()), make(ours.parameters())
        if loaded is not None:
            for model, each in ((plain, theirs), (ours, optimizer)):
                model.load_state_dict(loaded[name][0])
                each.load_state_dict(copy.deepcopy(loaded[name][1]))
        ddp = nn.parallel.DistributedDataParallel(plain, find_unused_parameters=name not in FUSED)
        steps(ddp, theirs, numbers, rank, size)
        attached = attach(ours, optimizer, buckets=512, **options)
        steps(ours, optimizer, numbers, rank, size)
        attached.synchronize()
        with attached.whole():
            apart = (weights(ours) - weights(plain)).abs().max().item()
        made = copy.deepcopy((ours.state_dict(), optimizer.state_dict()))
        if name == "counting" and loaded is None:
            assert optimizer.calls == NUM_STEPS
        attached.close()
        found[name] = apart, made, (plain.state_dict(), theirs.state_dict())
    return packed(found)


@pytest.mark.parametrize("options", [{}, {"over": "memory"}, {"reshard": True}])
def test_two_ranks_have_the_weights_and_states_of_ddp_to_the_bit(options: dict[str, Any]) -> None:
    for found in run_ranks(beside_ddp, 2, options):
        for name, (apart, (_, state), (_, expected)) in unpacked(found).items():
            # The fused momentum rounds the last elements of a run in another way than the others.
            assert apart <= 1e-6 if name in FUSED else apart == 0, f"{name} is {apart} apart"
            tolerance = 1e-6 if name in FUSED else 0.0
            assert state["param_groups"] == expected["param_groups"], name
            assert_close(state["state"], expected["state"], tolerance, tolerance, name)


def test_three_ranks_go_on_from_two_and_differ_from_ddp_by_rounding_only() -> None:
    begun = unpacked(run_ranks(beside_ddp, 2, {})[0])
    saved = packed({name: ours for name, (_, ours, _) in begun.items()})
    for found in run_ranks(beside_ddp, 3, {}, saved):
        for name, (apart, (_, state), (_, expected)) in unpacked(found).items():
            assert apart <= 1e-5, f"{name} is {apart} apart"
            assert_close(state["state"], expected["state"], 1e-3, 1e-5, name)


# -- refusals ----------------------------------------------------------------------------------


class Clipped(optim.SGD):
    """Scales all gradients by their norm."""

    def step(self, closure: Any = None) -> None:
        nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 1.0)
        super().step()


class Decaying(optim.SGD):
    """Has no decay for biases, which it knows by their shape."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.dim() > 1:
                p.mul_(0.9)
        super().step()


class Noisy(optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for p in self.param_groups[0]["params"]:
            p.add_(torch.randn_like(p), alpha=1e-3)


class Keyed(optim.SGD):
    def step(self, closure: Any = None) -> None:
        self.state["count"] = self.state.get("count", 0) + 1
        super().step()


class Wrapper(optim.SGD):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.0)
        self.inner = optim.Adam(params)


class Elsewhere(optim.SGD):
    def step(self, closure: Any = None) -> None:
        pass


REFUSED: list[tuple[Make, str]] = [
    (optim.Adafactor, r"its state 'row_var' is a Tensor of shape \(64, 1\)"),
    (optim.Muon, "a matrix in another way|its step without a closure fails"),
    (optim.LBFGS, r"its step without a closure fails on .*closure"),
    (optim.SparseAdam, "does not support dense gradients"),
    (lambda p: Clipped(p, lr=0.0), "moves a matrix in another way than the same elements in flat"),
    (Decaying, "moves a matrix in another way"),
    (Noisy, "moves a matrix in another way"),
    (Keyed, "a state that belongs to no parameter"),
    (Wrapper, "Wrapper.inner is a Adam, which makes the steps: attach that one"),
    (Elsewhere, "does not move the parameters"),
    (lambda p: optim.Adam(p, differentiable=True), "differentiable=True"),
    (lambda p: optim.Adam(p, capturable=True), "capturable"),
]


def test_what_is_not_element_by_element_is_refused_and_says_why() -> None:
    before = torch.get_rng_state()
    optim.SGD([torch.zeros(1, requires_grad=True)])  # puts hooks around the step of all others
    for make, said in REFUSED:
        params = [torch.zeros(3, 2, requires_grad=True)]
        with pytest.raises(OptionError, match=said):
            rule_of(make(params), params)
        assert not params[0].any()
    assert torch.equal(torch.get_rng_state(), before), "the trial has drawn from the user's numbers"


def test_only_what_counts_beside_its_parameters_waits_for_the_last_gradient() -> None:
    for name, make in (MAKES | FUSED).items():
        params = [torch.zeros(3, requires_grad=True) for _ in range(4)]
        assert rule_of(make(params), params).is_joint == (name == "counting"), name


def test_narrow_weights_and_a_rate_that_is_zero_for_now_are_tried_as_well() -> None:
    for make in MAKES.values():
        params = [torch.zeros(3, dtype=torch.bfloat16, requires_grad=True) for _ in range(4)]
        optimizer = make(params)
        for group in optimizer.param_groups:
            group["lr"] *= 0
        assert rule_of(optimizer, params).kind is type(optimizer)
