"""The way of gradients and weights on a GPU: order by streams and events, and no host waits.

    stream of backward ──► scatter lane ──► stream of updates ──► gather lane ──► stream of forward
         event per operation     event           event per parcel      event       waits for events

It is the flow of `flow`, with other means: what is "done" there has been asked of the device
here, and who has to wait lets its stream wait. A host may be a whole step ahead of its device.
Where ranks meet by their hosts (`peer`), a host waits for the other hosts, not for a kernel.

What must not be overwritten is kept by the same events. Before a gradient changes, the stream that
changes it waits for the reduce-scatter that reads it. Before sums are written again, the
reduce-scatter waits for the update that reads them. Updates wait for the stream that is current
where `step` is called, so all that backward reads has been read.

Updates go in the order of reduce-scatters, so each can begin when its sums are there; gathers go in
the order of first use, each as soon as all before it have been asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from penstock.step.attached.flow import Flow, Lanes, Parcel
from penstock.step.streams import current_stream

__all__ = ["StreamFlow"]


class StreamFlow(Flow):
    """All parcels of a model on one GPU. Used by one thread at a time, as autograd does."""

    def __init__(
        self,
        parcels: Sequence[Parcel],
        scatter_order: Sequence[int],
        lanes: Lanes,
        *,
        num_params: int,
        wire: str | None,
    ) -> None:
        super().__init__(parcels, scatter_order, lanes, num_params=num_params, wire=wire)
        self._device = self.parcels[0].whole.device
        self._updating = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._order = [self.parcels[number] for number in scatter_order]
        self._num_sent = self._num_gathered = 0
        self._writers: dict[Parcel, set[torch.cuda.Stream]] = {p: set() for p in parcels}
        """Streams that have put gradients into a parcel that is not sent yet."""
        self._updated: dict[Parcel, torch.cuda.Event] = {}
        self._has_waited: dict[torch.cuda.Stream, set[Parcel]] = {}
        """What streams have waited for since the last step."""
        self._end: torch.cuda.Event | None = None

    # -- backward ----------------------------------------------------------------------------

    def hold(self, param: int) -> None:
        """Make the current stream wait until nothing reads a parameter's gradient any more."""
        for parcel in self.of_param[param]:
            if parcel.scattered is not None:
                parcel.scattered.wait()

    def filled(self, param: int) -> None:
        """Say that the current stream puts a gradient into the arena; send what has its turn."""
        stream = current_stream(self._device)
        for parcel in self.of_param[param]:
            if parcel.is_issued:
                self.dirty.add(param)
            parcel.missing.discard(param)
            self._writers[parcel].add(stream)
        self._send_ready()

    def _send_ready(self) -> None:
        while self._num_sent < len(self._order):
            parcel = self._order[self._num_sent]
            if parcel.missing:
                break
            self._num_sent += 1
            self._send(parcel)

    def _send(self, parcel: Parcel) -> None:
        here = current_stream(self._device)
        for stream in self._writers[parcel]:
            if stream != here:
                here.wait_stream(stream)
        self._writers[parcel].clear()
        if parcel in self._updated:  # which reads the sums of the step before
            here.wait_event(self._updated[parcel])
        parcel.is_issued = True
        parcel.scattered = self._lanes.scatter.reduce_scatter(
            parcel.reduced, parcel.grads, op="mean", wire=self._wire
        )

    # -- step --------------------------------------------------------------------------------

    def send_all(self) -> None:
        """Send what is left of this step, in its order; unused gradients are zeros by now."""
        for parcel in self.parcels:
            parcel.missing.clear()
        self._send_ready()

    def send_again(self, params: set[int]) -> None:
        """Send the units of some parameters a second time: their gradients have changed."""
        for parcel in self._order:
            if params.intersection(parcel.params):
                self._send(parcel)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Have the stream of updates current, after all that the caller's has been asked."""
        self._updating.wait_stream(current_stream(self._device))
        with torch.cuda.stream(self._updating):
            yield
            self._end = self._updating.record_event()

    def follow(self, tensor: torch.Tensor) -> None:
        """Make the current stream wait for the last update, of which it will read a tensor."""
        stream = current_stream(self._device)
        if self._end is not None:
            stream.wait_event(self._end)
        tensor.record_stream(stream)

    def go(self, update: Callable[[Parcel], None], skipped: set[int]) -> None:
        """Update each parcel after it is reduced, and gather it when its turn comes.

        Called with the stream of updates current. `skipped` parameters stay as they are; a parcel
        with no others is not gathered.
        """
        self.dirty.clear()
        self._has_waited.clear()
        self._skipped = skipped
        self._num_sent = self._num_gathered = 0
        for parcel in self._order:
            assert parcel.scattered is not None
            parcel.scattered.wait()
            update(parcel)
            self._updated[parcel] = self._updating.record_event()
            parcel.is_updated = True
            self._go_on_from(parcel)
        for parcel in self.parcels:
            parcel.settle()

    def _go_on_from(self, parcel: Parcel) -> None:
        """Gather what has its turn."""
        while (
            self._num_gathered < len(self.parcels) and self.parcels[self._num_gathered].is_updated
        ):
            self._gather(self.parcels[self._num_gathered])
            self._num_gathered += 1

    def _gather(self, parcel: Parcel) -> None:
        parcel.gathered = None
        if not self._skipped.issuperset(parcel.params):
            lane = self._lanes.gather
            parcel.gathered = lane.all_gather(parcel.whole, parcel.mine, wire=self._wire)

    # -- forward -----------------------------------------------------------------------------

    def wait(self, parcels: Iterable[Parcel]) -> None:
        """Make the current stream wait for the weights of some parcels."""
        stream = current_stream(self._device)
        waited = self._has_waited.setdefault(stream, set())
        if len(waited) == len(self.parcels):
            return
        for parcel in parcels:
            if parcel in waited:
                continue
            if parcel in self._updated:
                stream.wait_event(self._updated[parcel])
            if parcel.gathered is not None:
                parcel.gathered.wait()
            waited.add(parcel)
