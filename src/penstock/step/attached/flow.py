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

The thread that finds a unit ready takes it on: the thread of backward begins reduce-scatters, and
the completion thread of a lane updates what it has reduced. There is no scheduling thread, and no
thread waits for a lane that it has to complete itself. A thread that begins an operation may have
to wait until the lane has room for it, so it holds no lock that the completion thread needs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from penstock.step.attached.arenas import Arena, ArenaUnit, Segment
from penstock.step.comms.comm import Comm, Handle

__all__ = ["FlowBucket", "BucketFlow", "FlowPlan", "Lanes"]

_LOOK_S = 0.25
"""How often a waiting thread looks for errors of other threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """Comms of one axis, each with an order of its own."""

    scatter: Comm
    gather: Comm
    control: Comm
    """For a few numbers, which must not queue behind weights."""


class FlowBucket:
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
        self.my_grads = arena.grads[start:stop]
        self.reduced = reduced[low:high]
        self.whole = arena.data[unit.start : unit.stop]
        self.mine = arena.data[start:stop]
        self.share = slice(low, high)
        numbers = dict(zip(unit.params, params, strict=True))
        self.segments = [
            Segment(numbers[each.param], each.start - start, each.stop - start)
            for each in layout.segments(unit, rank)
        ]
        """Parts of parameters in this rank's slice, by number, from the slice's start."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowPlan:
    """What goes over which lanes, and in which order."""

    buckets: Sequence[FlowBucket]
    """In the order of gathers."""
    scatter_order: Sequence[int]
    """Numbers of buckets, in the order in which backward completes them."""
    lanes: Lanes
    num_params: int
    wire: str | None


class BucketFlow:
    """All buckets of a model, and how far each one is. Several threads move them on."""

    def __init__(self, plan: FlowPlan) -> None:
        self.buckets = list(plan.buckets)
        self._scatters = [self.buckets[number] for number in plan.scatter_order]
        self._lanes, self._wire = plan.lanes, plan.wire
        self.of_param: list[list[FlowBucket]] = [[] for _ in range(plan.num_params)]
        for bucket in self.buckets:
            for param in bucket.params:
                self.of_param[param].append(bucket)
        self._lock = threading.Lock()
        """Guards the state of every bucket. Held briefly, and never while a lane is asked."""
        self._scatter_turn, self._gather_turn = threading.Lock(), threading.Lock()
        """Keep the orders of the two lanes: the holder begins operations in turn.

        A lane's completion thread must never take `_scatter_turn`: who holds it may wait until the
        lane has room for one more operation, which that thread has to make."""
        self._next_scatter = 0
        self._next_gather = 0
        self._update: Callable[[FlowBucket], None] | None = None
        self._skipped: set[int] = set()
        self.dirty: set[int] = set()
        """Parameters whose gradients have changed after they were sent."""
        self._error: BaseException | None = None

    # -- backward ----------------------------------------------------------------------------

    def hold(self, param: int) -> None:
        """Return when nothing reads a parameter's gradient any more, so that it may change."""
        for bucket in self.of_param[param]:
            if bucket.is_issued and bucket.settled.is_set():
                assert bucket.scattered is not None
                bucket.scattered.wait()
            else:
                self.wait((bucket,))

    def filled(self, param: int) -> None:
        """Say that a gradient lies in the arena; send what is complete and has its turn."""
        for bucket in self.of_param[param]:
            if bucket.is_issued:
                self.dirty.add(param)
            bucket.missing.discard(param)
        self._pump_scatters()

    def _pump_scatters(self) -> None:
        issued = []
        with self._scatter_turn:
            while self._next_scatter < len(self._scatters):
                bucket = self._scatters[self._next_scatter]
                # A bucket settles last of all; before that, its flags are those of the last step.
                if not bucket.settled.is_set() or bucket.missing or bucket.is_issued:
                    break
                self._next_scatter += 1
                issued.append(self._scatter(bucket))
        self._follow(issued)

    def _scatter(self, bucket: FlowBucket) -> FlowBucket:
        bucket.is_issued = True
        bucket.scattered = self._lanes.scatter.reduce_scatter(
            bucket.reduced, bucket.grads, op="mean", wire=self._wire
        )
        return bucket

    def _follow(self, issued: Iterable[FlowBucket]) -> None:
        """Go on with buckets when they are reduced. Not under a lock: it may happen at once."""
        for bucket in issued:
            assert bucket.scattered is not None
            bucket.scattered.then(partial(self._guarded, bucket, bucket.scattered))

    # -- step --------------------------------------------------------------------------------

    @contextmanager
    def updating(self, *read_after: torch.Tensor) -> Iterator[None]:
        """Do in this block what comes between sums and gathers; tensors are read after it."""
        yield

    def send_all(self) -> None:
        """Send what is left of this step, in its order; unused gradients are zeros by now."""
        for bucket in self.buckets:
            bucket.missing.clear()
        self._pump_scatters()
        assert self._next_scatter == len(self._scatters)

    def send_again(self, params: set[int]) -> None:
        """Send the units of some parameters a second time: their gradients have changed."""
        again = [bucket for bucket in self._scatters if params.intersection(bucket.params)]
        self.wait_reduced(again)
        with self._scatter_turn:
            for bucket in again:
                bucket.is_reduced = False
                self._scatter(bucket)
        self._follow(again)

    def wait_reduced(self, buckets: Sequence[FlowBucket]) -> None:
        """Return when the sums of some buckets are there."""
        for bucket in buckets:
            assert bucket.scattered is not None
            bucket.scattered.wait()

    def gather_means(self) -> None:
        """Put the means of all ranks where their gradients lie."""
        self.wait_reduced(self.buckets)  # so no rank reads the gradients of another any more
        for bucket in self.buckets:
            bucket.my_grads.copy_(bucket.reduced)
        lane = self._lanes.gather
        for handle in [lane.all_gather(each.grads, each.my_grads) for each in self.buckets]:
            handle.wait()

    def take_means(self) -> None:
        """Take means over from where gradients lie: users may have changed them there."""
        for bucket in self.buckets:
            bucket.reduced.copy_(bucket.my_grads)

    def go(self, update: Callable[[FlowBucket], None], skipped: set[int]) -> None:
        """Update each bucket as soon as it is reduced, and gather it when its turn comes.

        Those reduced already are updated here. `skipped` parameters stay as they are; a bucket
        with no others is not gathered.
        """
        with self._lock:
            self._next_scatter = self._next_gather = 0
            self._update, self._skipped = update, skipped
            self.dirty.clear()
            for bucket in self.buckets:
                bucket.gathered = None
                bucket.settled.clear()
        for bucket in self.buckets:
            self._take(bucket)

    def _reduced(self, bucket: FlowBucket) -> None:
        bucket.is_reduced = True
        if self._update is not None and not bucket.settled.is_set():
            self._take(bucket)

    def _take(self, bucket: FlowBucket) -> None:
        with self._lock:
            if bucket.is_taken or not bucket.is_reduced:
                return
            bucket.is_taken = True
        assert self._update is not None
        self._update(bucket)
        bucket.is_updated = True
        self._go_on_from(bucket)

    def _go_on_from(self, bucket: FlowBucket) -> None:
        """Begin what follows an update."""
        self._pump_gathers()

    def _pump_gathers(self) -> None:
        issued = []
        with self._gather_turn:
            while self._next_gather < len(self.buckets):
                bucket = self.buckets[self._next_gather]
                if not bucket.is_updated:
                    break
                self._next_gather += 1
                if not self._skipped.issuperset(bucket.params):
                    bucket.gathered = self._lanes.gather.all_gather(
                        bucket.whole, bucket.mine, wire=self._wire
                    )
                issued.append(bucket)
        for bucket in issued:
            if bucket.gathered is None:
                self._settle(bucket)
            else:
                bucket.gathered.then(partial(self._settle, bucket))

    def _settle(self, bucket: FlowBucket) -> None:
        with self._lock:
            bucket.settle()

    # -- forward -----------------------------------------------------------------------------

    def wait(self, buckets: Iterable[FlowBucket]) -> None:
        """Return when the weights of some buckets are there, or raise what went wrong."""
        for bucket in buckets:
            # Asked first without its lock: between steps every module comes here.
            while not (bucket.settled.is_set() or bucket.settled.wait(_LOOK_S)):
                self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        for bucket in self.buckets:
            for handle in (bucket.scattered, bucket.gathered):
                if handle is not None and handle.is_done():
                    handle.wait()

    def _guarded(self, bucket: FlowBucket, scattered: Handle) -> None:
        """Go on with a bucket on the lane's thread; an error is raised by whoever waits for it."""
        try:
            if bucket.scattered is scattered:  # and not sent again since
                self._reduced(bucket)
        except BaseException as error:
            self._error = self._error or error
            raise
