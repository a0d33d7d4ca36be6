"""One rank's share of an arena: optimizer state and sums of gradients in 1/W of the memory.

What lies side by side in one unit and is kin is updated in one go; see `slices`. Parameters that
had no gradient on any rank are left out, as torch leaves out what has none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from itertools import groupby
from typing import Any

import torch
from torch.optim import Optimizer

from penstock.step.attached.arenas import Arena, ArenaUnit
from penstock.step.attached.elementwise import Rule, is_of_elements
from penstock.step.attached.flow import Parcel
from penstock.step.attached.slices import Kin, Options, SliceRun, Stepper

__all__ = ["Share"]

Had = tuple[Collection[str], Mapping[str, Any]]
"""Of some kin: names of states with elements, and states that are one number."""


class Share:
    """What a rank keeps of one arena."""

    def __init__(
        self,
        arena: Arena,
        params: Sequence[int],
        *,
        optimizer: Optimizer,
        rule: Rule,
        group: int,
        rank: int,
        joint: Stepper | None = None,
    ) -> None:
        """Take a share; a joint stepper makes the steps of several."""
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
        """Those that have an element for each weight. Made by the first step, on all ranks."""
        self._rank = rank
        self._make_stepper: Callable[[], Stepper] = lambda: joint or Stepper(optimizer, rule)
        self._runs: dict[ArenaUnit | None, list[SliceRun]] = {}
        """By unit; under None, of kin of which this rank has nothing."""
        self._steppers: dict[ArenaUnit | None, Stepper] = {}
        self._kin: dict[int, Kin] = {}
        """Of each parameter, by number."""
        self._lock = threading.Lock()
        """Of `states`: lanes update several parcels at a time."""

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

    # -- states ------------------------------------------------------------------------------

    def state_of(self, number: int) -> tuple[list[str], dict[str, Any]]:
        """Return which of `states` a parameter has, and copies of those that are one number."""
        (run, *_) = self._kin[number].runs
        return sorted(run.views), run.numbers()

    def zeros_of(self, name: str) -> torch.Tensor:
        """Return room for a state that no parameter has yet."""
        return self.arena.share(self.rule.elements.get(name) or self.dtype)

    def have(self, every: Iterable[tuple[Collection[int], *Had]]) -> None:
        """Take these for kin: numbers of parameters, names in `states`, and one-number states."""
        layout = self.arena.layout
        had = {Kin(params): (names, numbers) for params, names, numbers in every}
        for run in (run for runs in self._runs.values() for run in runs):
            run.forget()
        self._runs = {unit: [] for unit in (None, *layout.units)}
        self._steppers = {unit: self._make_stepper() for unit in self._runs}
        self._kin = {number: kin for kin in had for number in kin.params}
        for unit in layout.units:
            start, _ = layout.slice_of(unit, self._rank)
            segments = layout.segments(unit, self._rank)
            by_kin = groupby(segments, lambda each: self._kin[self.params[each.param]])
            for kin, found in by_kin:
                mine = list(found)
                self._run(unit, kin, slice(mine[0].start - start, mine[-1].stop - start), had[kin])
        for kin, states in had.items():
            if not kin.runs:
                self._run(None, kin, slice(0, 1), states)

    def _run(
        self,
        unit: ArenaUnit | None,
        kin: Kin,
        place: slice,
        had: Had,
    ) -> None:
        empty = self.arena.data.new_empty(0, dtype=self.dtype)
        run = SliceRun(kin, place, self._steppers[unit], empty)
        self._runs[unit].append(run)
        names, numbers = had
        if names or numbers:
            run.views = {name: self._view(unit, run, self.states[name]) for name in names}
            run.state.update(deepcopy(dict(numbers)) | run.views)

    def _view(self, unit: ArenaUnit | None, run: SliceRun, flat: torch.Tensor) -> torch.Tensor:
        if unit is None:
            return flat.new_zeros(1)
        return flat[slice(*self.arena.layout.share_of(unit))][run.place]

    def follow(self, used: Collection[int]) -> None:
        """Have these parameters, of all, take part in the step that begins."""
        every = list(dict.fromkeys(self._kin.values()))
        for kin in every:
            kin.is_used = any(number in used for number in kin.params)
        if not all(kin.params.issubset(used) for kin in every if kin.is_used):
            parts = [kin.params.intersection(used) for kin in every]
            parts += [kin.params.difference(used) for kin in every]
            self.have((part, *self.state_of(next(iter(part)))) for part in parts if part)
            self.follow(used)

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

    def ready(self, parcel: Parcel | None) -> tuple[list[SliceRun], torch.Tensor]:
        """Return what is to be updated of a parcel, with weights and gradients; and the latter.

        Without a parcel, what this rank has no element of and keeps the numbers of.
        """
        runs = [run for run in self._runs[_unit(parcel)] if run.kin.is_used]
        if parcel is not None:
            self.adopt(parcel)
            weights, grads = self.weights_of(parcel), self.grads_of(parcel)
        elif runs:
            weights = grads = self.arena.data.new_zeros(1, dtype=self.dtype)
        else:
            grads = self.reduced
        for run in runs:
            run.take(weights[run.place], grads[run.place])
        return runs, grads

    def put_all(self, parcel: Parcel | None, runs: Sequence[SliceRun]) -> None:
        """Put states that a step has made, and weights, where they belong."""
        unit = _unit(parcel)
        for run in runs:
            run.param.grad = None
            for name, value in run.state.items():
                is_known = value is run.views.get(name) or name in self.rule.numbers
                if is_known or not is_of_elements(value, run.param.shape):
                    continue
                with self._lock:
                    if name not in self.states:
                        self.states[name] = self.arena.share(value.dtype)
                run.views[name] = self._view(unit, run, self.states[name]).copy_(value)
                run.state[name] = run.views[name]
        if runs and parcel is not None and not self.rule.has_norms:
            self.put(parcel)  # what is not gathered stays as others have it

    def update(self, parcel: Parcel | None, options: Options) -> torch.Tensor:
        """Update my slice of a parcel, or else the numbers of what this rank has nothing of.

        Returns what became of the gradients, which a rule with norms has not gone along yet.
        """
        runs, grads = self.ready(parcel)
        if runs:
            self._steppers[_unit(parcel)].step(options, {self.group: runs})
            self.put_all(parcel, runs)
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


def _unit(parcel: Parcel | None) -> ArenaUnit | None:
    return None if parcel is None else parcel.unit
