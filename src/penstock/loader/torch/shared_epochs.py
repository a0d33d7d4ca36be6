"""The epoch that each worker makes, agreed on through shared memory.

A DataLoader's workers often end with each iteration, and new ones are copies of the parent, which
never sees an iteration begin. Only a table in shared memory can tell them that an epoch has gone
by. Through the same table `set_epoch`, called in the parent, reaches workers that stay.
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
    """A row for each worker: the place where it began, and a tag of the iteration.

    Workers of one iteration have the same tag. The first of them to begin takes the place after the
    furthest place of earlier iterations; the others take the same place. So they agree even if a
    worker of an iteration that was left early ended before it had begun.
    """

    def __init__(self, epochs: int | None) -> None:
        self._epochs = epochs
        # One number holds tag and epoch, because only single numbers are written atomically.
        table: Any = torch.zeros((WORKERS_MAX, 2), dtype=torch.int64)
        self._table = table.share_memory_()

    def next(self, worker: int, tag: int) -> tuple[int, int]:
        """Return the epoch and position that a worker begins its iteration with."""
        rows = [(r[0] >> _EPOCH_BITS, r[0] % 2**_EPOCH_BITS, r[1]) for r in self._table.tolist()]
        if rows[worker][0] == tag:
            return self._after(*rows[worker])  # A persistent worker begins its next iteration.
        for other, epoch, position in rows:
            if other == tag:
                return epoch, position
        return max(self._after(*row) for row in rows)

    def _after(self, tag: int, epoch: int, position: int) -> tuple[int, int]:
        """Return the place after a row; tag 0 marks a place where no worker has begun yet."""
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
        # No effect on memory inherited from a parent; the memory of a copy has to be shared anew.
        self._table.share_memory_()


def tag_here() -> int:
    """Return a number that only the workers of this iteration have."""
    info = get_worker_info()
    if info is None:
        return 1 + int.from_bytes(os.urandom(8), "little") % _TAG_MAX
    # Torch draws a base seed for each iteration; a worker's seed is that plus its id.
    return 1 + (info.seed - info.id) % _TAG_MAX
