"""The values of a program in a trial, and whether another program makes the same.

Outputs, states and stored values are compared. A schedule may keep a state in slices that was whole
before: then the slice is compared. Outputs and stored values must keep their layout, since the
caller uses them. A step changes large weights by little, so the changes of states are compared as
well: a step that changes nothing would be nearly right otherwise.
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
"""The allowed error of values, as a share of the largest value."""
_SAME_CHANGE = 0.01
_APPROXIMATE_CHANGE = 0.5
"""The allowed error of a step's change, as a share of it, over all elements: an optimizer may turn
the sign of a tiny sum into a whole step, but not for many elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankValue:
    """One value, as this rank has it."""

    tensor: torch.Tensor
    bounds: tuple[tuple[int, int], ...] | None = None
    """Of a state: where by dimension it begins and ends in the whole."""
    before: torch.Tensor | None = None
    """Of a state: its value before the step."""

    def part(self, bounds: tuple[tuple[int, int], ...] | None) -> RankValue:
        """Return the part between some bounds."""
        if not bounds or self.bounds is None:
            return self
        pairs = zip(bounds, self.bounds, strict=True)
        cut = tuple(slice(a - start, b - start) for (a, b), (start, _) in pairs)
        before = None if self.before is None else self.before[cut]
        return RankValue(tensor=self.tensor[cut], bounds=bounds, before=before)


Values = Mapping[str, RankValue]
"""By a name such as `returned 0` or `state w`."""


def is_same(program: Program, wanted: Values, made: Values | None) -> bool:
    """Whether values are the wanted ones, up to the order of sums and the rounding of wires."""
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
    """Return the values that are the same in two runs: functions of the user may be random."""
    return {
        name: value
        for name, value in made.items()
        if name in again and _is_near(again[name].tensor, value.tensor, _SAME_SHARE)
    }


def _is_near(one: torch.Tensor, other: torch.Tensor, share: float) -> bool:
    if one.shape != other.shape:
        return False
    found, wanted = one.double(), other.double()
    # NaN and infinity must be the same in both.
    open_ = (found != wanted) & ~(found.isnan() & wanted.isnan())
    if not open_.any():
        return True
    largest = wanted[wanted.isfinite()].abs().amax().item() if wanted.isfinite().any() else 0.0
    off = (found - wanted)[open_].abs().max().item()
    return bool(off <= share * max(1e-30, largest))


def _moves_alike(found: torch.Tensor, wanted: RankValue, share: float) -> bool:
    """Whether a state was changed as wanted, up to the rounding of its elements."""
    if wanted.before is None or not found.numel() or not found.is_floating_point():
        return True
    after, before = wanted.tensor.double(), wanted.before.double()
    off, moved = (found.double() - after).norm().item(), (after - before).norm().item()
    if not math.isfinite(off + moved):
        return True  # `_is_near` has compared the finite elements.
    rounded = 4 * torch.finfo(found.dtype).eps * after.norm().item()
    return bool(off <= share * moved + rounded)
