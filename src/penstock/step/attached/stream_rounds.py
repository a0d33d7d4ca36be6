"""Weights in slices on a GPU: rounds as in `reshard`, in order by streams, and no host waits.

    stream of weights    room for a block ─► my slice into it ─► ... ─► given back
                                                    │ event               ▲ events
    gather lane                                     └─► gather ─┐         │
    stream of forward or backward                               └─► use ──┘

A host is ahead of its device. It takes memory and gives it back when it has asked for all that
reads it, not when that is over, and the allocator gives such memory out again at once to the stream
that took it. So all memory of weights is taken on one stream, which waits for every reader before
it is given back, and all of gradients on another one. What is taken later is written after that.
No more memory is in use than the host sees: blocks that are used, and AHEAD more. Lanes have to
leave memory alone (`keeps_memory`): with `record_stream` nothing would be given out again before
the device has caught up with the host.

A gather waits for its memory, and so for what this rank has used before. That was gathered earlier,
on all ranks in the same order: there is no circle. It is different with gradients. Backward takes
memory of gradients that were sent, and waits for their sums, for which another rank may have to
compute more; that rank may have begun a round which this one has not come to. So with each block it
sends a rank says how many gathers it has begun (the lane of pace). Memory is used again when this
rank has begun as many as any other had; before that it takes more.

Where hosts carry out what a lane was asked for (`peer`), memory is given back after they have.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from penstock.step.attached.blocks import ParameterBlock, WeightSnapshot
from penstock.step.attached.flow import FlowBucket, FlowPlan
from penstock.step.attached.reshard import AHEAD, Rounds
from penstock.step.attached.share import Share
from penstock.step.attached.streams import StreamFlow
from penstock.step.comms.comm import Comm, Handle
from penstock.step.streams import current_stream

__all__ = ["StreamPool", "StreamBlock", "StreamRounds"]


class StreamPool:
    """Memory that comes and goes in the order of a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._aside: list[tuple[Asked, tuple[torch.Tensor, ...]]] = []

    def fill(self, storage: torch.UntypedStorage, size_bytes: int) -> None:
        """Take memory that is written after this point of the stream."""
        with torch.cuda.stream(self.stream):
            storage.resize_(size_bytes)

    def empty(self, storage: torch.UntypedStorage) -> None:
        """Give memory back after what the stream has waited for, the current one included."""
        self.stream.wait_stream(current_stream(self.device))
        storage.resize_(0)

    def follow(self, handles: Sequence[Handle | None]) -> None:
        """Make the stream wait for operations of lanes."""
        with torch.cuda.stream(self.stream):
            for handle in handles:
                if handle is not None:
                    handle.wait()

    def keep(self, handle: Handle, *tensors: torch.Tensor) -> None:
        """Hold tensors that were made on the stream until it has waited for their users."""
        self._aside.append((Asked(handle), tensors))
        while self._aside and self._aside[0][0]:
            self.follow([self._aside.pop(0)[0].handle])


class Asked:
    """Whether the device has been asked for an operation, as its host may do some time later."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self._said = threading.Event()
        handle.then(self._said.set)

    def __bool__(self) -> bool:
        return self._said.is_set()


class StreamBlock(ParameterBlock):
    """A block whose memory comes and goes while a device is at work."""

    def __init__(
        self,
        share: Share,
        buckets: Sequence[FlowBucket],
        params: Sequence[torch.Tensor],
        fetch: Callable[[ParameterBlock], None],
        *,
        flow: StreamRounds,
    ) -> None:
        super().__init__(share, buckets, params, fetch)
        self._flow = flow
        self._asked: list[Asked] = []
        self._users: set[torch.cuda.Stream] = set()
        """Streams that have waited for these weights."""
        self._memory: torch.cuda.Event | None = None
        """Recorded when gradients had memory."""

    # -- weights -----------------------------------------------------------------------------

    def gather(self, comm: Comm, wire: str | None) -> None:
        """Ask for all slices; what is gathered is this rank's after its update."""
        flow, pool = self._flow, self._flow.weights
        flow.num_gathers += 1
        flow.after_updates(self.buckets, pool.stream)
        with torch.cuda.stream(pool.stream):
            super().gather(comm, wire)
            flow.has_read = pool.stream.record_event()
        self._asked = [
            Asked(bucket.gathered) for bucket in self.buckets if bucket.gathered is not None
        ]

    def _take_memory(self) -> None:
        if self.data.nbytes() != self._data_bytes:
            self._flow.weights.fill(self.data, self._data_bytes)

    def _gathered_aside(self, handle: Handle, *tensors: torch.Tensor) -> None:
        self._flow.weights.keep(handle, *tensors)

    def arrive(self) -> None:
        """Make the current stream wait for the weights."""
        stream = current_stream(self._flow.weights.device)
        if stream in self._users:
            return
        for bucket in self.buckets:
            if bucket.gathered is not None:
                bucket.gathered.wait()
        self._users.add(stream)
        self._come_back()

    @property
    def is_under_way(self) -> bool:
        """Whether the device has yet to be asked for a gather."""
        return not all(self._asked)

    def release(self) -> None:
        """Give the memory of weights back, after all streams that use it."""
        pool = self._flow.weights
        for stream in self._users:
            pool.stream.wait_stream(stream)
        pool.follow([bucket.gathered for bucket in self.buckets])
        for bucket in self.buckets:
            bucket.gathered = None
        self._asked, self._users = [], set()
        super().release()

    def _give_memory_back(self) -> None:
        self._flow.weights.empty(self.data)

    def stay(self) -> None:
        """Leave the memory of weights to torch, which gives it out when this stream is there."""
        flat = self.share.arena.data
        flat.record_stream(current_stream(flat.device))

    def take_changed(self, seen: WeightSnapshot) -> None:
        """Take weights over that were changed, between gathers before and after."""
        pool = self._flow.weights
        stream = current_stream(pool.device)
        stream.wait_stream(pool.stream)
        super().take_changed(seen)
        pool.stream.wait_stream(stream)

    # -- gradients ---------------------------------------------------------------------------

    def make_room(self) -> None:
        """Take memory for gradients, for the current stream too."""
        stream = current_stream(self._flow.grads.device)
        if self._memory is not None:
            stream.wait_event(self._memory)
        super().make_room()
        if self._memory is None:
            self._memory = stream.record_event()

    def _take_room(self) -> None:
        pool = self._flow.grads
        pool.fill(self.grads, self._grads_bytes)
        current_stream(pool.device).wait_stream(pool.stream)

    def give_room_back(self) -> None:
        """Give the memory of gradients back, after what reads them."""
        pool = self._flow.grads
        pool.follow([bucket.scattered for bucket in self.buckets])
        pool.empty(self.grads)
        self._memory = None


class StreamRounds(Rounds, StreamFlow):
    """Rounds on one GPU."""

    num_rooms_kept = AHEAD

    def __init__(self, plan: FlowPlan, pace: Comm) -> None:
        super().__init__(plan)
        self.weights, self.grads = StreamPool(self._device), StreamPool(self._device)
        self.has_read: torch.cuda.Event | None = None
        """Recorded when the last slice was read for a gather."""
        self.num_gathers = 0
        self._pace = pace
        self._paces: dict[ParameterBlock, tuple[torch.Tensor, Handle]] = {}
        """By block that was sent: the maximum over ranks of gathers begun, when it has come."""
        self._sent: dict[FlowBucket, Asked] = {}

    def block(self, share: Share, buckets: Sequence[FlowBucket], params: Any) -> ParameterBlock:
        """Return a block of a share's buckets and parameters."""
        return StreamBlock(share, buckets, params, self.fetch, flow=self)

    def after_updates(self, buckets: Sequence[FlowBucket], stream: torch.cuda.Stream) -> None:
        """Make a stream wait for the updates of some buckets."""
        for bucket in buckets:
            if bucket in self._updated:
                stream.wait_event(self._updated[bucket])

    # -- backward ----------------------------------------------------------------------------

    def _send(self, bucket: FlowBucket) -> None:
        self._scatter(bucket)
        block = self.block_of[bucket.params[0]]
        if all(each.is_issued for each in block.buckets):
            most = torch.tensor([self.num_gathers])
            self._paces[block] = most, self._pace.all_reduce(most, op="max")

    def _scatter(self, bucket: FlowBucket) -> FlowBucket:
        super()._send(bucket)
        assert bucket.scattered is not None
        self._sent[bucket] = Asked(bucket.scattered)
        return bucket

    def _follow(self, issued: object) -> None:
        """Leave it: updates are asked for by `go`."""

    def is_scattered(self, block: ParameterBlock, *, is_over: bool) -> bool:
        """Whether memory of gradients may be written again after the sums that were asked for."""
        if not all(self._sent.get(bucket, True) for bucket in block.buckets):
            return False
        if is_over:
            return True
        most, handle = self._paces[block]
        return handle.is_done() and int(most) <= self.num_gathers

    # -- step --------------------------------------------------------------------------------

    @contextmanager
    def updating(self, *read_after: torch.Tensor) -> Iterator[None]:
        """Make the stream of updates current, after all readers of what is updated."""
        if self.has_read is not None:
            self._updating.wait_event(self.has_read)
        with super().updating(*read_after):
            yield

    def go(self, update: Callable[[FlowBucket], None], skipped: set[int]) -> None:
        """Update each bucket after it is reduced; the first blocks are gathered."""
        for bucket in self.buckets:
            bucket.settled.clear()
        super().go(update, skipped)

    def _go_on_from(self, bucket: FlowBucket) -> None:
        self._pump_gathers()

    # -- around ------------------------------------------------------------------------------

    def wait(self, buckets: object) -> None:
        """Return at once: a block that is used makes its stream wait."""

    def drain(self) -> None:
        """Make the current stream wait for all that is under way."""
        if self._end is not None:
            current_stream(self._device).wait_event(self._end)
        for bucket in self.buckets:
            if (handle := bucket.gathered) is not None:
                handle.wait()

    def stay_whole(self) -> None:
        """Keep all weights whole for good."""
        super().stay_whole()
        for block in self.blocks:
            assert isinstance(block, StreamBlock)
            block.stay()
