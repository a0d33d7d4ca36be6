"""Losses of several ranks by way of the store where they meet, where there is no process group.

Each rank has a ring of keys. A value says which step it belongs to, and is written over when every
rank has long used it: no rank is more than two windows ahead of another.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.dataset.part import Ints
from penstock.errors import RendezvousError, StateError
from penstock.loader.losses import as_floats
from penstock.order.importance import StepLosses

if TYPE_CHECKING:
    from penstock.peers.rendezvous import Rendezvous
    from penstock.world import World

_TIMEOUT_S = 600.0
_LOOK_S = 0.002


class StoreExchange:
    """Puts this rank's losses where the others look for them."""

    def __init__(self, place: Rendezvous, world: World, name: str, ring: int) -> None:
        """`ring` is more steps than two windows have."""
        self._place, self._world, self._name, self._ring = place, world, name, ring
        self._number = 0

    def begin(self, ids: Ints, losses: Any, digest: int) -> StoreLosses:
        """Put this rank's losses."""
        head = np.array([self._number, digest & (2**63 - 1), len(ids)], np.int64)
        data = head.tobytes() + np.ascontiguousarray(ids, np.int64).tobytes()
        self._place.put(self._key(self._world.rank), data + as_floats(losses).tobytes())
        pending = StoreLosses(self, self._number)
        self._number += 1
        return pending

    def _key(self, rank: int, number: int | None = None) -> str:
        number = self._number if number is None else number
        return f"{self._name}/loss/{rank}/{number % self._ring}"

    def gathered(self, number: int) -> StepLosses:
        """Return the losses of all ranks for a step; waits for them."""
        found = [self._of(rank, number) for rank in range(self._world.num_ranks)]
        digests = [head[1] for head, _ in found]
        if len(set(digests)) > 1:
            raise StateError(
                f"ranks have drawn samples from different scores ({digests}); all ranks have to "
                "call observe for the same batches and load the same state"
            )
        steps = [step for _, step in found]
        return StepLosses(
            np.concatenate([step.ids for step in steps]),
            np.concatenate([step.losses for step in steps]),
        )

    def _of(self, rank: int, number: int) -> tuple[list[int], StepLosses]:
        give_up_s = time.monotonic() + _TIMEOUT_S
        while True:
            data = self._place.get(self._key(rank, number), _TIMEOUT_S)
            head = np.frombuffer(data, np.int64, 3).tolist()
            if head[0] == number:
                count = head[2]
                ids = np.frombuffer(data, np.int64, count, 24)
                return head, StepLosses(ids, np.frombuffer(data, np.float32, count, 24 + 8 * count))
            if time.monotonic() > give_up_s:
                raise RendezvousError(
                    f"rank {rank} has not reported the losses of step {number} within "
                    f"{_TIMEOUT_S:g} s; all ranks have to call observe for the same batches"
                )
            time.sleep(_LOOK_S)


class StoreLosses:
    """Losses of a step that other ranks may still have to put."""

    def __init__(self, exchange: StoreExchange, number: int) -> None:
        self._exchange, self._number = exchange, number

    def is_here(self) -> bool:
        """False: only asking tells, and that takes a round trip for each rank."""
        return False

    def result(self) -> StepLosses:
        """Return the losses of all ranks."""
        return self._exchange.gathered(self._number)
