"""An arena and a communicator for a rank of a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.step.comms.shm import ShmComm
from penstock.step.comms.shm_memory import HostArena, Meet, meeting


@contextmanager
def shared(rank: int, size: int, **options: Any) -> Iterator[ShmComm]:
    arena = HostArena(meeting(), rank=rank, size=size, size_bytes="8MB")
    with arena, ShmComm(arena, **options) as comm:
        yield comm


def meeting_at(store: Any, *, rank: int, size: int) -> Meet:
    """Return how ranks meet that only have a store of torch.distributed."""
    rounds = iter(range(2**62))

    def meet(said: bytes) -> list[bytes]:
        turn = next(rounds)
        store.set(f"{turn}/{rank}", said)
        return [bytes(store.get(f"{turn}/{other}")) for other in range(size)]

    return meet
