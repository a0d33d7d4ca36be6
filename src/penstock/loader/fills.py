"""Filling the tiers: each unit is fetched once, whoever needs it first.

A fill is wanted by the batches that need its unit, or by nobody yet when it is fetched ahead. Other
ranks and other jobs fill the same tiers; whoever holds a unit's claim fetches it, the others wait
for it, and fetch it themselves when that takes too long: the same bytes written twice do no harm.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from penstock.loader.fetcher import Done, Outcome
from penstock.loader.holding import Holding

_LOOK_S = 0.002
"""Between two looks whether somebody else has finished a unit."""
_PATIENCE_S = 2.0
"""A claim that is held longer than this may be held by a process that is stopped."""

_RUN_BYTES_MAX = 4 << 20
"""Units that are fetched with one request."""

FetchUnits = Callable[[int, int], tuple[list[memoryview], int]]
"""Returns the bytes of so many units from one on, that lie behind each other in their store, and
how often it had to be asked again."""


class Fill:
    """One unit on its way into a tier."""

    staged = False

    def __init__(self, holding: Holding, unit: int, fetch: FetchUnits) -> None:
        self.unit = unit
        self.source = holding.source(unit)
        self.size_bytes = holding.length(unit)
        self.data: memoryview | None = None
        """The bytes, where no tier had room for them."""
        self._holding = holding
        self._tier = holding.tier(unit)
        self._fetch = fetch
        self._lock = threading.Lock()
        self._waiters: list[Done] | None = []

    @property
    def fills(self) -> list[Fill]:
        """Itself: a run of one."""
        return [self]

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
        is_ours = copy == 0 and self._claimed()
        try:
            if not is_ours and self._holding.settle(self.unit):
                return Outcome(moved=False)
            near = self._holding.read_elsewhere(self.unit)
            if near is not None:
                data, num_retries = near, 0
            else:
                (data,), num_retries = self._fetch(self.unit, 1)
            is_ours = is_ours or self._tier.claim(self.unit)
            self.take(data, may_write=is_ours)
            return Outcome(moved=near is None, num_retries=num_retries)
        finally:
            if is_ours:
                self.release()

    def take(self, data: memoryview, *, may_write: bool) -> None:
        """Put the bytes into the tier; what it has no room for is kept for those who wait."""
        if not (may_write and self._tier.write(self.unit, data)):
            self.data = data

    def claim(self) -> bool:
        """Return whether the unit is nowhere on this node and now ours to fetch."""
        return not self._holding.is_present(self.unit) and self._tier.claim(self.unit)

    def release(self) -> None:
        """Give the claim back."""
        self._tier.release(self.unit)

    def _claimed(self) -> bool:
        """Return whether the unit is ours to fetch; else it has come, or took too long."""
        give_up_s = time.monotonic() + _PATIENCE_S
        while not self._tier.claim(self.unit):
            if self._holding.settle(self.unit) or time.monotonic() > give_up_s:
                return False
            time.sleep(_LOOK_S)
        return True


class FillRun:
    """Units that lie behind each other in their store, fetched with one request."""

    staged = False

    def __init__(self, fills: list[Fill], fetch: FetchUnits) -> None:
        self.fills = fills
        self.source = fills[0].source
        self.size_bytes = sum(fill.size_bytes for fill in fills)
        self._fetch = fetch

    def __call__(self, copy: int) -> Outcome:
        """Fetch what nobody else is fetching; wait for the rest."""
        claimed = [fill for fill in self.fills if copy == 0 and fill.claim()]
        ours = {fill.unit for fill in claimed}
        try:
            num_retries = sum(map(self._fetched, _neighbours(claimed)))
        finally:
            for fill in claimed:
                fill.release()
        outcomes = [fill(copy) for fill in self.fills if fill.unit not in ours]
        return Outcome(
            moved=bool(claimed) or any(o.moved for o in outcomes),
            num_retries=num_retries + sum(o.num_retries for o in outcomes),
        )

    def _fetched(self, run: list[Fill]) -> int:
        parts, num_retries = self._fetch(run[0].unit, len(run))
        for fill, data in zip(run, parts, strict=True):
            fill.take(data, may_write=True)
        return num_retries


def _neighbours(fills: list[Fill]) -> list[list[Fill]]:
    """Cut a list of fills where a unit is missing in between."""
    runs: list[list[Fill]] = []
    for fill in fills:
        if runs and runs[-1][-1].unit + 1 == fill.unit:
            runs[-1].append(fill)
        else:
            runs.append([fill])
    return runs


class Fills:
    """All fills of a run that are not over, by unit."""

    def __init__(self, holding: Holding, fetch: FetchUnits) -> None:
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

    def reads(self, fills: list[Fill], gap_bytes_max: int) -> list[Fill | FillRun]:
        """Return the requests for some fills: neighbours in the store together."""
        if len(fills) < 2:
            return list(fills)
        by_unit = sorted(fills, key=lambda fill: fill.unit)
        units = np.array([fill.unit for fill in by_unit])
        place, number, offset, length = self._holding.units.extents(units)
        ends = offset + length
        joined = (
            (np.diff(units) == 1)
            & (np.diff(place) == 0)
            & (np.diff(number) == 0)
            & (offset[1:] >= ends[:-1])
            & (offset[1:] - ends[:-1] <= gap_bytes_max)
        ).tolist()
        runs, size_bytes = [[by_unit[0]]], by_unit[0].size_bytes
        for fill, is_joined in zip(by_unit[1:], joined, strict=True):
            size_bytes += fill.size_bytes
            if is_joined and size_bytes <= _RUN_BYTES_MAX:
                runs[-1].append(fill)
            else:
                runs.append([fill])
                size_bytes = fill.size_bytes
        return [run[0] if len(run) == 1 else FillRun(run, self._fetch) for run in runs]

    def finish(self, read: Fill | FillRun, error: BaseException | None) -> None:
        """Forget fills that are over and tell all who wait for them."""
        with self._lock:
            for fill in read.fills:
                self._pending.pop(fill.unit, None)
        for fill in read.fills:
            fill.finish(error)
