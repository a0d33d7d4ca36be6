"""Communication by pointers into other GPUs' memory, between ranks of one host.

    with PeerArena(meeting(), rank=rank, size=2, size_bytes="1GB") as arena:
        with PeerComm(arena, axis="dp") as comm:
            comm.all_reduce(grad).wait()

It moves what `shm` moves, with kernels instead of processors: tensors in the arena are read and
written in place, others pass through stages there. A fused region is one kernel over the tensors of
all ranks (`shm_pass`).

Ranks meet differently. A rank that arrives records an event, its mark, on the lane's stream; its
peers have opened that event. Then the hosts meet by their flags, and each lets its stream wait for
the marks of the others. Hosts wait for hosts and streams for streams: nobody waits for a kernel to
end, and a host may be several meetings ahead of its GPU. There are two marks, used in turns: a rank
that records a mark again has met all others since, and their streams wait for its earlier record.

Where events cannot be shared between processes, a rank that arrives waits for its stream instead
(`waits=True`): slower, and just as correct.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from penstock.errors import RendezvousError
from penstock.step.comms.peer_memory import PeerArena
from penstock.step.comms.shm import ShmComm
from penstock.step.comms.shm_flags import Flags
from penstock.step.comms.shm_lane import ShmLane, ShmTask, nothing
from penstock.step.streams import current_stream

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["STAGE_BYTES", "PeerComm"]

STAGE_BYTES = 4 << 20
"""Of each of the two stages: a few kernels' time, so that starting them does not count."""


class PeerFlags(Flags):
    """Flags of ranks whose work is on streams.

    Args:
        arena: of the ranks.
        offset: of their lines in its host memory.
        stream: where this rank's work is.
        waits: whether to wait for the stream instead of marking it.
        timeout_s: how long to wait for a rank that lives but does not come.
    """

    def __init__(
        self,
        arena: PeerArena,
        offset: int,
        *,
        stream: torch.cuda.Stream,
        waits: bool = False,
        timeout_s: float,
    ) -> None:
        super().__init__(arena.host, offset, timeout_s=timeout_s)
        self._stream, self._waits, self._turn = stream, waits, 0
        self._marks, self._theirs = ([], []) if waits else _marks(arena)

    def sync(self) -> None:
        """Meet all ranks; what this stream does next comes after what theirs have done."""
        if self._waits:
            self._stream.synchronize()
            super().sync()
            return
        turn = self._turn % 2
        self._turn += 1
        self._marks[turn].record(self._stream)
        super().sync()
        for event in self._theirs[turn]:
            self._stream.wait_event(event)


_Events = list[torch.cuda.Event]


def _marks(arena: PeerArena) -> tuple[_Events, list[_Events]]:
    """Return this rank's two marks, and those of its peers for each turn."""
    device = arena.device
    with torch.cuda.device(device):
        mine = [
            torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        ]
        handles: list[Any] = [event.ipc_handle() for event in mine]  # type: ignore[no-untyped-call]
        said = b"".join(bytes(handle) for handle in handles)
    heard, trouble = arena.meet(said), ""
    theirs: list[_Events] = [[], []]
    length = len(said) // 2
    try:
        for rank, text in enumerate(heard):
            for turn in range(2) if rank != arena.rank else ():
                handle = text[turn * length : (turn + 1) * length]
                opened = torch.cuda.Event.from_ipc_handle(device, handle)  # type: ignore[no-untyped-call]
                theirs[turn].append(opened)
    except RuntimeError as error:
        trouble = f"rank {arena.rank} cannot use events of its peers: {error}"
    first = next((text for text in arena.meet(trouble.encode()) if text), b"")
    if first:
        raise RendezvousError(f"{first.decode()}; make the communicator with waits=True")
    return mine, theirs


class PeerTask(ShmTask):
    """An operation of a lane's stream. It is done when all its kernels have been launched."""

    is_host = False

    def __init__(self, lane: ShmLane, work: Callable[[], None], stream: torch.cuda.Stream) -> None:
        super().__init__(lane, self._on_stream)
        self._stream, self._what = stream, work
        self._asked = current_stream(stream.device).record_event()
        self._end: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Make the current stream wait for it; the host only waits for the other hosts."""
        super().wait()
        assert self._end is not None
        current_stream(self._stream.device).wait_event(self._end)

    def then(self, work: Callable[[], None]) -> None:
        """Call something whose kernels come after it, on the lane's stream."""

        def call() -> None:
            with torch.cuda.stream(self._stream):
                work()

        super().then(call)

    def _on_stream(self) -> None:
        what, self._what = self._what, nothing
        with torch.cuda.stream(self._stream):
            # The caller's stream may still be writing the tensors when the lane comes to them.
            self._stream.wait_event(self._asked)
            what()
            self._end = self._stream.record_event()


class PeerComm(ShmComm):
    """A `Comm` for tensors on GPUs of one host. All ranks make it, and call it, in the same order.

    Args:
        arena: what the ranks share; all of them take the stages from it here.
        axis: the mesh axis it is for.
        stage_bytes: of each of two stages.
        timeout_s: how long to wait for a rank that lives but does not come; by default as long as
            the default process group does.
        waits: whether a rank waits for its stream before it meets others.
    """

    device_type = "cuda"

    def __init__(
        self,
        arena: PeerArena,
        *,
        axis: str = "dp",
        stage_bytes: int = STAGE_BYTES,
        timeout_s: float | None = None,
        waits: bool = False,
    ) -> None:
        self._peers, self._waits = arena, waits
        self.keeps_memory = True
        """Whether tensors keep their memory until the lane is done with them. A caller that orders
        this itself, by events, turns it off."""
        self._stream = torch.cuda.Stream(arena.device)  # type: ignore[no-untyped-call]
        super().__init__(arena, axis=axis, stage_bytes=stage_bytes, timeout_s=timeout_s)

    def _flags(self, offset: int, timeout_s: float) -> Flags:
        stream, waits = self._stream, self._waits
        return PeerFlags(self._peers, offset, stream=stream, waits=waits, timeout_s=timeout_s)

    def start(self, work: Callable[[], None], *tensors: Tensor | None) -> ShmTask:
        """Run something in the lane and on its stream, after all that was called before."""
        assert not self._is_closed, f"the communicator of axis {self.axis!r} is closed"
        for tensor in tensors if self.keeps_memory else ():
            if tensor is not None:
                tensor.record_stream(self._stream)
        task = PeerTask(self._lane, work, self._stream)
        self._lane.add(task)
        return task

    def barrier(self) -> None:
        """Return when all ranks are here and the streams of all have done what was asked."""
        super().barrier()
        self._stream.synchronize()

    def close(self) -> None:
        """Finish what was started; ranks that still wait for this one are told."""
        if not self._is_closed:
            # Kernels may still be reading the memory of peers, which they may free after this.
            self._lane.close()
            self._stream.synchronize()
        super().close()
