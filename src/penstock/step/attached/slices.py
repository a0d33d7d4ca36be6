"""The step of an optimizer on slices: runs of elements are its parameters.

Parameters that have made the same steps are a *cohort*: their numbers, such as the count of steps,
are the same, so what a rank has of them side by side is one run, and one parameter to the
optimizer. A parameter that gets no gradient in a step is left out, as torch leaves it out, and is a
cohort of its own from then on. A rank that has no element of a cohort keeps a run of one element,
so all ranks know all numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from penstock.step.attached.elementwise import Rule, attributes_of, shadow, step_of
from penstock.step.attached.optimizers import Group

__all__ = ["StepCohort", "Options", "SliceRun", "Stepper", "options_of"]


class Options(NamedTuple):
    """The options of a step: a copy, as a scheduler may change them while the step goes on."""

    groups: list[dict[str, Any]]
    attributes: dict[str, Any]


def options_of(optimizer: Optimizer) -> Options:
    """Return all options of an optimizer as they are now."""
    groups = [
        {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]
    return Options(groups, attributes_of(optimizer))


class StepCohort:
    """Parameters of a share that have made the same steps."""

    def __init__(self, params: Collection[int]) -> None:
        self.params = frozenset(params)
        self.runs: list[SliceRun] = []
        self.is_used = False
        """Whether they take part in this step."""


class Stepper:
    """Makes steps of an optimizer with slices instead of its parameters."""

    def __init__(self, optimizer: Optimizer, rule: Rule) -> None:
        self._optimizer, self._rule = optimizer, rule
        self._shadow = shadow(optimizer, rule.kind)
        self._step = step_of(rule.kind)

    @property
    def state(self) -> dict[torch.Tensor, dict[str, Any]]:
        """States of runs, by their parameters; made when they are asked for."""
        return self._shadow.state

    def step(self, options: Options, runs: Mapping[int, Sequence[SliceRun]]) -> None:
        """Update runs, by number of their group, that have weights and gradients."""
        made: list[dict[str, Any]] = [
            {**group, "params": [run.param for run in runs.get(number, ())]}
            for number, group in enumerate(options.groups)
            if self._rule.is_joint or number in runs
        ]
        vars(self._shadow).update(options.attributes)
        self._shadow.param_groups = made
        with torch.no_grad():  # which each thread has to say for itself
            self._step(self._shadow)
        if self._rule.is_joint:
            self._hand_over(options, made)

    def _hand_over(self, before: Options, made: Sequence[Group]) -> None:
        """Give the user's optimizer what the step has changed beside weights and states."""
        theirs = self._optimizer.param_groups
        for options, group, their in zip(before.groups, made, theirs, strict=True):
            new = {name: value for name, value in group.items() if name != "params"}
            their.update({n: v for n, v in new.items() if options.get(n) is not v})
        for name, value in attributes_of(self._shadow).items():
            if before.attributes.get(name) is not value:
                setattr(self._optimizer, name, value)


class SliceRun:
    """A run of elements of some cohort in one slice, as a parameter of an optimizer."""

    def __init__(
        self, cohort: StepCohort, place: slice, stepper: Stepper, empty: torch.Tensor
    ) -> None:
        self.cohort, self.place = cohort, place
        """Its place in the slice."""
        self.param = torch.nn.Parameter(empty)
        self.views: dict[str, torch.Tensor] = {}
        """Places of its states, of those with an element for each of its own."""
        self._stepper = stepper
        cohort.runs.append(self)

    @property
    def state(self) -> dict[str, Any]:
        """Its state in the optimizer."""
        return self._stepper.state[self.param]

    def numbers(self) -> dict[str, Any]:
        """Return copies of the states that are not as long as it is."""
        return {n: deepcopy(value) for n, value in self.state.items() if n not in self.views}

    def forget(self) -> None:
        """Remove its state from the optimizer."""
        self._stepper.state.pop(self.param, None)

    def take(self, weights: torch.Tensor, grads: torch.Tensor) -> None:
        """Be these elements in the step that begins."""
        self.param.grad = None  # of another length, it may be
        self.param.data, self.param.grad = weights, grads
