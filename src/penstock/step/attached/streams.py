"""The way of gradients and weights on a GPU: order by streams and events, and no host waits.

    stream of backward ──► scatter lane ──► stream of updates ──► gather lane ──► stream of forward
         event per operation     event           event per bucket      event       waits for events

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

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from penstock.step.attached.flow import BucketFlow, FlowBucket, FlowPlan
from penstock.step.streams import current_stream

__all__ = ["StreamFlow"]


class StreamFlow(BucketFlow):
    """All buckets of a model on one GPU. Used by one thread at a time, as autograd does."""

    def __init__(self, plan: FlowPlan) -> None:
        super().__init__(plan)
        self._device = self.buckets[0].whole.device
        self._updating = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._num_sent = self._num_gathered = 0
        self._writers: dict[FlowBucket, set[torch.cuda.Stream]] = {b: set() for b in self.buckets}
        """Streams that have put gradients into a bucket that is not sent yet."""
        self._updated: dict[FlowBucket, torch.cuda.Event] = {}
        self._has_waited: dict[torch.cuda.Stream, set[FlowBucket]] = {}
        """Buckets that each stream has waited for since the last step."""
        self._end: torch.cuda.Event | None = None

    # -- backward ----------------------------------------------------------------------------

    def hold(self, param: int) -> None:
        """Make the current stream wait until nothing reads a parameter's gradient any more."""
        for bucket in self.of_param[param]:
            if bucket.scattered is not None:
                bucket.scattered.wait()

    def filled(self, param: int) -> None:
        """Say that the current stream puts a gradient into the arena; send what has its turn."""
        stream = current_stream(self._device)
        for bucket in self.of_param[param]:
            if bucket.is_issued:
                self.dirty.add(param)
            bucket.missing.discard(param)
            self._writers[bucket].add(stream)
        self._send_ready()

    def _send_ready(self) -> None:
        while self._num_sent < len(self._scatters):
            bucket = self._scatters[self._num_sent]
            if bucket.missing:
                break
            self._num_sent += 1
            self._send(bucket)

    def _send(self, bucket: FlowBucket) -> None:
        here = current_stream(self._device)
        for stream in self._writers[bucket]:
            if stream != here:
                here.wait_stream(stream)
        self._writers[bucket].clear()
        if bucket in self._updated:  # which reads the sums of the step before
            here.wait_event(self._updated[bucket])
        bucket.is_issued = True
        bucket.scattered = self._lanes.scatter.reduce_scatter(
            bucket.reduced, bucket.grads, op="mean", wire=self._wire
        )

    # -- step --------------------------------------------------------------------------------

    def send_all(self) -> None:
        """Send what is left of this step, in its order; unused gradients are zeros by now."""
        for bucket in self.buckets:
            bucket.missing.clear()
        self._send_ready()

    def send_again(self, params: set[int]) -> None:
        """Send the units of some parameters a second time: their gradients have changed."""
        for bucket in self._scatters:
            if params.intersection(bucket.params):
                self._send(bucket)

    @contextmanager
    def updating(self, *read_after: torch.Tensor) -> Iterator[None]:
        """Make the stream of updates current, after all work of the caller's stream.

        The caller's waits for the block if it reads tensors after it.
        """
        self._updating.wait_stream(current_stream(self._device))
        with torch.cuda.stream(self._updating):
            yield
            self._end = self._updating.record_event()
        for tensor in read_after:
            self.follow(tensor)

    def follow(self, tensor: torch.Tensor) -> None:
        """Make the current stream wait for the last update before it reads a tensor of it."""
        stream = current_stream(self._device)
        if self._end is not None:
            stream.wait_event(self._end)
        tensor.record_stream(stream)

    def go(self, update: Callable[[FlowBucket], None], skipped: set[int]) -> None:
        """Update each bucket after it is reduced, and gather it when its turn comes.

        Called with the stream of updates current. `skipped` parameters stay as they are; a bucket
        with no others is not gathered.
        """
        self.dirty.clear()
        self._has_waited.clear()
        self._skipped = skipped
        self._num_sent = self._num_gathered = 0
        for bucket in self._scatters:
            assert bucket.scattered is not None
            bucket.scattered.wait()
            update(bucket)
            self._updated[bucket] = self._updating.record_event()
            bucket.is_updated = True
            self._go_on_from(bucket)
        for bucket in self.buckets:
            bucket.settle()

    def _go_on_from(self, bucket: FlowBucket) -> None:
        """Gather what has its turn."""
        while (
            self._num_gathered < len(self.buckets) and self.buckets[self._num_gathered].is_updated
        ):
            self._gather(self.buckets[self._num_gathered])
            self._num_gathered += 1

    def _gather(self, bucket: FlowBucket) -> None:
        bucket.gathered = None
        if not self._skipped.issuperset(bucket.params):
            lane = self._lanes.gather
            bucket.gathered = lane.all_gather(bucket.whole, bucket.mine, wire=self._wire)

    # -- forward -----------------------------------------------------------------------------

    def wait(self, buckets: Iterable[FlowBucket]) -> None:
        """Make the current stream wait for the weights of some buckets."""
        stream = current_stream(self._device)
        waited = self._has_waited.setdefault(stream, set())
        if len(waited) == len(self.buckets):
            return
        for bucket in buckets:
            if bucket in waited:
                continue
            if bucket in self._updated:
                stream.wait_event(self._updated[bucket])
            if bucket.gathered is not None:
                bucket.gathered.wait()
            waited.add(bucket)
