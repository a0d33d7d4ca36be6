"""Optimizers: what they do to a weight, as step programs and as kernels for a slice.

Each optimizer that can be attached is a `Rule`. Its program says what it means on W ranks, in the
language of `penstock.program`; passes rewrite that one. Its kernel does the same to a run of
elements of one rank's share, in place, with torch's own fused code where there is some. Names of
states are those of torch, so that what is saved here can be loaded there.

    rule_of(torch.optim.AdamW(params))      # Rule for AdamW
    program_of(torch.optim.AdamW(params))   # its program

torch has no LAMB; `LAMB` here is one, plain, for one process or to be attached.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.optim.sgd import sgd

from penstock.errors import OptionError
from penstock.program.language import (
    Template,
    all_reduce,
    logical_and,
    norm,
    program,
    update,
    where,
)
from penstock.program.layouts import P, R
from penstock.program.trace import Value

__all__ = ["LAMB", "Group", "Rule", "Run", "program_of", "rule_of", "trust_ratio"]

Group = Mapping[str, Any]
"""A group of parameters, as torch's optimizers keep them: options by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Elements that are updated in one go, flat: of weights, gradients and states."""

    weights: torch.Tensor
    grads: torch.Tensor
    states: Mapping[str, torch.Tensor]
    step: int
    """Of these parameters, from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One kind of optimizer."""

    name: str
    template: Callable[[Group], Template]
    """The program for a group's options."""
    states: Callable[[Group], tuple[str, ...]]
    """Names of the states that are as long as the weights."""
    update: Callable[[Run, Group], None]
    """Change weights and states in place; gradients may be used up."""
    has_step: bool = True
    """Whether torch keeps the number of steps beside the states."""
    has_norms: bool = False
    """Whether `update` leaves a direction in the gradients, to be scaled by norms of parameters."""


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


# -- kernels -----------------------------------------------------------------------------------


def _sgd(run: Run, group: Group) -> None:
    options: Any = {
        "weight_decay": float(group["weight_decay"]),
        "momentum": float(group["momentum"]),
        "lr": float(group["lr"]),
        "dampening": float(group["dampening"]),
        "nesterov": bool(group["nesterov"]),
        "maximize": bool(group["maximize"]),
    }
    buffer = run.states["momentum_buffer"] if group["momentum"] else None
    if run.weights.device.type == "cpu" and run.weights.itemsize < _FUSED_BYTES_MIN:
        kept = [None if run.step == 1 else buffer]
        sgd([run.weights], [run.grads], kept, foreach=False, fused=False, **options)
        if buffer is not None and kept[0] is not buffer and kept[0] is not None:
            buffer.copy_(kept[0])
        return
    buffers = [] if buffer is None else [buffer]
    is_first = run.step == 1
    torch._fused_sgd_([run.weights], [run.grads], buffers, is_first_step=is_first, **options)


_FUSED_BYTES_MIN = 4
"""On the CPU torch 2.13 has wrong sums in its fused SGD for elements of fewer bytes."""


def _adam(run: Run, group: Group, *, decoupled: bool = False) -> None:
    amsgrad = bool(group["amsgrad"])
    is_decoupled = decoupled or bool(group.get("decoupled_weight_decay", False))
    kernel = torch._fused_adamw_ if is_decoupled else torch._fused_adam_
    beta1, beta2 = group["betas"]
    kernel(
        [run.weights],
        [run.grads],
        [run.states["exp_avg"]],
        [run.states["exp_avg_sq"]],
        [run.states["max_exp_avg_sq"]] if amsgrad else [],
        # Made where it is read: a copy to a device would have the host wait.
        [torch.full((), float(run.step), dtype=torch.float32, device=run.weights.device)],
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        weight_decay=float(group["weight_decay"]),
        eps=float(group["eps"]),
        amsgrad=amsgrad,
        maximize=bool(group["maximize"]),
    )


_TILE = 1 << 15
"""Elements at a time where several passes are made: they stay in the cache between them."""


def _lamb(run: Run, group: Group) -> None:
    """Bring the states up to date and leave the direction in the gradients."""
    beta1, beta2 = group["betas"]
    corrected1, corrected2 = 1 - beta1**run.step, math.sqrt(1 - beta2**run.step)
    tiles = [run.weights, run.grads, run.states["exp_avg"], run.states["exp_avg_sq"]]
    tile = _TILE if run.weights.device.type == "cpu" else max(1, run.weights.numel())
    for w, g, m, v in zip(*(torch.split(tensor, tile) for tensor in tiles), strict=True):
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        torch.sqrt(v, out=g).div_(corrected2).add_(group["eps"])
        torch.div(m, g, out=g).div_(corrected1).add_(w, alpha=group["weight_decay"])


# -- the table ---------------------------------------------------------------------------------


def _sgd_states(group: Group) -> tuple[str, ...]:
    return ("momentum_buffer",) if group["momentum"] else ()


def _adam_states(group: Group) -> tuple[str, ...]:
    more = ("max_exp_avg_sq",) if group.get("amsgrad") else ()
    return ("exp_avg", "exp_avg_sq", *more)


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
        state = self.state[param]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        step, m, v, g = int(state["step"]), state["exp_avg"], state["exp_avg_sq"], param.grad
        assert g is not None
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        direction = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + group["eps"])
        direction += group["weight_decay"] * param
        param.sub_(direction, alpha=group["lr"] * trust_ratio(param.norm(), direction.norm()))


def trust_ratio(weight_norm: torch.Tensor | float, direction_norm: torch.Tensor | float) -> float:
    """Return how much longer a parameter is than the step that is proposed; 1 if either is 0."""
    long, short = float(weight_norm), float(direction_norm)
    return long / short if long > 0 and short > 0 else 1.0


_RULES: dict[type[Optimizer], Rule] = {
    torch.optim.SGD: Rule(
        name="sgd", template=_sgd_program, states=_sgd_states, update=_sgd, has_step=False
    ),
    torch.optim.Adam: Rule(name="adam", template=_adam_program, states=_adam_states, update=_adam),
    torch.optim.AdamW: Rule(
        name="adamw",
        template=partial(_adam_program, decoupled=True),
        states=_adam_states,
        update=partial(_adam, decoupled=True),
    ),
    LAMB: Rule(
        name="lamb",
        template=_lamb_program,
        states=_adam_states,
        update=_lamb,
        has_norms=True,
    ),
}


def rule_of(optimizer: Optimizer) -> Rule:
    """Return the rule of an optimizer of torch, or of `LAMB`.

    Raises:
        OptionError: it is of another kind; a subclass may do anything in its step.
    """
    rule = _RULES.get(type(optimizer))
    if rule is None:
        names = ", ".join(kind.__name__ for kind in _RULES)
        raise OptionError(
            f"{type(optimizer).__name__} cannot be attached: its update is not known here; "
            f"there are {names}"
        )
    for number, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise OptionError(
                f"group {number} of {type(optimizer).__name__} has differentiable=True; "
                "updates of slices have no gradients"
            )
    return rule


def program_of(optimizer: Optimizer, group: int = 0) -> Template:
    """Return the step program of a group of an optimizer, with its options as they are now."""
    return rule_of(optimizer).template(optimizer.param_groups[group])
