"""One rank's share of an arena: optimizer state and sums of gradients in 1/W of the memory.

What lies side by side in one unit and is cohort is updated in one go; see `slices`. Parameters that
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
from penstock.step.attached.flow import FlowBucket
from penstock.step.attached.slices import Options, SliceRun, StepCohort, Stepper

__all__ = ["Share"]

Had = tuple[Collection[str], Mapping[str, Any]]
"""States of a cohort: names of those with elements, and those that are one number."""


class Share:
    """This rank's slices of one arena, with optimizer state and sums of gradients."""

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
        """The type that weights are rounded to when they are sent."""
        self.states: dict[str, torch.Tensor] = {}
        """States with an element for each weight. Made by the first step, on all ranks."""
        self._rank = rank
        self._make_stepper: Callable[[], Stepper] = lambda: joint or Stepper(optimizer, rule)
        self._runs: dict[ArenaUnit | None, list[SliceRun]] = {}
        """By unit; under None, those of cohorts of which this rank has no element."""
        self._steppers: dict[ArenaUnit | None, Stepper] = {}
        self._cohorts: dict[int, StepCohort] = {}
        """The cohort of each parameter, by number."""
        self._lock = threading.Lock()
        """Guards `states`: threads of lanes update several buckets at a time."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of states and of the weights that are updated."""
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

    def adopt(self, bucket: FlowBucket) -> None:
        """Take weights over that someone has changed where they are used, rounded ones."""
        if self.masters is None:
            return
        exact, mine = self.masters[bucket.share], bucket.mine
        rounded = exact.to(mine.dtype)
        sent = rounded if self.rounding is None else rounded.to(self.rounding).to(mine.dtype)
        if mine.device.type == "cpu" and torch.equal(mine, sent):
            return  # a GPU is not asked
        is_changed = (mine != sent) & (mine != rounded)
        exact.copy_(torch.where(is_changed, mine.to(exact.dtype), exact))

    # -- states ------------------------------------------------------------------------------

    def state_of(self, number: int) -> tuple[list[str], dict[str, Any]]:
        """Return which of `states` a parameter has, and copies of those that are one number."""
        (run, *_) = self._cohorts[number].runs
        return sorted(run.views), run.numbers()

    def zeros_of(self, name: str) -> torch.Tensor:
        """Return room for a state that no parameter has yet."""
        return self.arena.share(self.rule.elements.get(name) or self.dtype)

    def have(self, every: Iterable[tuple[Collection[int], *Had]]) -> None:
        """Set the cohorts: numbers of parameters, names in `states`, and one-number states."""
        layout = self.arena.layout
        had = {StepCohort(params): (names, numbers) for params, names, numbers in every}
        for run in (run for runs in self._runs.values() for run in runs):
            run.forget()
        self._runs = {unit: [] for unit in (None, *layout.units)}
        self._steppers = {unit: self._make_stepper() for unit in self._runs}
        self._cohorts = {number: cohort for cohort in had for number in cohort.params}
        for unit in layout.units:
            start, _ = layout.slice_of(unit, self._rank)
            segments = layout.segments(unit, self._rank)
            by_kin = groupby(segments, lambda each: self._cohorts[self.params[each.param]])
            for cohort, found in by_kin:
                mine = list(found)
                self._run(
                    unit, cohort, slice(mine[0].start - start, mine[-1].stop - start), had[cohort]
                )
        for cohort, states in had.items():
            if not cohort.runs:
                self._run(None, cohort, slice(0, 1), states)

    def _run(
        self,
        unit: ArenaUnit | None,
        cohort: StepCohort,
        place: slice,
        had: Had,
    ) -> None:
        empty = self.arena.data.new_empty(0, dtype=self.dtype)
        run = SliceRun(cohort, place, self._steppers[unit], empty)
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
        """Choose the parameters that take part in the step that begins."""
        every = list(dict.fromkeys(self._cohorts.values()))
        for cohort in every:
            cohort.is_used = any(number in used for number in cohort.params)
        if not all(cohort.params.issubset(used) for cohort in every if cohort.is_used):
            parts = [cohort.params.intersection(used) for cohort in every]
            parts += [cohort.params.difference(used) for cohort in every]
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

    def ready(self, bucket: FlowBucket | None) -> tuple[list[SliceRun], torch.Tensor]:
        """Return what is to be updated of a bucket, with weights and gradients; and the latter.

        Without a bucket, what this rank has no element of and keeps the numbers of.
        """
        runs = [run for run in self._runs[_unit(bucket)] if run.cohort.is_used]
        if bucket is not None:
            self.adopt(bucket)
            weights, grads = self.weights_of(bucket), self.grads_of(bucket)
        elif runs:
            weights = grads = self.arena.data.new_zeros(1, dtype=self.dtype)
        else:
            grads = self.reduced
        for run in runs:
            run.take(weights[run.place], grads[run.place])
        return runs, grads

    def put_all(self, bucket: FlowBucket | None, runs: Sequence[SliceRun]) -> None:
        """Put states that a step has made, and weights, where they belong."""
        unit = _unit(bucket)
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
        if runs and bucket is not None and not self.rule.has_norms:
            self.put(bucket)  # what is not gathered stays as others have it

    def update(self, bucket: FlowBucket | None, options: Options) -> torch.Tensor:
        """Update this rank's slice of a bucket; without one, the numbers of absent cohorts.

        Returns what became of the gradients, which a rule with norms has not gone along yet.
        """
        runs, grads = self.ready(bucket)
        if runs:
            self._steppers[_unit(bucket)].step(options, {self.group: runs})
            self.put_all(bucket, runs)
        return grads

    def put(self, bucket: FlowBucket) -> None:
        """Put weights where they are gathered from."""
        if self.masters is not None:
            bucket.mine.copy_(self.masters[bucket.share])

    def weights_of(self, bucket: FlowBucket) -> torch.Tensor:
        """Return the weights of my slice that are updated."""
        return bucket.mine if self.masters is None else self.masters[bucket.share]

    def grads_of(self, bucket: FlowBucket) -> torch.Tensor:
        """Return the sums of my slice in the type of the weights."""
        return bucket.reduced.to(self.dtype)


def _unit(bucket: FlowBucket | None) -> ArenaUnit | None:
    return None if bucket is None else bucket.unit
