"""One rank's share of an arena: optimizer state and sums of gradients in 1/W of the memory.

Parameters of one unit are updated in one go as long as they have made the same number of steps.
Those that had no gradient on any rank are left out, as torch leaves out what has none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby

import torch

from penstock.errors import OptionError
from penstock.step.attached.arenas import Arena
from penstock.step.attached.flow import Parcel
from penstock.step.attached.optimizers import Group, Rule, Run

__all__ = ["Share"]


class Share:
    """What a rank keeps of one arena."""

    def __init__(
        self,
        arena: Arena,
        params: Sequence[int],
        *,
        rule: Rule,
        names: Sequence[str],
        group: int,
        rank: int,
    ) -> None:
        self.arena = arena
        self.params = tuple(params)
        """Numbers of the arena's parameters among all."""
        self.rule = rule
        self.group = group
        self.reduced = arena.share(arena.data.dtype)
        self.masters: torch.Tensor | None = None
        """Weights in full precision, where those in the arena are rounded."""
        self.rounding: torch.dtype | None = None
        """What weights are rounded to when they are sent."""
        self.states: dict[str, torch.Tensor] = {}
        self._names = tuple(names)
        self._rank = rank

    @property
    def dtype(self) -> torch.dtype:
        """Of states and of the weights that are updated."""
        return self.reduced.dtype if self.masters is None else self.masters.dtype

    def keep_masters(self, full: Mapping[int, torch.Tensor]) -> None:
        """Keep weights apart from the arena, from these (by number) or else from the arena.

        Of those that the arena does not have rounded any more, since someone has changed them, the
        ones in the arena count.
        """
        flat = self.arena.data.to(torch.promote_types(torch.float32, self.arena.data.dtype))
        for index, number in enumerate(self.params):
            if number in full:
                view, exact = self.arena.view(flat, index), full[number]
                view.copy_(torch.where(view == exact.to(self.arena.data.dtype), exact, view))
        self.masters = self.slices(flat)

    def take_over(self, params: Collection[int]) -> None:
        """Take these weights over from the arena, by number, as they are."""
        layout = self.arena.layout
        for unit in layout.units:
            (start, _), (low, _) = layout.slice_of(unit, self._rank), layout.share_of(unit)
            for index, begin, end in layout.segments(unit, self._rank):
                if self.masters is not None and self.params[index] in params:
                    place = slice(low + begin - start, low + end - start)
                    self.masters[place].copy_(self.arena.data[begin:end])

    def adopt(self, parcel: Parcel) -> None:
        """Take weights over that someone has changed where they are used, rounded ones."""
        if self.masters is None:
            return
        exact, mine = self.masters[parcel.share], parcel.mine
        rounded = exact.to(mine.dtype)
        sent = rounded if self.rounding is None else rounded.to(self.rounding).to(mine.dtype)
        if mine.device.type == "cpu" and torch.equal(mine, sent):
            return  # a GPU is not asked
        is_changed = (mine != sent) & (mine != rounded)
        exact.copy_(torch.where(is_changed, mine.to(exact.dtype), exact))

    def make_states(self) -> None:
        """Make room for all states; they begin with zeros."""
        self.states = {name: self.arena.share(self.dtype) for name in self._names}

    def follow(self, group: Group) -> None:
        """Make room for states that options have come to ask for, as a momentum that was 0."""
        missing = [name for name in self.rule.states(group) if name not in self.states]
        if missing and group.get("dampening"):
            raise OptionError(
                f"a group with dampening={group['dampening']} asks for {missing[0]!r} since its "
                "momentum is not 0 any more; close the attached one and attach again"
            )
        self._names = (*self._names, *missing)
        self.states |= {name: self.arena.share(self.dtype) for name in missing}

    def slices(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's slices of a tensor of the arena's length, side by side."""
        layout = self.arena.layout
        bounds = (layout.slice_of(unit, self._rank) for unit in layout.units)
        return torch.cat([flat[start:stop] for start, stop in bounds])

    def slices_of(self, name: str | None) -> torch.Tensor:
        """Return my slices of a state, or, without a name, of weights as others are sent them."""
        if name is not None:
            return self.states[name]
        dtype = self.arena.data.dtype
        if self.masters is None:
            return self.slices(self.arena.data)
        rounded = self.masters.to(dtype)
        return rounded if self.rounding is None else rounded.to(self.rounding).to(dtype)

    def put_together(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the slices of all ranks, by rank, as one tensor of the arena's length."""
        layout = self.arena.layout
        flat = parts[0].new_empty(layout.length)
        for unit in layout.units:
            low, high = layout.share_of(unit)
            torch.cat([part[low:high] for part in parts], out=flat[unit.start : unit.stop])
        return flat

    # -- the update --------------------------------------------------------------------------

    def update(self, parcel: Parcel, group: Group, steps: Mapping[int, int]) -> torch.Tensor:
        """Update my slice of a parcel; `steps` has the parameters that take part.

        Returns what became of the gradients, which a rule with norms has not gone along yet.
        """
        self.adopt(parcel)
        weights, grads = self.weights_of(parcel), self.grads_of(parcel)
        is_moved = False
        for low, high, step in _runs(parcel, steps):
            is_moved = True
            mine = {name: state[parcel.share][low:high] for name, state in self.states.items()}
            run = Run(weights=weights[low:high], grads=grads[low:high], states=mine, step=step)
            self.rule.update(run, group)
        if is_moved and not self.rule.has_norms:  # what is not gathered stays as others have it
            self.put(parcel)
        return grads

    def put(self, parcel: Parcel) -> None:
        """Put weights where they are gathered from."""
        if self.masters is not None:
            parcel.mine.copy_(self.masters[parcel.share])

    def weights_of(self, parcel: Parcel) -> torch.Tensor:
        """Return the weights of my slice that are updated."""
        return parcel.mine if self.masters is None else self.masters[parcel.share]

    def grads_of(self, parcel: Parcel) -> torch.Tensor:
        """Return the sums of my slice in the type of the weights."""
        return parcel.reduced.to(self.dtype)


def _runs(parcel: Parcel, steps: Mapping[int, int]) -> Iterator[tuple[int, int, int]]:
    """Yield runs of my slice with the step they are at; padding goes along where all go."""
    at = {steps.get(param, 0) for param in parcel.params}
    if len(at) == 1:
        (step,) = at
        if step:
            yield 0, parcel.mine.numel(), step
        return
    for step, segments in groupby(parcel.segments, lambda each: steps.get(each.param, 0)):
        if step:
            run = list(segments)
            yield run[0].start, run[-1].stop, step
