"""Which optimizers may be attached: those that treat each element by itself.

What a rank updates are slices: a flat run of elements, of several parameters or of a part of one.
So a step may use, for an element, its weight, gradient and states, the options of its group and
how many steps there were; not its neighbours, its shape, or a norm. No list says who does: each
optimizer is tried once, when it is attached, on a small matrix and on the same elements in flat
pieces. What differs is refused.

    rule_of(torch.optim.NAdam(params))      # Rule for NAdam
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from penstock.errors import OptionError
from penstock.step.attached.optimizers import LAMB, Directions

__all__ = ["Rule", "attributes_of", "is_of_elements", "rule_of", "shadow", "step_of"]

_SHAPE, _CUTS = (64, 128), (0, 1, 3002, 8192)
"""Large enough for those that keep states of large parameters in blocks."""
_SCALES = (1.0, 1e-3, 1e2, 1.0, 10.0, 1e-2, 1.0, 1.0)
"""Sizes of gradients, step by step: some optimizers clip, or change after a few steps."""
_LR = 0.01
"""Instead of the group's own, which may be 0 while a scheduler warms up."""
_TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-3}
"""Parts of a step's movement. Kernels may round the last elements of a run in another way."""
_NARROW_TOLERANCE = 0.2
_ROUNDING = 16
"""Steps of the last digit that are let through whatever has moved."""
_NOT_SHADOWED = {
    *("state", "param_groups", "grad_scale", "found_inf"),
    *("step", "state_dict", "load_state_dict", "__getstate__"),
    "_need_device_dtype_check_for_fused",  # a note of torch's, good for each slice alone
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How one optimizer is carried out on slices."""

    kind: type[Optimizer]
    """The class whose step is called, with slices for parameters."""
    numbers: Mapping[str, Any]
    """States that are one number for a parameter, as the count of its steps; an example of each."""
    elements: Mapping[str, torch.dtype | None]
    """States that have an element for each of the parameter, and their type if it is not its."""
    names: Sequence[Sequence[str]] = ()
    """Names of states, by group."""
    is_joint: bool = False
    """Whether a step changes groups or the optimizer itself, so that it is made once for all."""
    has_norms: bool = False
    """Whether it leaves a direction in the gradients, to be scaled by norms of parameters."""

    def zero_of(self, name: str) -> Any:
        """Return a number as it may be before the first step."""
        example = self.numbers[name]
        return torch.zeros_like(example) if isinstance(example, torch.Tensor) else 0


def rule_of(optimizer: Optimizer, params: Sequence[torch.Tensor]) -> Rule:
    """Return how an optimizer is carried out on slices of these parameters.

    Raises:
        OptionError: its update is not element by element, as far as a trial can tell.
    """
    name = type(optimizer).__name__
    for attribute, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            raise OptionError(
                f"{name}.{attribute} is a {type(value).__name__}, which makes the steps: attach "
                "that one"
            )
    for number, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise OptionError(
                f"group {number} of {name} has differentiable=True; updates of slices have no "
                "gradients"
            )
    if type(optimizer) is LAMB:
        names = {"exp_avg": None, "exp_avg_sq": None}
        step = {"step": torch.tensor(0.0)}
        every = [(*step, *names)] * len(optimizer.param_groups)
        return Rule(kind=Directions, numbers=step, elements=names, names=every, has_norms=True)
    return _tried(optimizer, set(params))


def is_of_elements(value: Any, shape: torch.Size) -> bool:
    """Whether a state has an element for each of a parameter."""
    return isinstance(value, torch.Tensor) and value.shape == shape


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return what an optimizer is beside parameters, states, hooks and replaced methods."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _NOT_SHADOWED and not name.endswith("_hooks")
    }


def shadow(optimizer: Optimizer, kind: type[Optimizer] | None = None) -> Optimizer:
    """Return an optimizer with the same attributes and no parameters, states or hooks."""
    made = object.__new__(kind or type(optimizer))
    vars(made).update(attributes_of(optimizer))
    # Looked up where a step calls that of its base class.
    hooks = [name for name in vars(optimizer) if name.endswith("_hooks")]
    vars(made).update({name: OrderedDict() for name in hooks})
    made.state, made.param_groups = defaultdict(dict), []
    return made


def step_of(kind: type[Optimizer]) -> Any:
    """Return the step of a class without the hooks that torch has put around it."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


# -- the trial ---------------------------------------------------------------------------------


class _GroupTrial(NamedTuple):
    """One group of an optimizer, tried with elements of one type."""

    optimizer: Optimizer
    group: int
    dtype: torch.dtype
    device: torch.device


class _TrialOutcome(NamedTuple):
    """A parameter and its states after the steps of a trial."""

    weights: torch.Tensor
    states: dict[str, Any]
    is_writing: bool
    """Whether anything but the parameter and its state has changed."""


class _TrialError(Exception):
    """A trial has failed; the text is a part of a sentence."""


def _tried(optimizer: Optimizer, params: set[torch.Tensor]) -> Rule:
    rule = Rule(kind=type(optimizer), numbers={}, elements={})
    cuda = {param.device.index for param in params if param.device.type == "cuda"}
    found: dict[Any, list[str]] = {}
    every = [_trials(optimizer, number, params) for number in range(len(optimizer.param_groups))]
    try:
        with torch.random.fork_rng(devices=cuda), torch.no_grad():
            for key, trial in dict(pair for trials in every for pair in trials.items()).items():
                whole = _outcome(trial, slice(None), _SHAPE)
                found[key] = list(whole.states)
                rule = _known(rule, trial, whole)
    except _TrialError as error:
        raise OptionError(
            f"{type(optimizer).__name__} cannot be attached: {error}; ranks update slices, so an "
            "update has to be element by element, as those of SGD and Adam are"
        ) from error
    names = [list(dict.fromkeys(name for key in trials for name in found[key])) for trials in every]
    return replace(rule, names=names)


def _known(rule: Rule, trial: _GroupTrial, whole: _TrialOutcome) -> Rule:
    """Return what is known of an optimizer after one more trial."""
    numbers, elements = dict(rule.numbers), dict(rule.elements)
    for name, value in whole.states.items():
        if _is_number(name, value):
            numbers.setdefault(name, value)
        else:
            elements.setdefault(name, None if value.dtype == trial.dtype else value.dtype)
    # Alone first: a step may miss groups that are not there, as where it has a list beside them.
    said = _compared(trial, whole, numbers, is_alone=True)
    is_joint = whole.is_writing or bool(said)
    if is_joint and (said := _compared(trial, whole, numbers, is_alone=False)):
        raise _TrialError(said)
    return replace(rule, numbers=numbers, elements=elements, is_joint=rule.is_joint or is_joint)


def _trials(optimizer: Optimizer, number: int, params: set[torch.Tensor]) -> dict[Any, _GroupTrial]:
    """Return what to try of a group, by what says whether two of them are alike."""
    found: dict[Any, _GroupTrial] = {}
    group = optimizer.param_groups[number]
    options = tuple(
        (name, value != 0 if isinstance(value, float) else str(value))
        for name, value in group.items()
        if name not in {"params", "lr", "initial_lr"}
    )
    for param in params.intersection(group["params"]):
        # The widest one says most about the formula. What is right for the first group alone, as a
        # list of which only the beginning is read, is seen in another.
        for dtype in dict.fromkeys((param.dtype, torch.float64)):
            trial = _GroupTrial(optimizer, number, dtype, param.device)
            found.setdefault((number == 0, dtype, options), trial)
    return found


@cache
def _data() -> list[torch.Tensor]:
    """Return weights to begin with, and a gradient for each step."""
    generator = torch.Generator().manual_seed(0)
    start, *grads = torch.randn(
        1 + len(_SCALES), _CUTS[-1], generator=generator, dtype=torch.float64
    )
    # Some steps depend on the angle between both.
    grads[0] -= start * (start * grads[0]).sum() / (start * start).sum()
    return [start, *(scale * grad for scale, grad in zip(_SCALES, grads, strict=True))]


def _outcome(
    trial: _GroupTrial, part: slice, shape: Sequence[int] = (-1,), *, is_alone: bool = False
) -> _TrialOutcome:
    """Return what some steps make of the same weights and gradients, or of a part of them."""
    made = shadow(trial.optimizer)
    start, *grads = _data()
    param = torch.nn.Parameter(start[part].to(trial.device, trial.dtype, copy=True).reshape(shape))
    groups = [{**group, "params": []} for group in trial.optimizer.param_groups]
    mine = groups[trial.group] = {**groups[trial.group], "params": [param]}
    if "lr" in mine:
        lr = mine["lr"]
        mine["lr"] = torch.full_like(lr, _LR) if isinstance(lr, torch.Tensor) else _LR
    made.param_groups = [mine] if is_alone else groups
    before, attributes = [dict(group) for group in groups], attributes_of(made)
    for grad in grads:
        param.grad = grad[part].to(trial.device, trial.dtype, copy=True).reshape(shape)
        try:
            step_of(type(made))(made)
        except Exception as error:
            raise _TrialError(
                f"its step without a closure fails on a parameter of shape {tuple(param.shape)} "
                f"and {param.dtype} ({type(error).__name__}: {error})"
            ) from error
    is_writing = any(attributes.get(n) is not value for n, value in attributes_of(made).items())
    for group, options in zip(groups, before, strict=True):
        is_writing |= any(options.get(name) is not value for name, value in group.items())
    if set(made.state) - {param}:
        raise _TrialError("it keeps a state that belongs to no parameter, not in groups")
    return _TrialOutcome(param.detach().reshape(-1), made.state[param], is_writing)


def _is_number(name: str, value: Any) -> bool:
    """Whether a state is one number; raise if it is neither that nor has elements."""
    if type(value) is torch.Tensor and value.shape == _SHAPE:
        return False
    is_one = type(value) is torch.Tensor and value.numel() == 1
    if is_one or isinstance(value, int | float | str | None):
        return True
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
    raise _TrialError(
        f"for a parameter of shape {_SHAPE} its state {name!r} is a {type(value).__name__}{shape}, "
        "and neither has an element for each of the parameter nor is one number"
    )


def _compared(
    trial: _GroupTrial, whole: _TrialOutcome, numbers: Mapping[str, Any], *, is_alone: bool
) -> str:
    """Return what is different in pieces, or nothing."""
    try:
        parts = [slice(low, high) for low, high in pairwise(_CUTS)]
        pieces = [_outcome(trial, part, is_alone=is_alone) for part in parts]
    except _TrialError as error:
        return str(error)
    moved = whole.weights.double() - _data()[0].to(trial.device, trial.dtype)
    if not moved.any():
        return "its step does not move the parameters that its groups have"
    apart = torch.cat([piece.weights for piece in pieces])
    if _is_far(whole.weights, apart, float(moved.abs().nan_to_num().max())):
        return "its step moves a matrix in another way than the same elements in flat pieces"
    for name, value in whole.states.items():
        if name in numbers:
            if any(piece.states.get(name) != value for piece in pieces):
                return f"its state {name!r} is another one for a part of a parameter"
        elif any(name not in piece.states for piece in pieces):
            return f"it has no state {name!r} for a part of a parameter"
        else:
            flat = torch.cat([piece.states[name].reshape(-1) for piece in pieces])
            if _is_far(value.reshape(-1), flat, float(value.double().abs().nan_to_num().max())):
                return f"its state {name!r} is another one for flat pieces of a matrix"
    return ""


def _is_far(one: torch.Tensor, other: torch.Tensor, scale: float) -> bool:
    """Whether tensors differ by more than rounding, beside what they are measured by."""
    tolerance = _TOLERANCES.get(one.dtype, _NARROW_TOLERANCE)
    eps = torch.finfo(one.dtype).eps if one.is_floating_point() else 0.0
    one, other = one.double(), other.double()
    bound = tolerance * scale + _ROUNDING * eps * float(one.abs().nan_to_num().max())
    is_near = ((one - other).abs() <= bound) | (one.isnan() & other.isnan())
    return not bool((is_near | (one == other)).all())
