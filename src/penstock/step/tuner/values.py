"""What a program makes in a trial, and whether another one makes the same.

Compared are what it returns, what its states are afterwards and what it stores. A state may be in
slices that the program as it was written had whole: the part that is there has to be the same. What
is returned or stored may not: somebody goes on with it. A step moves large weights by little, so
states are compared by what it has changed as well: one that moves nothing is not nearly right.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from penstock.step.program.nodes import Program

__all__ = ["RankValue", "Values", "is_same", "steady"]

_SAME_SHARE = 1e-3
_APPROXIMATE_SHARE = 0.1
"""How far values may be from those of the program as it was written, beside their largest."""
_SAME_CHANGE = 0.01
_APPROXIMATE_CHANGE = 0.5
"""The same of what a step changes, taken over all elements: an optimizer may turn the sign of a sum
that is almost nothing into a whole step, but not of many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankValue:
    """One of them, as this rank has it."""

    tensor: torch.Tensor
    bounds: tuple[tuple[int, int], ...] | None = None
    """Of a state: where by dimension it begins and ends in the whole."""
    before: torch.Tensor | None = None
    """Of a state: what it was."""

    def part(self, bounds: tuple[tuple[int, int], ...] | None) -> RankValue:
        """Return what lies between some bounds."""
        if not bounds or self.bounds is None:
            return self
        pairs = zip(bounds, self.bounds, strict=True)
        cut = tuple(slice(a - start, b - start) for (a, b), (start, _) in pairs)
        before = None if self.before is None else self.before[cut]
        return RankValue(tensor=self.tensor[cut], bounds=bounds, before=before)


Values = Mapping[str, RankValue]
"""By a name that says what it is."""


def is_same(program: Program, wanted: Values, made: Values | None) -> bool:
    """Whether a program makes what was wanted, up to the order of sums and what it may round."""
    if made is None or not wanted.keys() <= made.keys():
        return False
    is_exact = all(node.attr("wire") is None for node in program.nodes)
    share = _SAME_SHARE if is_exact else _APPROXIMATE_SHARE
    change = _SAME_CHANGE if is_exact else _APPROXIMATE_CHANGE
    for name, value in wanted.items():
        found, part = made[name].tensor, value.part(made[name].bounds)
        if not _is_near(found, part.tensor, share) or not _moves_alike(found, part, change):
            return False
    return True


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


def _moves_alike(found: torch.Tensor, wanted: RankValue, share: float) -> bool:
    """Whether a state was changed as it should have been, beside what its elements are rounded."""
    if wanted.before is None or not found.numel() or not found.is_floating_point():
        return True
    after, before = wanted.tensor.double(), wanted.before.double()
    off, moved = (found.double() - after).norm().item(), (after - before).norm().item()
    if not math.isfinite(off + moved):
        return True  # There `_is_near` has compared what is left.
    rounded = 4 * torch.finfo(found.dtype).eps * after.norm().item()
    return bool(off <= share * moved + rounded)
