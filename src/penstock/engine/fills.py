"""Filling the tiers: each unit is fetched once, whoever needs it first.

A fill is wanted by the batches that need its unit, or by nobody yet when it is fetched ahead. Other
ranks and other jobs fill the same tiers; whoever holds a unit's claim fetches it, the others wait
for it, and fetch it for themselves when that takes too long: its process may be stopped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from penstock.engine.fetcher import Done, ReadOutcome
from penstock.engine.local_tiers import LocalTiers
from penstock.flow import SourceRates
from penstock.flow.reading import ClaimPatience
from penstock.storage.tier import Tier
from penstock.trace import Kind, Recorder

_LOOK_S = 0.002
"""Between two looks whether somebody else has finished a unit."""
_RUN_BYTES_MAX = 4 << 20
"""Units that are fetched with one request."""

FetchUnits = Callable[[int, int], tuple[list[memoryview], int]]
"""Returns the bytes of so many units from one on, that lie behind each other in their store, and
how often it had to be asked again."""


class PeerFillSource(Protocol):
    """What other nodes are asked for before the store is."""

    def requests(self, fills: list[Fill], work: Fills) -> tuple[list[FillRun], list[Fill]]:
        """Return the requests for those of some fills that other nodes have, and the others."""
        ...

    def bring(self, fills: list[Fill], work: Fills) -> list[Fill]:
        """Take claimed units from whoever has kept them in our place; return the missing ones."""
        ...


class Fill:
    """One unit on its way into a tier."""

    __slots__ = ("_lock", "_waiters", "claimed", "data", "keeps_data", "unit")

    def __init__(self, unit: int) -> None:
        self.unit = unit
        self.data: memoryview | None = None
        """The bytes, where they could not be put into the tier."""
        self.claimed: Tier | None = None
        """The tier whose claim on the unit we hold; units of some tiers lose their place."""
        self.keeps_data = False
        """Whether they are also wanted here where they could."""
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


class FillRun:
    """Units that lie behind each other in their store, fetched with one request if possible."""

    staged = False

    def __init__(self, fills: Sequence[Fill], work: Fills, gap_bytes: int = 0) -> None:
        """`gap_bytes` is the largest gap between two of them that is read with them."""
        self.fills = fills
        self._gap_bytes = gap_bytes
        self.sources: tuple[str, ...] = (work.local_tiers.source(fills[0].unit),)
        self.size_bytes = sum(work.local_tiers.length(fill.unit) for fill in fills)
        self._work = work

    def __call__(self, attempt: int) -> ReadOutcome:
        """Fetch what nobody else is fetching; wait for the rest, but not for ever.

        A second copy does not wait: it is there because the first one takes too long.
        """
        work, left, moved, num_retries = self._work, list(self.fills), False, 0
        give_up_s = time.monotonic() + (0.0 if attempt else work.patience_s())
        has_waited = False
        while left:
            claimed = [fill for fill in left if attempt == 0 and work.claim(fill)]
            try:
                missing = [fill for fill in claimed if not work.found_elsewhere(fill)]
                for run in work.neighbours(work.still_missing(missing), self._gap_bytes):
                    num_retries += work.fetch(run, may_write=True)
                    moved = True
            finally:
                for fill in claimed:
                    work.release(fill)
            left = [f for f in left if f not in claimed and not work.local_tiers.settle(f.unit)]
            if left and time.monotonic() >= give_up_s:
                if attempt == 0:
                    work.hurry()
                runs = work.neighbours(left, self._gap_bytes)
                num_retries += sum(work.fetch(run, may_write=False) for run in runs)
                moved, left = True, []
            elif left:
                has_waited = True
                time.sleep(_LOOK_S)
        # Who has waited for others knows nothing about the speed of the store.
        return ReadOutcome(moved=moved and not has_waited, num_retries=num_retries)


class Fills:
    """All fills of a run of the loader that are not over, by unit."""

    def __init__(
        self,
        local_tiers: LocalTiers,
        fetch: FetchUnits,
        stores: Callable[[], list[SourceRates]],
        *,
        peer_source: PeerFillSource | None = None,
        is_damaged: Callable[[int, memoryview], bool] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.local_tiers = local_tiers
        self._recorder = recorder
        self._peer_source = peer_source
        self.is_damaged = is_damaged or (lambda unit, data: False)
        """Whether bytes are not those of a unit, as far as the index knows."""
        self._stores = stores
        self._patience = ClaimPatience()
        self._fetch = fetch
        self._lock = threading.Lock()
        self._pending: dict[int, Fill] = {}

    # -- which -------------------------------------------------------------------------------

    def of(self, unit: int) -> tuple[Fill, bool]:
        """Return the fill of a unit, and whether it is new and has to be begun."""
        with self._lock:
            fill = self._pending.get(unit)
            if fill is not None:
                return fill, False
            fill = self._pending[unit] = Fill(unit)
            return fill, True

    def is_pending(self, unit: int) -> bool:
        """Return whether a unit is being fetched."""
        return unit in self._pending

    def reads(self, fills: list[Fill], gap_bytes_max: int) -> list[FillRun]:
        """Return the requests for some fills: neighbours in the store together."""
        by_unit = sorted(fills, key=lambda fill: fill.unit)
        if self._peer_source is None:
            return self._runs(by_unit, gap_bytes_max)
        asked, own = self._peer_source.requests(by_unit, self)
        return [*asked, *self._runs(own, gap_bytes_max)]

    def _runs(self, by_unit: list[Fill], gap_bytes_max: int) -> list[FillRun]:
        runs = self.neighbours(by_unit, gap_bytes_max)
        return [FillRun(run, self, gap_bytes_max) for run in runs]

    def neighbours(self, by_unit: list[Fill], gap_bytes_max: int) -> list[list[Fill]]:
        """Cut fills, in the order of their units, into runs that one request can bring."""
        runs = [[fill] for fill in by_unit[:1]]
        if len(by_unit) > 1:
            lengths = [self.local_tiers.length(fill.unit) for fill in by_unit]
            size_bytes, joined = lengths[0], self._joined(by_unit, gap_bytes_max)
            for fill, length, is_joined in zip(by_unit[1:], lengths[1:], joined, strict=True):
                size_bytes += length
                if is_joined and size_bytes <= _RUN_BYTES_MAX:
                    runs[-1].append(fill)
                else:
                    runs.append([fill])
                    size_bytes = length
        return runs

    def _joined(self, by_unit: list[Fill], gap_bytes_max: int) -> list[bool]:
        """Return of each fill but the first whether it lies right behind the one before."""
        units = np.array([fill.unit for fill in by_unit])
        place, number, offset, length = self.local_tiers.units.extents(units)
        ends = offset + length
        joined = (
            (np.diff(units) == 1)
            & (np.diff(place) == 0)
            & (np.diff(number) == 0)
            & (offset[1:] >= ends[:-1])
            & (offset[1:] - ends[:-1] <= gap_bytes_max)
        )
        return list(joined.tolist())

    def finish(self, run: FillRun, error: BaseException | None) -> None:
        """Forget fills that are over and tell all who wait for them."""
        with self._lock:
            for fill in run.fills:
                self._pending.pop(fill.unit, None)
        for fill in run.fills:
            fill.finish(error)

    def fetched_now(self, unit: int) -> memoryview | None:
        """Fetch a unit in this thread, into its tier as well; None where somebody else does."""
        fill, is_new = self.of(unit)
        if not is_new:
            return None
        fill.keeps_data = True
        run = FillRun([fill], self)
        try:
            run(0)
        except BaseException as error:
            self.finish(run, error)
            raise
        self.finish(run, None)
        return fill.data

    def patience_s(self) -> float:
        """Return how long to wait for another process: not at all when one was given up lately."""
        return self._patience.seconds(self._stores(), time.monotonic())

    def hurry(self) -> None:
        """Take note that another process holds claims and does not come to an end."""
        self._patience.gave_up(time.monotonic())

    # -- how ---------------------------------------------------------------------------------

    def claim(self, fill: Fill) -> bool:
        """Return whether a unit is not in its tier and now ours to fetch."""
        number = self.local_tiers.tiers.tier_of_one(fill.unit)
        if number < 0:
            return True  # It does not belong here: it is fetched for those who wait alone.
        tier = self.local_tiers.tiers.tiers[number]
        if not tier.claim(fill.unit):
            return False
        fill.claimed = tier
        return True

    def release(self, fill: Fill) -> None:
        """Give the claim back."""
        tier, fill.claimed = fill.claimed, None
        if tier is not None:
            tier.release(fill.unit)

    def found_elsewhere(self, fill: Fill) -> bool:
        """Take a claimed unit from another tier of the node, if it is there."""
        data = self.local_tiers.read_elsewhere(fill.unit)
        if data is not None:
            self._take([fill], [data], may_write=True)
        return data is not None

    def still_missing(self, claimed: list[Fill]) -> list[Fill]:
        """Take claimed units from other nodes, where that spares the store; return the others."""
        if self._peer_source is None or not claimed:
            return claimed
        return self._peer_source.bring(claimed, self)

    def fetch(self, run: list[Fill], *, may_write: bool) -> int:
        """Fetch neighbouring units from their store; return how often it had to be asked again."""
        parts, num_retries = self._fetch(run[0].unit, len(run))
        self._take(run, parts, may_write=may_write)
        return num_retries

    def take_copy(self, fill: Fill, data: memoryview) -> None:
        """Put what a peer has sent into the tier, unless somebody else just does."""
        if not self.claim(fill):
            fill.data = data
            return
        try:
            self._take([fill], [data], may_write=True)
        finally:
            self.release(fill)

    def take_claimed(self, fill: Fill, data: memoryview) -> None:
        """Put into the tier what a peer has sent for a unit that we have claimed."""
        self._take([fill], [data], may_write=True)

    def _take(self, fills: list[Fill], parts: list[memoryview], *, may_write: bool) -> None:
        """Put bytes into the tiers; what cannot go there is kept for those who wait for it."""
        begin_ns = 0 if self._recorder is None else time.perf_counter_ns()
        written: dict[str, tuple[int, int]] = {}
        for fill, data in zip(fills, parts, strict=True):
            tier = fill.claimed
            if may_write and tier is not None and tier.write(fill.unit, data):
                count, size_bytes = written.get(tier.source, (0, 0))
                written[tier.source] = count + 1, size_bytes + len(data)
                if not fill.keeps_data:
                    continue
            fill.data = data
        if self._recorder is not None:
            now_ns = time.perf_counter_ns()
            for source, (count, size_bytes) in written.items():
                self._recorder.span(
                    Kind.TIER_FILL,
                    begin_ns,
                    now_ns,
                    source_id=self._recorder.name(source),
                    size_bytes=size_bytes,
                    count=count,
                )
