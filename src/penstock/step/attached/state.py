"""Saving and loading an attached optimizer: as torch would, whole, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from penstock.errors import StateError
from penstock.step.attached.peer_slices import Gather
from penstock.step.attached.sharded import whole_of
from penstock.step.attached.share import Share

__all__ = ["State", "collected", "spread", "unpacked"]

State = dict[str, Any]
"""The states of one parameter, by torch's names."""


def collected(shares: Sequence[Share], gather: Gather) -> dict[int, State]:
    """Return the state of all parameters that have any."""
    made: dict[int, State] = {}
    for share in shares:
        had = {number: share.state_of(number) for number in share.params}
        made |= {number: numbers for number, (_, numbers) in had.items()}
        for name in sorted(share.states):
            flat = gather(share, name)
            for index, number in enumerate(share.params):
                if name in had[number][0]:
                    # A copy in memory of its own: saving a view would save the arena.
                    view = share.arena.view(flat, index)
                    made[number][name] = view.clone(memory_format=torch.preserve_format)
    return {number: state for number, state in made.items() if state}


def spread(
    shares: Sequence[Share], saved: Mapping[int, State], params: Sequence[torch.Tensor]
) -> None:
    """Take over whole states, each rank its slices."""
    for share in shares:
        share.states = {}
        flats: dict[str, torch.Tensor] = {}
        cohort: dict[Any, tuple[list[int], list[str], dict[str, Any]]] = {}
        for index, number in enumerate(share.params):
            names, numbers = [], {}
            state = {name: whole_of(value) for name, value in saved.get(number, {}).items()}
            if _plain(state.get("step", 1)) == 0:  # what was never used begins by itself
                state = {}
            for name, value in state.items():
                if _is_number(share, name, value, params[number].shape):
                    numbers[name] = _like(value, share.rule.numbers.get(name))
                    continue
                _check_shape(name, value, number, params[number].shape)
                names.append(name)
                if name not in flats:
                    dtype = share.rule.elements.get(name) or share.dtype
                    flats[name] = share.arena.data.new_zeros(share.arena.layout.length, dtype=dtype)
                share.arena.view(flats[name], index).copy_(value)
            said = tuple((name, _plain(value)) for name, value in sorted(numbers.items()))
            cohort.setdefault((tuple(sorted(names)), said), ([], names, numbers))[0].append(number)
        share.states = {name: share.slices(flat) for name, flat in flats.items()}
        share.have(cohort.values())


def _is_number(share: Share, name: str, value: Any, shape: torch.Size) -> bool:
    if name in share.rule.numbers or not isinstance(value, torch.Tensor):
        return True
    # What options have not asked for yet, as a momentum that was 0, was not in the trial.
    return name not in share.rule.elements and value.numel() == 1 and value.shape != shape


def _check_shape(name: str, value: torch.Tensor, number: int, shape: torch.Size) -> None:
    if value.shape != shape:
        raise StateError(
            f"the state {name!r} of parameter {number} has shape {tuple(value.shape)}, the "
            f"parameter has {tuple(shape)}"
        )


def _like(value: Any, example: Any) -> Any:
    """Return a number as the optimizer makes it: some want theirs on a device."""
    if isinstance(example, torch.Tensor) and value is not None:
        return torch.as_tensor(value).to(example.device, example.dtype, copy=True)
    return value


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


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
