"""Memory between ranks: where all are on one host, arenas are shared, and nothing is sent.

A reduction reads the gradients of the other ranks where they lie, and a gather writes weights where
they are wanted. Whether ranks are on one host is what their hosts' names say; whether they can open
each other's memory is tried. If either is not so, sockets it is.
"""

from __future__ import annotations

import socket
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import torch

from penstock.errors import PenstockError
from penstock.step.arenas import Take
from penstock.step.attach_flow import Lanes
from penstock.step.comm import Comm
from penstock.step.shm import ShmComm
from penstock.step.shm_memory import ALIGN_BYTES, Arena, Meet

__all__ = ["Room"]

_WORD_BYTES = 4096
"""Of what a rank says about its segment; it says less, unless it is sorry at length."""


class Room:
    """Lanes between ranks, and memory for arenas: shared or not."""

    def __init__(self, lanes: Lanes, sizes_bytes: Sequence[int], *, may_share: bool) -> None:
        """Take the lanes that are there, or better ones; arenas will have these sizes."""
        self.lanes = lanes
        self.take: Take = torch.zeros
        self.is_shared = False
        self._stack = ExitStack()
        if may_share and lanes.word.size > 1 and _is_one_host(lanes.word):
            self._share(sizes_bytes)

    def close(self) -> None:
        """End lanes that were made here; tensors keep their memory."""
        self._stack.close()

    def _share(self, sizes_bytes: Sequence[int]) -> None:
        word = self.lanes.word
        need_bytes = sum(size_bytes + ALIGN_BYTES for size_bytes in sizes_bytes)
        need_bytes += 2 * ShmComm.need_bytes(word.size) + 4 * ALIGN_BYTES
        arena = Arena(_meeting(word), rank=word.rank, size=word.size, size_bytes=need_bytes)
        try:
            self._stack.enter_context(arena)
        except PenstockError:  # on all ranks
            return
        comms = [self._stack.enter_context(ShmComm(arena, axis=word.axis)) for _ in range(2)]
        self.lanes = Lanes(scatter=comms[0], gather=comms[1], word=word)
        self.take = partial(_place, arena)
        self.is_shared = True


def _place(arena: Arena, length: int, *, dtype: torch.dtype) -> torch.Tensor:
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


def _meeting(word: Comm) -> Meet:
    """Return how the ranks of a lane exchange a few bytes."""

    def meet(said: bytes) -> list[bytes]:
        every = torch.zeros(word.size, _WORD_BYTES, dtype=torch.uint8)
        row = said[:_WORD_BYTES].ljust(_WORD_BYTES, b"\0")
        every[word.rank] = torch.frombuffer(bytearray(row), dtype=torch.uint8)
        word.all_gather(every.view(-1), every[word.rank]).wait()
        return [bytes(each.tolist()).rstrip(b"\0") for each in every]

    return meet
