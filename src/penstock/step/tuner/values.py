"""What a program makes in a trial, and whether another one makes the same.

Compared are what it returns, what its states are afterwards and what it stores. A state may be in
slices that the program as it was written had whole: the part that is there has to be the same. What
is returned or stored may not: somebody goes on with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from penstock.program.nodes import Program

__all__ = ["Value", "Values", "is_same", "steady"]

_SAME_SHARE = 1e-3
_APPROXIMATE_SHARE = 0.1
"""How far values may be from those of the program as it was written, beside their largest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One of them, as this rank has it."""

    tensor: torch.Tensor
    bounds: tuple[tuple[int, int], ...] | None = None
    """Of a state: where by dimension it begins and ends in the whole."""

    def part(self, bounds: tuple[tuple[int, int], ...] | None) -> torch.Tensor:
        """Return what lies between some bounds."""
        if not bounds or self.bounds is None:
            return self.tensor
        pairs = zip(bounds, self.bounds, strict=True)
        return self.tensor[tuple(slice(a - start, b - start) for (a, b), (start, _) in pairs)]


Values = Mapping[str, Value]
"""By a name that says what it is."""


def is_same(program: Program, wanted: Values, made: Values | None) -> bool:
    """Whether a program makes what was wanted, up to the order of sums and what it may round."""
    if made is None or not wanted.keys() <= made.keys():
        return False
    is_exact = all(node.attr("wire") is None for node in program.nodes)
    share = _SAME_SHARE if is_exact else _APPROXIMATE_SHARE
    return all(
        _is_near(made[name].tensor, value.part(made[name].bounds), share)
        for name, value in wanted.items()
    )


def steady(made: Values, again: Values) -> Values:
    """Return those that come out the same each time: functions of the user need not do that."""
    return {
        name: value
        for name, value in made.items()
        if name in again and _is_near(again[name].tensor, value.tensor, _SAME_SHARE)
    }


def _is_near(one: torch.Tensor, other: torch.Tensor, share: float) -> bool:
    if one.shape != other.shape:
        return False
    found, wanted = one.double(), other.double()
    # What is no number, or too large for one, has to be that in both.
    open_ = (found != wanted) & ~(found.isnan() & wanted.isnan())
    if not open_.any():
        return True
    largest = wanted[wanted.isfinite()].abs().amax().item() if wanted.isfinite().any() else 0.0
    off = (found - wanted)[open_].abs().max().item()
    return bool(off <= share * max(1e-30, largest))
