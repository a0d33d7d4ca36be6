"""One rank's share of an arena: optimizer state and sums of gradients in 1/W of the memory.

Parameters of one unit are updated in one go as long as they have made the same number of steps.
Those that had no gradient on any rank are left out, as torch leaves out what has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import torch

from penstock.step.arenas import Arena
from penstock.step.attach_flow import Parcel
from penstock.step.comm import Comm
from penstock.step.optimizers import Group, Rule, Run

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
        self.states: dict[str, torch.Tensor] = {}
        self._names = tuple(names)
        self._rank = rank

    @property
    def dtype(self) -> torch.dtype:
        """Of states and of the weights that are updated."""
        return self.reduced.dtype if self.masters is None else self.masters.dtype

    def keep_masters(self, full: Mapping[int, torch.Tensor]) -> None:
        """Keep weights apart from the arena, from these (by number) or else from the arena."""
        flat = self.arena.data.to(torch.promote_types(torch.float32, self.arena.data.dtype))
        for index, number in enumerate(self.params):
            if number in full:
                self.arena.view(flat, index).copy_(full[number])
        self.masters = self.slices(flat)

    def make_states(self) -> None:
        """Make room for all states; they begin with zeros."""
        self.states = {name: self.arena.share(self.dtype) for name in self._names}

    def slices(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's slices of a tensor of the arena's length, side by side."""
        layout = self.arena.layout
        bounds = (layout.slice_of(unit, self._rank) for unit in layout.units)
        return torch.cat([flat[start:stop] for start, stop in bounds])

    def whole(self, slices: torch.Tensor, comm: Comm) -> torch.Tensor:
        """Return all ranks' slices as one tensor of the arena's length; all ranks call it."""
        layout = self.arena.layout
        flat = slices.new_empty(layout.length)
        handles = []
        for unit in layout.units:
            low, high = layout.share_of(unit)
            handles.append(comm.all_gather(flat[unit.start : unit.stop], slices[low:high]))
        for handle in handles:
            handle.wait()
        return flat

    # -- the update --------------------------------------------------------------------------

    def update(self, parcel: Parcel, group: Group, steps: Mapping[int, int]) -> torch.Tensor:
        """Update my slice of a parcel; `steps` has the parameters that take part.

        Returns what became of the gradients, which a rule with norms has not gone along yet.
        """
        weights, grads = self.weights_of(parcel), self.grads_of(parcel)
        for low, high, step in _runs(parcel, steps):
            mine = {name: state[parcel.share][low:high] for name, state in self.states.items()}
            run = Run(weights=weights[low:high], grads=grads[low:high], states=mine, step=step)
            self.rule.update(run, group)
        if not self.rule.has_norms:
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
