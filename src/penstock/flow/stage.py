"""Which fetches may use memory next: they are admitted in the order of steps, inside the budget.

Admitted bytes form a window over the next steps. They are counted from here, before their request
has a place at its source: else a fast source would fill the budget with far steps while a near one
waits for its turn at a slow source, and the near step would stall for want of room.

Fills of tiers take memory only on their way, but are far ahead; they have a share of the budget of
their own, so that neither starves the other.
"""

from __future__ import annotations

from heapq import heappop, heappush

from penstock.flow.events import Fetch
from penstock.flow.requests import TrackedFetch

_FILL_SHARE = 4
"""While there are fills, the budget divided by this is for them."""


class StageBudget:
    """The bytes of a flow, counted."""

    def __init__(self, size_bytes_max: int) -> None:
        self._max = size_bytes_max
        self._wanted: list[tuple[int, int, TrackedFetch]] = []
        self._fills: list[tuple[int, int, TrackedFetch]] = []
        self._held: dict[int, list[TrackedFetch]] = {}
        self._steps: list[int] = []
        """Heap of the steps in `_held`."""
        self._last_step = -1
        self.staged_bytes = 0
        """Admitted for a step that is still to come."""
        self.fill_bytes = 0
        """Admitted on their way to a tier."""
        self.planned_bytes = 0
        """Wanted for steps still to come, admitted or not."""
        self.planned_fill_bytes = 0
        """Wanted for tiers and not there yet."""

    def want(self, tracked: TrackedFetch) -> None:
        """Queue a fetch."""
        fetch = tracked.fetch
        if fetch.staged:
            self.planned_bytes += fetch.size_bytes
            heappush(self._wanted, (fetch.step, fetch.number, tracked))
        else:
            self.planned_fill_bytes += fetch.size_bytes
            heappush(self._fills, (fetch.step, fetch.number, tracked))

    def admit(self) -> list[TrackedFetch]:
        """Return the fetches that may begin from now on, earliest step first in each kind."""
        admitted: list[TrackedFetch] = []
        fills, wanted = self._fills, self._wanted
        while fills and self._has_fill_room(fills[0][2].fetch):
            tracked = heappop(fills)[2]
            self.fill_bytes += tracked.fetch.size_bytes
            tracked.is_admitted = True
            admitted.append(tracked)
        while wanted:
            step, _, tracked = wanted[0]
            if not (self._room() >= tracked.fetch.size_bytes or self._is_lowest(step)):
                break
            self._hold(step, tracked)
            admitted.append(tracked)
            heappop(wanted)
        return admitted

    def consume(self, step: int) -> list[TrackedFetch]:
        """Release what steps up to this one held, and return it; what is in flight stays."""
        gone: list[TrackedFetch] = []
        self._last_step = max(self._last_step, step)
        while self._steps and self._steps[0] <= step:
            for tracked in self._held.pop(heappop(self._steps)):
                tracked.is_unwanted = True
                if tracked.is_there and not tracked.is_released:
                    self.release(tracked)
                    gone.append(tracked)
        return gone

    def release(self, tracked: TrackedFetch) -> None:
        """Take a fetch's bytes off the count, once."""
        assert not tracked.is_released, f"{tracked} is released twice"
        tracked.is_released = True
        size_bytes = tracked.fetch.size_bytes
        if tracked.fetch.staged:
            self.planned_bytes -= size_bytes
            self.staged_bytes -= size_bytes if tracked.is_admitted else 0
        else:
            self.planned_fill_bytes -= size_bytes
            self.fill_bytes -= size_bytes if tracked.is_admitted else 0

    def put_aside(self, tracked: TrackedFetch) -> None:
        """Let others have the room of a fill whose source has none of its bytes yet.

        Else two nodes could wait for each other for ever: all the room of each taken by fills that
        wait for the other's, and none left for those that would end it. What is staged keeps its
        room: it is needed here first, and the batch that is next never waits for room.
        """
        if not (tracked.fetch.staged or tracked.is_released) and tracked.is_admitted:
            tracked.is_admitted = False
            self.fill_bytes -= tracked.fetch.size_bytes

    def _hold(self, step: int, tracked: TrackedFetch) -> None:
        self.staged_bytes += tracked.fetch.size_bytes
        tracked.is_admitted = True
        if step <= self._last_step:
            tracked.is_unwanted = True  # Its step has gone by: it is dropped when it arrives.
            return
        held = self._held.get(step)
        if held is None:
            self._held[step] = [tracked]
            heappush(self._steps, step)
        else:
            held.append(tracked)

    def _room(self) -> int:
        fills = self._max // _FILL_SHARE if self._fills or self.fill_bytes else 0
        return self._max - self.staged_bytes - max(fills, self.fill_bytes)

    def _is_lowest(self, step: int) -> bool:
        """Whether nothing earlier is held: the batch that is next must never wait for room."""
        while self._steps:
            if any(not tracked.is_released for tracked in self._held[self._steps[0]]):
                return step <= self._steps[0]
            del self._held[heappop(self._steps)]  # All of it was given up.
        return True

    def _has_fill_room(self, fetch: Fetch) -> bool:
        if not self.fill_bytes:
            return True
        size_bytes = self.fill_bytes + fetch.size_bytes
        return size_bytes <= min(self._max // _FILL_SHARE, self._max - self.staged_bytes)
