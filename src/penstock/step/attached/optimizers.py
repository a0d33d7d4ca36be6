"""Optimizers: what some of torch's mean, as step programs, and LAMB, which torch does not have.

A program says what an update means on W ranks, in the language of `penstock.step.program`; passes
rewrite that one. Names of states are those of torch. What is carried out on slices is the step of
an optimizer itself (`elementwise`); of LAMB it is `Directions`, as its steps need norms.

    program_of(torch.optim.AdamW(params))   # its program
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from penstock.errors import OptionError
from penstock.step.program.language import (
    Template,
    all_reduce,
    logical_and,
    norm,
    program,
    update,
    where,
)
from penstock.step.program.layouts import P, R
from penstock.step.program.trace import Value

__all__ = ["LAMB", "Directions", "Group", "program_of", "trust_ratio"]

Group = Mapping[str, Any]
"""A group of parameters, as torch's optimizers keep them: options by name."""


# -- programs ----------------------------------------------------------------------------------
#
# Options that stay the same from step to step are part of a program; `t`, the number of the step
# from 1, and `lr` are given anew with each run.

if TYPE_CHECKING:
    Grad = Value
    Weight = Value
    Number = Value
else:
    Grad, Weight, Number = P["n"], R["n"], float


def _mean(g: Value, w: Value, group: Group, *, decay: bool = True) -> Value:
    """Return the gradient of all ranks, uphill where it is to grow, with decay in it."""
    g = all_reduce(g, "mean")
    if group.get("maximize"):
        g = -g
    return g + group["weight_decay"] * w if decay and group["weight_decay"] else g


def _sgd_program(group: Group) -> Template:
    momentum, dampening = group["momentum"], group["dampening"]

    @program
    def sgd(g: Grad, w: Weight, lr: Number) -> Value:
        return update(w, w - lr * _mean(g, w, group))

    @program
    def sgd_momentum(g: Grad, w: Weight, momentum_buffer: Weight, t: Number, lr: Number) -> Value:
        g = _mean(g, w, group)
        kept = momentum * momentum_buffer + (1 - dampening) * g
        kept = update(momentum_buffer, where(t > 1, kept, g))
        return update(w, w - lr * (g + momentum * kept if group["nesterov"] else kept))

    return sgd_momentum if momentum else sgd


def _adam_program(group: Group, *, decoupled: bool = False) -> Template:
    if group["amsgrad"]:
        raise OptionError("there is no program for Adam with amsgrad=True; attach can do it")
    (b1, b2), eps, decay = group["betas"], group["eps"], group["weight_decay"]
    is_decoupled = decoupled or bool(group.get("decoupled_weight_decay"))

    @program
    def adam(  # noqa: PLR0917
        g: Grad, w: Weight, exp_avg: Weight, exp_avg_sq: Weight, t: Number, lr: Number
    ) -> Value:
        g = _mean(g, w, group, decay=not is_decoupled)
        m = update(exp_avg, b1 * exp_avg + (1 - b1) * g)
        v = update(exp_avg_sq, b2 * exp_avg_sq + (1 - b2) * g * g)
        step = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + eps)
        kept = w - lr * decay * w if is_decoupled and decay else w
        return update(w, kept - lr * step)

    return adam


def _lamb_program(group: Group) -> Template:
    (b1, b2), eps, decay = group["betas"], group["eps"], group["weight_decay"]

    @program
    def lamb(  # noqa: PLR0917
        g: Grad, w: Weight, exp_avg: Weight, exp_avg_sq: Weight, t: Number, lr: Number
    ) -> Value:
        g = all_reduce(g, "mean")
        m = update(exp_avg, b1 * exp_avg + (1 - b1) * g)
        v = update(exp_avg_sq, b2 * exp_avg_sq + (1 - b2) * g * g)
        step = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + eps) + decay * w
        long, short = norm(w), norm(step)
        is_both = logical_and(long > 0, short > 0)
        ratio = where(is_both, long / where(is_both, short, 1.0), 1.0)
        return update(w, w - lr * ratio * step)

    return lamb


# -- LAMB --------------------------------------------------------------------------------------


class LAMB(Optimizer):
    """Adam's direction, scaled for each parameter to the length of the parameter itself.

    For batches so large that one learning rate does not suit all layers (You and others, 2020).
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if value < 0:
                raise OptionError(f"LAMB: {name} must be at least 0, got {value}")
        if not all(0 <= beta < 1 for beta in betas):
            raise OptionError(f"LAMB: betas must lie in [0, 1), got {betas}")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)
        return loss

    def _update(self, param: torch.Tensor, group: Group) -> None:
        assert param.grad is not None
        direction = param.grad.clone()
        self._turn(param, direction, group)
        param.sub_(direction, alpha=group["lr"] * trust_ratio(param.norm(), direction.norm()))

    def _turn(self, param: torch.Tensor, grad: torch.Tensor, group: Group) -> None:
        """Bring the state up to date and make a gradient the direction of the step."""
        state = self.state[param]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        step = int(state["step"])
        corrected1, corrected2 = 1 - beta1**step, math.sqrt(1 - beta2**step)
        for w, g, m, v in _tiles(param, grad, state["exp_avg"], state["exp_avg_sq"]):
            m.lerp_(g, 1 - beta1)
            v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            torch.sqrt(v, out=g).div_(corrected2).add_(group["eps"])
            torch.div(m, g, out=g).div_(corrected1).add_(w, alpha=group["weight_decay"])


class Directions(LAMB):
    """LAMB on slices, up to the norms: directions take the place of gradients."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Leave the direction of each parameter in its gradient."""
        assert closure is None
        for group in self.param_groups:
            for param in group["params"]:
                self._turn(param, param.grad, group)


_TILE = 1 << 15
"""Elements at a time where several passes are made: they stay in the cache between them."""


def _tiles(*tensors: torch.Tensor) -> Iterable[tuple[torch.Tensor, ...]]:
    """Return flat tensors piece by piece; others, and those of a device, as they are."""
    if tensors[0].dim() != 1 or tensors[0].device.type != "cpu":
        return [tensors]
    return zip(*(torch.split(tensor, _TILE) for tensor in tensors), strict=True)


def trust_ratio(weight_norm: torch.Tensor | float, direction_norm: torch.Tensor | float) -> float:
    """Return how much longer a parameter is than the step that is proposed; 1 if either is 0."""
    long, short = float(weight_norm), float(direction_norm)
    return long / short if long > 0 and short > 0 else 1.0


_TEMPLATES: dict[type[Optimizer], Callable[[Group], Template]] = {
    torch.optim.SGD: _sgd_program,
    torch.optim.Adam: _adam_program,
    torch.optim.AdamW: partial(_adam_program, decoupled=True),
    LAMB: _lamb_program,
}


def program_of(optimizer: Optimizer, group: int = 0) -> Template:
    """Return the step program of a group of an optimizer, with its options as they are now.

    Raises:
        OptionError: there is none for its kind; a subclass may do anything in its step.
    """
    template = _TEMPLATES.get(type(optimizer))
    if template is None:
        names = ", ".join(kind.__name__ for kind in _TEMPLATES)
        raise OptionError(
            f"there is no program for {type(optimizer).__name__}; there are those of {names}"
        )
    return template(optimizer.param_groups[group])
