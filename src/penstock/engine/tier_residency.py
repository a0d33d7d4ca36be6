"""Tiers whose units come and go, as the windows of an importance order ask for it.

`flow.residency` decides which units are kept. This module carries out its decisions, step by step
and in the order of planning: an admitted unit gets a place in a tier, and the first batch that uses
it fetches it. An evicted unit loses its place at once, so that later batches do not count on it.
Its bytes are dropped when the batches that were planned before are over.

All ranks of a node go through the same string of uses, each at its own pace and with what it knows
when it plans, so they may decide differently. If one drops a unit that another still wants to read,
the other finds it gone and reads the store: slower, never wrong.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from penstock.dataset.part import Ints
from penstock.engine.job import SampleGroup
from penstock.engine.local_tiers import LocalTiers
from penstock.engine.stream import BatchStream
from penstock.flow.layout.placement import paged
from penstock.flow.residency import Gaps, Residency
from penstock.order.importance import WindowDraws
from penstock.storage.tier_places import NOWHERE

_PARTS = 4
"""A window is decided in this many parts: the next window may be known by the later ones."""
_STEPS_LATER = 2
"""Batches between the last use of a unit and its drop: other ranks of the node may be behind."""
_SLACK_SHARE = 10
"""At most one part in this many of the capacity is for units that come before others have gone."""


@dataclass(frozen=True, slots=True)
class _StepPlan:
    used: Ints
    admitted: Ints
    evicted: Ints


class TierResidency:
    """The units that the tiers of a node keep while a run goes on."""

    def __init__(
        self,
        stream: BatchStream,
        start: tuple[int, int],
        local_tiers: LocalTiers,
        look_ahead_bytes: int,
    ) -> None:
        assert stream.course is not None
        self._stream, self._course, self._local_tiers = stream, stream.course, local_tiers
        lengths = local_tiers.layout.lengths
        assert isinstance(lengths, np.ndarray)
        self._lengths = paged(lengths)
        self._room = [tier.capacity_bytes for tier in local_tiers.tiers.tiers]
        capacity_bytes = sum(self._room)
        slack_bytes = min(capacity_bytes // _SLACK_SHARE, look_ahead_bytes)
        self._residency = Residency(self._lengths, capacity_bytes - slack_bytes)
        self._hits = local_tiers.hits
        self._steps = _RunSteps(stream, *start)
        self._plans: deque[_StepPlan] = deque()
        self._leaving: Ints = np.empty(0, np.int64)
        self._drops: deque[tuple[int, Ints]] = deque()
        """Units to drop, each with the last batch here that needs them."""
        self._num_taken = 0
        self.is_coming: Callable[[int], bool] = lambda unit: False
        """Whether a unit is being fetched for an earlier batch."""
        self._gaps_of: WindowDraws | None = None
        self._known_gaps: Gaps = np.empty(0)
        self._unit_ids: tuple[Ints, Ints] | None = None
        self._step_units: dict[tuple[int, int], Ints] = {}
        """Units of the steps that are known and not decided, by epoch and first position."""
        self._hold_what_is_there()

    def _hold_what_is_there(self) -> None:
        """Keep the units that an earlier iteration or run has left in the tiers."""
        local_tiers, residency = self._local_tiers, self._residency
        units = np.arange(len(self._lengths))
        local_tiers.keeps[:] = False
        local_tiers.tiers.keep(units, NOWHERE)
        for number, tier in enumerate(local_tiers.tiers.tiers):
            here = units[tier.present(units) & ~local_tiers.keeps]
            local_tiers.tiers.keep(here, number)
            kept = here[residency.hold(here)]
            local_tiers.keeps[kept] = True
            self._room[number] -= int(self._lengths[kept].sum())
            self._drops.append((-_STEPS_LATER - 1, here[~local_tiers.keeps[here]]))

    # -- carrying out ------------------------------------------------------------------------

    def begin(self, groups: list[SampleGroup]) -> None:
        """Give places to the units that a batch admits."""
        self._drop_due()
        if not self._plans:
            self._decide()
        plan = self._plans.popleft()
        self._hits.begin_step(plan.used, lambda: np.flatnonzero(self._local_tiers.keeps))
        for group in groups:
            for table in self._local_tiers.places(group):
                self._count(table.units)
        for unit in plan.admitted.tolist():
            self._admit(unit)
        self._leaving = plan.evicted

    def _count(self, units: Ints) -> None:
        tiers, keeps = self._local_tiers.tiers, self._local_tiers.keeps
        is_hit = keeps[units] & tiers.held(units)
        for place in np.flatnonzero(keeps[units] & ~is_hit).tolist():
            is_hit[place] = self.is_coming(int(units[place]))
        self._hits.count(self._lengths[units], is_hit)

    def _admit(self, unit: int) -> None:
        """Give a unit a place in the fastest tier that has room."""
        local_tiers, length = self._local_tiers, int(self._lengths[unit])
        where = local_tiers.tiers.tier_of_one(unit)
        if where == NOWHERE:
            fits = [number for number, room in enumerate(self._room) if length <= room]
            if not fits:
                self._residency.forget(unit)
                return
            where = fits[0]
            local_tiers.tiers.keep(np.array([unit]), where)
        self._room[where] -= length
        local_tiers.keeps[unit] = True

    def end(self, number: int) -> None:
        """Take the places of evicted units, now that the batch itself is planned."""
        local_tiers = self._local_tiers
        units = self._leaving[local_tiers.keeps[self._leaving]]
        tier_of = local_tiers.tiers.tier_of(units)
        for tier in range(len(self._room)):
            self._room[tier] += int(self._lengths[units[tier_of == tier]].sum())
        local_tiers.keeps[units] = False
        self._hits.num_evicted += len(units)
        if len(units):
            self._drops.append((number, units))

    def taken(self, number: int) -> None:
        """Record that the training loop has a batch."""
        self._num_taken = number + 1

    def _drop_due(self) -> None:
        local_tiers = self._local_tiers
        while self._drops and self._drops[0][0] + _STEPS_LATER < self._num_taken:
            number, units = self._drops.popleft()
            units = units[~local_tiers.keeps[units]]  # Some may have been admitted again.
            busy = [unit for unit in units.tolist() if not local_tiers.tiers.drop(unit)]
            if busy:
                self._drops.append((number + _STEPS_LATER, np.array(busy)))

    # -- deciding ----------------------------------------------------------------------------

    def _decide(self) -> None:
        """Decide about the next steps, with everything that is known now."""
        order = self._course.order
        window = order.num_samples // order.num_windows
        num_steps = max(1, window // (_PARTS * self._stream.global_batch_size))
        parts = [self._taken_units()]
        while len(parts) < num_steps and self._course.is_known(*self._steps.end):
            parts.append(self._taken_units())
        used = np.concatenate(parts)
        found = self._residency.window(used, self._future(), self._gaps())
        ends = np.cumsum([len(units) for units in parts])
        first = 0
        for stop in ends.tolist():
            is_here = (found.evicted_at >= first) & (found.evicted_at < stop)
            came = np.flatnonzero(found.is_admitted[first:stop]) + first
            admitted = dict(zip(used[came].tolist(), came.tolist(), strict=True))
            left = zip(found.evicted[is_here].tolist(), found.evicted_at[is_here], strict=True)
            # A unit that is evicted and admitted again in the same step stays.
            evicted = [unit for unit, at in left if admitted.get(unit, -1) <= at]
            came_and_left = [np.array(list(u), np.int64) for u in (admitted, set(evicted))]
            self._plans.append(_StepPlan(used[first:stop], *came_and_left))
            first = stop

    def _taken_units(self) -> Ints:
        """Return the units of the next step, and advance."""
        epoch, first, stop = self._steps.next()
        units = self._units(epoch, first, stop)
        del self._step_units[epoch, first]
        return units

    def _future(self) -> Ints:
        """Return the units of this node in all later steps that are known."""
        steps = self._steps.copy()
        parts = [np.empty(0, np.int64)]
        while self._course.is_known(*steps.end):
            parts.append(self._units(*steps.next()))
        return np.concatenate(parts)

    def _units(self, epoch: int, first: int, stop: int) -> Ints:
        """Return the units that this node uses in a step, in the order of use."""
        known = self._step_units.get((epoch, first))
        if known is not None:
            return known
        steps, world = self._stream.steps(), self._stream.world
        low, _ = steps.share(world.rank - world.local_rank)
        _, high = steps.share(world.rank - world.local_rank + world.num_local_ranks - 1)
        begin, end = min(stop, first + low), min(stop, first + high)
        units = self._units_of(self._course.ids(epoch, begin, end))
        self._step_units[epoch, first] = units
        return units

    def _units_of(self, ids: Ints) -> Ints:
        places, units = [], []
        for bound, where, local_ids in self._stream.dataset.groups(ids):
            group = SampleGroup(bound=bound, where=where, local_ids=local_ids)
            for table in self._local_tiers.places(group):
                places.append(where)
                units.append(table.units)
        order = np.argsort(np.concatenate([np.empty(0, np.int64), *places]), kind="stable")
        found: Ints = np.concatenate([np.empty(0, np.int64), *units])[order]
        return found

    def _gaps(self) -> Gaps:
        """Return the expected number of uses until each unit comes again."""
        draws = self._course.draws(self._course.known_windows[-1])
        if draws is not self._gaps_of:
            self._gaps_of = draws
            num_ids = self._course.order.num_ids
            chances = np.full(num_ids, 1 / num_ids)
            if draws.chances is not None:
                chances = draws.chances.points / draws.chances.total
            if self._unit_ids is None:
                self._unit_ids = self._ids_of_units()
            ids, units = self._unit_ids
            of_unit = np.bincount(units, chances[ids], minlength=len(self._lengths))
            a_sample = len(units) / num_ids
            self._known_gaps = a_sample / np.maximum(of_unit, 1e-300)
        return self._known_gaps

    def _ids_of_units(self) -> tuple[Ints, Ints]:
        """Return pairs of samples and units, as two arrays."""
        ids, units = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for bound, where, local_ids in self._stream.dataset.groups(
            np.arange(self._course.order.num_ids)
        ):
            group = SampleGroup(bound=bound, where=where, local_ids=local_ids)
            for table in self._local_tiers.places(group):
                ids.append(where)
                units.append(table.units)
        return np.concatenate(ids), np.concatenate(units)


class _RunSteps:
    """The steps of a run, one after the other."""

    def __init__(self, stream: BatchStream, epoch: int, position: int) -> None:
        self._stream, self._epoch, self._position = stream, epoch, position
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        """Go on to the next epoch where no batch is left in this one."""
        left = self._stream.order.num_samples - self._position
        if left == 0 or (self._stream.drop_last and left < self._size):
            self._epoch, self._position = self._epoch + 1, 0

    @property
    def end(self) -> tuple[int, int]:
        """Epoch of the next step, and the position behind it."""
        return self._epoch, min(self._position + self._size, self._stream.order.num_samples)

    @property
    def _size(self) -> int:
        return self._stream.global_batch_size

    def next(self) -> tuple[int, int, int]:
        """Return epoch, first position and end of the next step."""
        epoch, first, (_, stop) = self._epoch, self._position, self.end
        self._position = stop
        self._begin_epoch()
        return epoch, first, stop

    def copy(self) -> _RunSteps:
        """Return the same steps, which advance independently."""
        return _RunSteps(self._stream, self._epoch, self._position)
