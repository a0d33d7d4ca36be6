"""Which epoch each worker makes, agreed upon by processes that never speak to each other.

A DataLoader's workers often end with each iteration, and new ones are made like the parent, which
never sees an iteration begin. Only a note in memory that all of them share can tell them that an
epoch has gone by. It is also how `set_epoch`, called in the parent, reaches workers that stay.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.utils.data import get_worker_info

from penstock.loader.torch.worker_position import WORKERS_MAX

_EPOCH_BITS = 32
_TAG_MAX = 2**31 - 1


class SharedEpochTable:
    """A row for each worker: where it began, and in which iteration.

    Workers of one iteration have the same tag. The first to come takes the place after the furthest
    that any earlier one began at, the others follow it. So they agree even if a worker of an
    iteration that was left early ended before it had begun.
    """

    def __init__(self, epochs: int | None) -> None:
        self._epochs = epochs
        # One number holds tag and epoch, because single numbers are written as a whole.
        table: Any = torch.zeros((WORKERS_MAX, 2), dtype=torch.int64)
        self._table = table.share_memory_()

    def next(self, worker: int, tag: int) -> tuple[int, int]:
        """Return the epoch and position that a worker begins its iteration with."""
        rows = [(r[0] >> _EPOCH_BITS, r[0] % 2**_EPOCH_BITS, r[1]) for r in self._table.tolist()]
        if rows[worker][0] == tag:
            return self._after(*rows[worker])  # A worker that stays begins anew.
        for other, epoch, position in rows:
            if other == tag:
                return epoch, position
        return max(self._after(*row) for row in rows)

    def _after(self, tag: int, epoch: int, position: int) -> tuple[int, int]:
        """Return what comes after a row; tag 0 stands for a place where nobody has begun yet."""
        if tag == 0 or self._epochs is None:
            return epoch, position
        return (epoch // self._epochs + 1) * self._epochs, 0

    def begin(self, worker: int, num_workers: int, tag: int, place: tuple[int, int]) -> None:
        """Note that a worker has begun."""
        epoch, position = place
        rows = [worker, *range(num_workers, WORKERS_MAX)] if worker == 0 else [worker]
        self._table[rows, 1] = position
        self._table[rows, 0] = (tag << _EPOCH_BITS) + epoch

    def put(self, epoch: int, position: int = 0) -> None:
        """Let the next iteration begin at a place."""
        self._table[:, 1] = position
        self._table[:, 0] = epoch

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # Nothing happens to memory that came from a parent; that of a copy has to be shared anew.
        self._table.share_memory_()


def tag_here() -> int:
    """Return a number that is the same in all workers of an iteration, and in no other process."""
    info = get_worker_info()
    if info is None:
        return 1 + int.from_bytes(os.urandom(8), "little") % _TAG_MAX
    # What torch draws for each iteration, to seed its workers.
    return 1 + (info.seed - info.id) % _TAG_MAX
