"""Saving and loading an attached optimizer: as torch would, whole, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from penstock.errors import StateError
from penstock.step.attached.others import Gather
from penstock.step.attached.sharded import whole_of
from penstock.step.attached.share import Share

__all__ = ["collected", "spread", "unpacked"]

State = dict[str, Any]
"""Of one parameter, by torch's names."""


def collected(
    shares: Sequence[Share], steps: Mapping[int, int], gather: Gather
) -> dict[int, State]:
    """Return the state of all parameters that have made a step."""
    made: dict[int, State] = {}
    for share in shares:
        for name in share.states:
            flat = gather(share, name)
            for index, number in enumerate(share.params):
                if steps[number]:
                    # A copy in memory of its own: saving a view would save the arena.
                    view = share.arena.view(flat, index)
                    made.setdefault(number, {})[name] = view.clone(
                        memory_format=torch.preserve_format
                    )
        for number in share.params:
            if share.rule.has_step and steps[number]:
                state = made.setdefault(number, {})
                made[number] = {"step": torch.tensor(float(steps[number])), **state}
    return made


def spread(
    shares: Sequence[Share], saved: Mapping[int, State], params: Sequence[torch.Tensor]
) -> dict[int, int]:
    """Take over whole states, each rank its slices; return the steps that parameters have made."""
    steps = dict.fromkeys(range(len(params)), 0)
    for share in shares:
        share.make_states()
        for name in share.states:
            flat = share.arena.data.new_zeros(share.arena.layout.length, dtype=share.dtype)
            for index, number in enumerate(share.params):
                value = whole_of(saved.get(number, {}).get(name))
                if value is None:
                    continue
                if value.shape != params[number].shape:
                    raise StateError(
                        f"the state {name!r} of parameter {number} has shape "
                        f"{tuple(value.shape)}, the parameter has {tuple(params[number].shape)}"
                    )
                share.arena.view(flat, index).copy_(value)
                # Without a counter of its own, as SGD, a state says that there were steps.
                steps[number] = int(saved[number].get("step", 1))
            share.states[name] = share.slices(flat)
    return steps


def unpacked(
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    load: Callable[[dict[str, Any]], None],
) -> dict[torch.Tensor, State]:
    """Load the options of groups as torch does, and return the states by parameter.

    torch would round states to the type of the parameters, which may be less than what is kept.
    """
    load({**saved, "state": {}})
    theirs = [number for group in saved["param_groups"] for number in group["params"]]
    ours = [param for group in optimizer.param_groups for param in group["params"]]
    by_number = dict(zip(theirs, ours, strict=True))
    return {
        by_number[number]: dict(state)
        for number, state in saved["state"].items()
        if number in by_number
    }
