"""Inputs of `compile` and of a step: the messages for wrong ones, and numbers in any form."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from penstock.errors import ProgramError
from penstock.step.program.language import Template
from penstock.step.program.nodes import Node

__all__ = ["no_program", "no_tensor", "number_of", "with_article"]

_ARRAYS = (torch.Tensor, np.ndarray, np.generic)


def with_article(given: Any) -> str:
    """Return the type of a value, with its article."""
    if isinstance(given, np.ndarray):
        return "a NumPy array"
    name = type(given).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def no_program(given: Any) -> str:
    """Return the message for a value that is no program."""
    if isinstance(given, Template):
        return (
            f"{given.name} has no mesh and no sizes yet; compile what {given.name}.on(mesh, ...) "
            "returns"
        )
    return f"a step is compiled of a program, not of {with_article(given)}; write one with @program"


def no_tensor(what: str, given: Any, shape: tuple[int, ...]) -> str:
    """Return the message for a value that is no tensor."""
    way_out = "torch.from_numpy makes one of it" if isinstance(given, np.ndarray) else "give one"
    return f"{what} is {with_article(given)}, should be a tensor of shape {shape}; {way_out}"


def number_of(node: Node, given: Any) -> float | int:
    """Return a number, also of an array with one element, or refuse what is none."""
    is_whole = node.type.dtype == "i64"
    kind = type(given)
    if kind is int or (kind is float and not is_whole):
        found: float | int = given
        return found
    value = given.item() if isinstance(given, _ARRAYS) and math.prod(given.shape) == 1 else given
    if not isinstance(value, int | float):
        shape = f" of shape {tuple(given.shape)}" if isinstance(given, _ARRAYS) else ""
        raise ProgramError(f"{node.name} is {with_article(given)}{shape}, should be one number")
    if is_whole and isinstance(value, float):
        if not value.is_integer():
            raise ProgramError(f"{node.name} is {value}, should be a whole number")
        return int(value)
    return value
