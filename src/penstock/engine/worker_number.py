"""How many worker processes a loader has."""

from __future__ import annotations

from penstock.engine.build import workers_max
from penstock.world import World


class WorkerNumber:
    """Decides how many workers there should be."""

    def __init__(self, given: int | None) -> None:
        self._given = given

    def at_start(self, world: World) -> int:
        """Return how many there are when an iteration begins."""
        if self._given is not None:
            return self._given
        return workers_max(world)
