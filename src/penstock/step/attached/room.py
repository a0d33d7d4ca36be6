"""Memory between ranks: where all are on one host, arenas are shared, and nothing is sent.

A reduction reads the gradients of the other ranks where they lie, and a gather writes weights where
they are wanted. Whether ranks are on one host is what their hosts' names say; whether they can open
each other's memory is tried. If either is not so, sockets it is.

On GPUs it is the same where lanes go by peer pointers, which is for the user to say.
"""

from __future__ import annotations

import socket
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from penstock.errors import PenstockError
from penstock.step.attached.arenas import Take
from penstock.step.attached.flow import Lanes
from penstock.step.comms.comm import Comm
from penstock.step.comms.peer import STAGE_BYTES, PeerComm
from penstock.step.comms.peer_memory import ALIGN_BYTES as PEER_ALIGN_BYTES
from penstock.step.comms.peer_memory import PeerArena
from penstock.step.comms.shm import ShmComm
from penstock.step.comms.shm_memory import ALIGN_BYTES, HostArena, Meet

__all__ = ["Room", "meeting_of"]

_WORD_BYTES = 1 << 14
"""Of what a rank says about its segment; it says less, unless it is sorry at length."""
_LENGTH_BYTES = 4
_NUM_LANES = 3
"""Scatter, gather and word."""


class Room:
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
        elif may_share and lanes.word.size > 1 and _is_one_host(lanes.word):
            self._share(sizes_bytes)

    def close(self) -> None:
        """End lanes that were made here; tensors keep their memory."""
        self._stack.close()

    def _share(self, sizes_bytes: Sequence[int]) -> None:
        word = self.lanes.word
        need_bytes = sum(size_bytes + ALIGN_BYTES for size_bytes in sizes_bytes)
        need_bytes += _NUM_LANES * (ShmComm.need_bytes(word.size) + 2 * ALIGN_BYTES)
        arena = HostArena(meeting_of(word), rank=word.rank, size=word.size, size_bytes=need_bytes)
        try:
            self._stack.enter_context(arena)
        except PenstockError:  # on all ranks
            return
        options: Any = {"axis": word.axis, "timeout_s": self._timeout_s}
        comms = [self._stack.enter_context(ShmComm(arena, **options)) for _ in range(_NUM_LANES)]
        # Who waits for a word does the work himself; over a socket it would be three threads.
        self.lanes = Lanes(scatter=comms[0], gather=comms[1], word=comms[2])
        self.take = partial(_place, arena)
        self.is_shared = True

    def _share_gpu(self, sizes_bytes: Sequence[int], device: torch.device) -> None:
        """Have lanes over an arena that is as large as it must be, instead of the user's."""
        word = self.lanes.word
        # Each size is that of two places, for weights and for gradients.
        need_bytes = sum(size_bytes + 2 * PEER_ALIGN_BYTES for size_bytes in sizes_bytes)
        need_bytes += 2 * ShmComm.need_bytes(word.size, STAGE_BYTES) + 4 * PEER_ALIGN_BYTES
        arena = self._stack.enter_context(
            PeerArena(
                meeting_of(word),
                rank=word.rank,
                size=word.size,
                size_bytes=need_bytes,
                device=device,
            )
        )
        options: Any = {"axis": word.axis, "timeout_s": self._timeout_s}
        comms = [self._stack.enter_context(PeerComm(arena, **options)) for _ in range(2)]
        self.lanes = Lanes(scatter=comms[0], gather=comms[1], word=word)
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


def _is_one_host(word: Comm) -> bool:
    mine = zlib.crc32(socket.gethostname().encode())
    low, high = torch.tensor([mine]), torch.tensor([mine])
    word.all_reduce(low, op="min").wait()
    word.all_reduce(high, op="max").wait()
    return int(low) == int(high)


def meeting_of(word: Comm) -> Meet:
    """Return how the ranks of a lane exchange a few bytes."""

    def meet(said: bytes) -> list[bytes]:
        every = torch.zeros(word.size, _WORD_BYTES, dtype=torch.uint8)
        length = min(len(said), _WORD_BYTES - _LENGTH_BYTES)
        row = length.to_bytes(_LENGTH_BYTES, "little") + said[:length]
        every[word.rank, : len(row)] = torch.frombuffer(bytearray(row), dtype=torch.uint8)
        word.all_gather(every.view(-1), every[word.rank]).wait()
        return [_said(bytes(each.tolist())) for each in every]

    return meet


def _said(row: bytes) -> bytes:
    length = int.from_bytes(row[:_LENGTH_BYTES], "little")
    return row[_LENGTH_BYTES : _LENGTH_BYTES + length]
