"""Memory between ranks: where all are on one host, arenas are shared, and nothing is sent.

A reduction reads the gradients of the other ranks where they lie, and a gather writes weights where
they are wanted. Whether ranks are on one host is what their hosts' names say; whether they can open
each other's memory is tried. If either is not so, sockets it is.

On GPUs it is the same where lanes go by peer pointers, which is for the user to say.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from penstock.errors import PenstockError
from penstock.step.attached.arenas import Take
from penstock.step.attached.flow import Lanes
from penstock.step.attached.step_exchange import meeting_of
from penstock.step.comms.comm import Comm
from penstock.step.comms.peer import STAGE_BYTES, PeerComm
from penstock.step.comms.peer_memory import ALIGN_BYTES as PEER_ALIGN_BYTES
from penstock.step.comms.peer_memory import PeerArena
from penstock.step.comms.shm import ShmComm
from penstock.step.comms.shm_memory import ALIGN_BYTES, HostArena

__all__ = ["ArenaMemory"]

_NUM_LANES = 3
"""Scatter, gather and control."""


class ArenaMemory:
    """Lanes between ranks, and memory for arenas: shared or not."""

    def __init__(
        self,
        lanes: Lanes,
        sizes_bytes: Sequence[int],
        *,
        may_share: bool,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        """Take the lanes that are there, or better ones; arenas will have these sizes."""
        self.lanes = lanes
        self._timeout_s = timeout_s
        self.take: Take = partial(torch.zeros, device=device)
        self.is_shared = False
        self._stack = ExitStack()
        if may_share and device.type == "cuda":
            if isinstance(lanes.gather, PeerComm):
                self._share_gpu(sizes_bytes, device)
        elif may_share and lanes.control.size > 1 and _is_one_host(lanes.control):
            self._share(sizes_bytes)

    def close(self) -> None:
        """End lanes that were made here; tensors keep their memory."""
        self._stack.close()

    def _share(self, sizes_bytes: Sequence[int]) -> None:
        control = self.lanes.control
        need_bytes = sum(size_bytes + ALIGN_BYTES for size_bytes in sizes_bytes)
        need_bytes += _NUM_LANES * (ShmComm.need_bytes(control.size) + 2 * ALIGN_BYTES)
        arena = HostArena(
            meeting_of(control), rank=control.rank, size=control.size, size_bytes=need_bytes
        )
        try:
            self._stack.enter_context(arena)
        except PenstockError:  # on all ranks
            return
        options: Any = {"axis": control.axis, "timeout_s": self._timeout_s}
        comms = [self._stack.enter_context(ShmComm(arena, **options)) for _ in range(_NUM_LANES)]
        # Over shared memory the rank that waits for control does the work itself; over a socket
        # it takes three threads.
        self.lanes = Lanes(scatter=comms[0], gather=comms[1], control=comms[2])
        self.take = partial(_place, arena)
        self.is_shared = True

    def _share_gpu(self, sizes_bytes: Sequence[int], device: torch.device) -> None:
        """Open lanes over an arena that is as large as it must be, instead of the user's."""
        control = self.lanes.control
        # Each size is that of two places, for weights and for gradients.
        need_bytes = sum(size_bytes + 2 * PEER_ALIGN_BYTES for size_bytes in sizes_bytes)
        need_bytes += 2 * ShmComm.need_bytes(control.size, STAGE_BYTES) + 4 * PEER_ALIGN_BYTES
        arena = self._stack.enter_context(
            PeerArena(
                meeting_of(control),
                rank=control.rank,
                size=control.size,
                size_bytes=need_bytes,
                device=device,
            )
        )
        options: Any = {"axis": control.axis, "timeout_s": self._timeout_s}
        comms = [self._stack.enter_context(PeerComm(arena, **options)) for _ in range(2)]
        self.lanes = Lanes(scatter=comms[0], gather=comms[1], control=control)
        self.take = partial(_take, arena)
        self.is_shared = True


def _take(arena: PeerArena, length: int, *, dtype: torch.dtype) -> torch.Tensor:
    """Return memory of a GPU that peers see, as a tensor that ends where it ends."""
    place = arena.take(length, dtype)
    if not length:
        return place
    start_bytes = place.storage_offset() * dtype.itemsize
    storage = place.untyped_storage()[start_bytes : start_bytes + length * dtype.itemsize]
    return place.new_empty(0).set_(storage, 0, (length,), (1,))


def _place(arena: HostArena, length: int, *, dtype: torch.dtype) -> torch.Tensor:
    """Return shared memory as a tensor that ends where it ends: saving it saves nothing else."""
    offset = arena.offset_of(arena.take(length, dtype))
    assert offset is not None
    num_words = length * dtype.itemsize // 8
    if not num_words:
        return torch.zeros(length, dtype=dtype)
    return torch.frombuffer(arena.words(arena.rank, offset, num_words), dtype=dtype)


def _is_one_host(control: Comm) -> bool:
    return len(set(meeting_of(control)(socket.gethostname().encode()))) == 1
