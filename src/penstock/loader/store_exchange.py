"""Exchange of losses through the store where ranks meet, for jobs without a process group.

Ranks meet first, and agree on a name that no earlier run has used, so that no old value is read.
Each rank has a ring of keys under that name. A value names its step. It is overwritten when every
rank has long used it: no rank is more than two windows ahead of another.
"""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.dataset.part import Ints
from penstock.engine.peers.facts import TEXT_MAX, NodeRecord
from penstock.engine.peers.join import JOIN_TIMEOUT_S
from penstock.engine.peers.meeting import Meeting, new_hello
from penstock.errors import RendezvousError
from penstock.loader.losses import StepMark, as_floats, check_marks
from penstock.order.importance import StepLosses

if TYPE_CHECKING:
    from penstock.engine.peers.rendezvous import Rendezvous
    from penstock.world import World

_TIMEOUT_S = 600.0
_LOOK_S = 0.002
_HEAD = 5
"""Integers in front of a rank's losses: the step, the three of its mark, the number of losses."""


class StoreExchange:
    """Exchanges losses by keys of a store."""

    def __init__(self, place: Rendezvous, world: World, name: str, ring: int) -> None:
        """Meet the other ranks under a name; `ring` is more steps than two windows have."""
        self._place, self._world, self._ring = place, world, ring
        self._name = f"{name}/{_agreed(place, world, name)}"
        self._number = 0

    def begin(self, ids: Ints, losses: Any, mark: StepMark) -> StoreLosses:
        """Put this rank's losses."""
        numbers = [self._number, *mark, len(ids)]
        head = np.array(numbers, np.uint64)  # A digest has 64 bits.
        data = head.tobytes() + np.ascontiguousarray(ids, np.int64).tobytes()
        self._place.put(self._key(self._world.rank), data + as_floats(losses).tobytes())
        pending = StoreLosses(self, self._number)
        self._number += 1
        return pending

    def _key(self, rank: int, number: int | None = None) -> str:
        number = self._number if number is None else number
        return f"{self._name}/{rank}/{number % self._ring}"

    def gathered(self, number: int) -> StepLosses:
        """Return the losses of all ranks for a step; waits for them."""
        found = [self._of(rank, number) for rank in range(self._world.num_ranks)]
        check_marks([mark for mark, _ in found])
        steps = [step for _, step in found]
        return StepLosses(
            np.concatenate([step.ids for step in steps]),
            np.concatenate([step.losses for step in steps]),
        )

    def _of(self, rank: int, number: int) -> tuple[StepMark, StepLosses]:
        give_up_s = time.monotonic() + _TIMEOUT_S
        while True:
            data = self._place.get(self._key(rank, number), _TIMEOUT_S)
            found, *mark, count = np.frombuffer(data, np.uint64, _HEAD).tolist()
            if found == number:
                ids = np.frombuffer(data, np.int64, count, 8 * _HEAD)
                losses = np.frombuffer(data, np.float32, count, 8 * (_HEAD + count))
                return StepMark(*mark), StepLosses(ids, losses)
            if time.monotonic() > give_up_s:
                raise RendezvousError(
                    f"rank {rank} has not reported the losses of step {number} within "
                    f"{_TIMEOUT_S:g} s; all ranks have to call observe for the same batches"
                )
            time.sleep(_LOOK_S)


def _agreed(place: Rendezvous, world: World, name: str) -> str:
    """Return a name that was drawn now, the same on all ranks."""
    meeting = Meeting(
        place, name, num_ranks=world.num_ranks, timeout_s=JOIN_TIMEOUT_S, is_once=False
    )
    host = socket.gethostname()[:TEXT_MAX]
    # Each rank meets the others as a node of one rank that has no tiers.
    record = NodeRecord(world.rank, "", (), 0, 0, host)
    hello = new_hello(
        rank=world.rank, num_local_ranks=1, num_ranks=world.num_ranks, record=record, digest={}
    )
    roster = meeting.lead(hello) if world.rank == 0 else meeting.follow(hello)
    return roster.run_id.hex()


class StoreLosses:
    """Losses of a step; other ranks may not have put theirs yet."""

    def __init__(self, exchange: StoreExchange, number: int) -> None:
        self._exchange, self._number = exchange, number

    def is_here(self) -> bool:
        """Return False: only a round trip for each rank could tell."""
        return False

    def result(self) -> StepLosses:
        """Return the losses of all ranks."""
        return self._exchange.gathered(self._number)
