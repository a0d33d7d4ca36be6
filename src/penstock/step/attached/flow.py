"""The way of gradients and weights between the ranks: reduced, updated, gathered, unit by unit.

    hook of a parameter ──► scatter lane ──► update of my slice ──► gather lane ──► forward
       (backward)            in the order        (after step())       in the order     waits
                             of readiness                             of first use

What goes over a lane goes in one order that all ranks have agreed on; a unit whose turn has not
come waits, and so do those behind it. Lanes have nothing to do with each other's order. Every
operation of a step is begun by every rank at the latest in its `step()`, whatever its backward did,
and waits for nothing but earlier operations of this step. So there is no circle, whoever is fast or
slow.

Reduce-scatters go in the order in which gradients appear, and not by priority as gathers do. The
bytes are the same, and the wire has work all the time from the first gradient to the last gather;
to finish early layers sooner would only help if the forward of a model took longer than all
gathers, and then so would its backward, and no reduce-scatter would be left to wait for.

Whoever finds that a unit can go on takes it on: the thread that runs backward issues what has
become ready, the thread that completes a lane updates what it has reduced. No thread is there for
order's sake, and none waits for a lane that it has to complete. Whoever begins an operation may
have to wait until the lane has room for it, so it holds no lock that the lane's thread needs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from penstock.step.attached.arenas import Arena, ArenaUnit, Segment
from penstock.step.comms.comm import Comm, Handle

__all__ = ["Flow", "Lanes", "Parcel"]

_LOOK_S = 0.25
"""How often one who waits looks whether what he waits for has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """Comms of one axis, each with an order of its own."""

    scatter: Comm
    gather: Comm
    word: Comm
    """For a few numbers, which must not queue behind weights."""


class Parcel:
    """A unit and how far it is."""

    def __init__(
        self,
        arena: Arena,
        unit: ArenaUnit,
        *,
        rank: int,
        reduced: torch.Tensor,
        params: Sequence[int],
    ) -> None:
        layout = arena.layout
        start, stop = layout.slice_of(unit, rank)
        low, high = layout.share_of(unit)
        self.arena, self.unit = arena, unit
        self.params = tuple(params)
        """Their numbers among all that are attached."""
        self.grads = arena.grads[unit.start : unit.stop]
        self.reduced = reduced[low:high]
        self.whole = arena.data[unit.start : unit.stop]
        self.mine = arena.data[start:stop]
        self.share = slice(low, high)
        numbers = dict(zip(unit.params, params, strict=True))
        self.segments = [
            Segment(numbers[each.param], each.start - start, each.stop - start)
            for each in layout.segments(unit, rank)
        ]
        """What lies in my slice, by numbers of parameters, from the slice's start."""
        self.places = {
            numbers[index]: (
                max(unit.start, layout.starts[index]) - unit.start,
                min(unit.stop, layout.starts[index] + layout.lengths[index]) - unit.start,
            )
            for index in unit.params
        }
        """Where each parameter lies, from the unit's start."""
        self.scattered: Handle | None = None
        self.gathered: Handle | None = None
        self.settled = threading.Event()
        self.settle()

    def settle(self) -> None:
        """Be as after a step: weights are there, gradients are to come."""
        self.missing = set(self.params)
        self.is_issued = self.is_reduced = self.is_taken = self.is_updated = False
        self.settled.set()


class Flow:
    """All parcels of a model; what is done to them, by whoever."""

    def __init__(
        self,
        parcels: Sequence[Parcel],
        scatter_order: Sequence[int],
        lanes: Lanes,
        *,
        num_params: int,
        wire: str | None,
    ) -> None:
        self.parcels = list(parcels)
        """In the order of gathers."""
        self._scatters = [self.parcels[number] for number in scatter_order]
        self._lanes = lanes
        self._wire = wire
        self.of_param: list[list[Parcel]] = [[] for _ in range(num_params)]
        for parcel in parcels:
            for param in parcel.params:
                self.of_param[param].append(parcel)
        self._lock = threading.Lock()
        """Of what is known of parcels."""
        self._scatter_turn, self._gather_turn = threading.Lock(), threading.Lock()
        """Of the orders of lanes; threads of lanes take the first one never."""
        self._next_scatter = 0
        self._next_gather = 0
        self._update: Callable[[Parcel], None] | None = None
        self._skipped: set[int] = set()
        self.dirty: set[int] = set()
        """Parameters whose gradients have changed after they were sent."""
        self._error: BaseException | None = None

    # -- backward ----------------------------------------------------------------------------

    def hold(self, param: int) -> None:
        """Return when nothing reads a parameter's gradient any more, so that it may change."""
        for parcel in self.of_param[param]:
            if parcel.is_issued and parcel.settled.is_set():
                assert parcel.scattered is not None
                parcel.scattered.wait()
            else:
                self.wait((parcel,))

    def filled(self, param: int) -> None:
        """Say that a gradient lies in the arena; send what is complete and has its turn."""
        for parcel in self.of_param[param]:
            if parcel.is_issued:
                self.dirty.add(param)
            parcel.missing.discard(param)
        self._pump_scatters()

    def _pump_scatters(self) -> None:
        issued = []
        with self._scatter_turn:
            while self._next_scatter < len(self._scatters):
                parcel = self._scatters[self._next_scatter]
                # Settled comes last: what is known of others may be of the step before.
                if not parcel.settled.is_set() or parcel.missing or parcel.is_issued:
                    break
                self._next_scatter += 1
                issued.append(self._scatter(parcel))
        self._follow(issued)

    def _scatter(self, parcel: Parcel) -> Parcel:
        parcel.is_issued = True
        parcel.scattered = self._lanes.scatter.reduce_scatter(
            parcel.reduced, parcel.grads, op="mean", wire=self._wire
        )
        return parcel

    def _follow(self, issued: Iterable[Parcel]) -> None:
        """Have what was issued go on when it is done. Not under the lock: it may be done now."""
        for parcel in issued:
            assert parcel.scattered is not None
            parcel.scattered.then(partial(self._guarded, parcel, parcel.scattered))

    # -- step --------------------------------------------------------------------------------

    def send_all(self) -> None:
        """Send what is left of this step, in its order; unused gradients are zeros by now."""
        for parcel in self.parcels:
            parcel.missing.clear()
        self._pump_scatters()
        assert self._next_scatter == len(self._scatters)

    def send_again(self, params: set[int]) -> None:
        """Send the units of some parameters a second time: their gradients have changed."""
        again = [parcel for parcel in self._scatters if params.intersection(parcel.params)]
        self.wait_reduced(again)
        with self._scatter_turn:
            for parcel in again:
                parcel.is_reduced = False
                self._scatter(parcel)
        self._follow(again)

    def wait_reduced(self, parcels: Sequence[Parcel]) -> None:
        """Return when the sums of some parcels are there."""
        for parcel in parcels:
            assert parcel.scattered is not None
            parcel.scattered.wait()

    def go(self, update: Callable[[Parcel], None], skipped: set[int]) -> None:
        """Update each parcel as soon as it is reduced, and gather it when its turn comes.

        Those reduced already are updated here. `skipped` parameters stay as they are; a parcel
        with no others is not gathered.
        """
        with self._lock:
            self._next_scatter = self._next_gather = 0
            self._update, self._skipped = update, skipped
            self.dirty.clear()
            for parcel in self.parcels:
                parcel.gathered = None
                parcel.settled.clear()
        for parcel in self.parcels:
            self._take(parcel)

    def _reduced(self, parcel: Parcel) -> None:
        parcel.is_reduced = True
        if self._update is not None and not parcel.settled.is_set():
            self._take(parcel)

    def _take(self, parcel: Parcel) -> None:
        with self._lock:
            if parcel.is_taken or not parcel.is_reduced:
                return
            parcel.is_taken = True
        assert self._update is not None
        self._update(parcel)
        parcel.is_updated = True
        self._go_on_from(parcel)

    def _go_on_from(self, parcel: Parcel) -> None:
        """Begin what follows an update."""
        self._pump_gathers()

    def _pump_gathers(self) -> None:
        issued = []
        with self._gather_turn:
            while self._next_gather < len(self.parcels):
                parcel = self.parcels[self._next_gather]
                if not parcel.is_updated:
                    break
                self._next_gather += 1
                if not self._skipped.issuperset(parcel.params):
                    parcel.gathered = self._lanes.gather.all_gather(
                        parcel.whole, parcel.mine, wire=self._wire
                    )
                issued.append(parcel)
        for parcel in issued:
            if parcel.gathered is None:
                self._settle(parcel)
            else:
                parcel.gathered.then(partial(self._settle, parcel))

    def _settle(self, parcel: Parcel) -> None:
        with self._lock:
            parcel.settle()

    # -- forward -----------------------------------------------------------------------------

    def wait(self, parcels: Iterable[Parcel]) -> None:
        """Return when the weights of some parcels are there, or raise what went wrong."""
        for parcel in parcels:
            # Asked first without its lock: between steps every module comes here.
            while not (parcel.settled.is_set() or parcel.settled.wait(_LOOK_S)):
                self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        for parcel in self.parcels:
            for handle in (parcel.scattered, parcel.gathered):
                if handle is not None and handle.is_done():
                    handle.wait()

    def _guarded(self, parcel: Parcel, scattered: Handle) -> None:
        """Go on with a parcel on the lane's thread; who waits for it is told of what fails."""
        try:
            if parcel.scattered is scattered:  # and not sent again since
                self._reduced(parcel)
        except BaseException as error:
            self._error = self._error or error
            raise
