"""Filling the tiers: each unit is fetched once, whoever needs it first.

A fill is wanted by the batches that need its unit, or by nobody yet when it is fetched ahead. Other
ranks and other jobs fill the same tiers; whoever holds a unit's claim fetches it, the others wait
for it, and fetch it themselves when that takes too long: the same bytes written twice do no harm.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from penstock.loader.fetcher import Done, Outcome
from penstock.loader.holding import Holding
from penstock.storage.tier import Tier

_LOOK_S = 0.002
"""Between two looks whether somebody else has finished a unit."""
_PATIENCE_S = 2.0
"""A claim that is held longer than this may be held by a process that is stopped."""

FetchUnit = Callable[[int], tuple[memoryview, int]]
"""Returns the bytes of a unit from its store, and how often it had to be asked again."""


class Fill:
    """One unit on its way into a tier."""

    staged = False

    def __init__(self, holding: Holding, unit: int, fetch: FetchUnit) -> None:
        self.unit = unit
        self.source = holding.source(unit)
        self.size_bytes = holding.length(unit)
        self.data: memoryview | None = None
        """The bytes, where no tier had room for them."""
        self._holding = holding
        self._fetch = fetch
        self._lock = threading.Lock()
        self._waiters: list[Done] | None = []

    def when_done(self, done: Done) -> None:
        """Have something called when the unit is there, at once if it is."""
        with self._lock:
            if self._waiters is not None:
                self._waiters.append(done)
                return
        done(None)

    def finish(self, error: BaseException | None) -> None:
        """Call all who wait."""
        with self._lock:
            waiters, self._waiters = self._waiters or [], None
        for done in waiters:
            done(error)

    def __call__(self, copy: int) -> Outcome:
        """Have the unit in its tier: find it there, wait for another who fetches it, or fetch it.

        A second copy does not wait: it is there because the first one takes too long.
        """
        tier = self._holding.tier(self.unit)
        is_ours = copy == 0 and self._claimed(tier)
        try:
            if self._holding.settle(self.unit):
                return Outcome(moved=False)
            near = self._holding.read_elsewhere(self.unit)
            data, num_retries = (near, 0) if near is not None else self._fetch(self.unit)
            is_ours = is_ours or tier.claim(self.unit)
            if not (is_ours and tier.write(self.unit, data)):
                self.data = data
            return Outcome(moved=near is None, num_retries=num_retries)
        finally:
            if is_ours:
                tier.release(self.unit)

    def _claimed(self, tier: Tier) -> bool:
        """Return whether the unit is ours to fetch; else it has come, or took too long."""
        give_up_s = time.monotonic() + _PATIENCE_S
        while not tier.claim(self.unit):
            if self._holding.settle(self.unit) or time.monotonic() > give_up_s:
                return False
            time.sleep(_LOOK_S)
        return True


class Fills:
    """All fills of a run that are not over, by unit."""

    def __init__(self, holding: Holding, fetch: FetchUnit) -> None:
        self._holding = holding
        self._fetch = fetch
        self._lock = threading.Lock()
        self._pending: dict[int, Fill] = {}

    def of(self, unit: int) -> tuple[Fill, bool]:
        """Return the fill of a unit, and whether it is new and has to be begun."""
        with self._lock:
            fill = self._pending.get(unit)
            if fill is not None:
                return fill, False
            fill = self._pending[unit] = Fill(self._holding, unit, self._fetch)
            return fill, True

    def finish(self, fill: Fill, error: BaseException | None) -> None:
        """Forget a fill that is over and tell all who wait for it."""
        with self._lock:
            self._pending.pop(fill.unit, None)
        fill.finish(error)
