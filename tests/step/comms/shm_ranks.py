"""An arena and a communicator for a rank of a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.step.comms.shm import ShmComm
from penstock.step.comms.shm_memory import HostArena, meeting


@contextmanager
def shared(rank: int, size: int, **options: Any) -> Iterator[ShmComm]:
    arena = HostArena(meeting(), rank=rank, size=size, size_bytes="8MB")
    with arena, ShmComm(arena, **options) as comm:
        yield comm
