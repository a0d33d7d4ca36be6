"""Filling the tiers: each unit is fetched once, by the process that claims it first.

The batches that need a unit wait for its fill; a fill ahead of them has no waiter yet. Other ranks
and other jobs fill the same tiers. The process that holds the claim of a unit fetches it. All
others wait for it, and fetch the unit themselves when that takes too long: the process may be
stopped. With peers, the ranks of a node divide the units whose home it is among themselves
(`Holders.is_mine`), and each fetches its share before anyone needs it.

* `Fill` – one unit on its way; `Fills` – all of them in this run, so that none is begun twice
* `FillRun` – a read of neighbouring units from their store
* `peer_reads.UnitsRead` – a `FillRun` that asks another node first; `peer_reads.PeerFills` – which
  units are asked of whom
* `fill_planner.FillPlanner` – the fills that later batches need; `flow.filling.FillCourse` – in
  which order it looks for them
* `flow.filling.FillProgress` – how far that has come; `fill_planner.SharedProgress` – the same with
  a lock; `serving.HomeFill` – what the server of the tiers tells other nodes of it
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from penstock.engine.fetcher import Done, ReadOutcome
from penstock.engine.local_tiers import LocalTiers
from penstock.flow import SourceRates
from penstock.flow.reading import ClaimPatience
from penstock.storage.tier import Tier
from penstock.trace import Kind, Recorder

if TYPE_CHECKING:
    from penstock.engine.peer_reads import PeerFills

_LOOK_S = 0.002
"""Between two looks whether another process has finished a unit."""
_RUN_BYTES_MAX = 4 << 20
"""Bytes of units that are fetched with one request."""

FetchUnits = Callable[[int, int], tuple[list[memoryview], int]]
"""Takes the first unit and a number of units that are neighbours in their store; returns the bytes
of each, and the number of retries."""


class Fill:
    """One unit on its way into a tier."""

    __slots__ = ("_lock", "_waiters", "claimed", "data", "keeps_data", "unit")

    def __init__(self, unit: int) -> None:
        self.unit = unit
        self.data: memoryview | None = None
        """The bytes, where they could not be written to the tier."""
        self.claimed: Tier | None = None
        """The tier whose claim we hold; kept, because the unit may lose its place meanwhile."""
        self.keeps_data = False
        """Whether `data` is set even if the bytes were written to the tier."""
        self._lock = threading.Lock()  # Guards `_waiters`: None once the unit is there.
        self._waiters: list[Done] | None = []

    def when_done(self, done: Done) -> None:
        """Call a function when the unit is there; at once if it is there now."""
        with self._lock:
            if self._waiters is not None:
                self._waiters.append(done)
                return
        done(None)

    def finish(self, error: BaseException | None) -> None:
        """Call all waiters."""
        with self._lock:
            waiters, self._waiters = self._waiters or [], None
        for done in waiters:
            done(error)


class FillRun:
    """Units that are neighbours in their store, fetched with one request if possible."""

    staged = False

    def __init__(self, fills: Sequence[Fill], work: Fills, gap_bytes: int = 0) -> None:
        """`gap_bytes` is the largest gap between two units that is read along with them."""
        self.fills = fills
        self._gap_bytes = gap_bytes
        self.sources: tuple[str, ...] = (work.local_tiers.source(fills[0].unit),)
        self.size_bytes = sum(work.local_tiers.length(fill.unit) for fill in fills)
        self._work = work

    def __call__(self, attempt: int) -> ReadOutcome:
        """Fetch the units that nobody else is fetching; wait a bounded time for the others.

        A second attempt does not wait: it began because the first one takes too long.
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
        # A wait for others is not the speed of the store, so it must not be measured as such.
        return ReadOutcome(moved=moved and not has_waited, num_retries=num_retries)


class Fills:
    """The fills of a run of the loader that are not over, by unit."""

    def __init__(
        self,
        local_tiers: LocalTiers,
        fetch: FetchUnits,
        stores: Callable[[], list[SourceRates]],
        *,
        peer_source: PeerFills | None = None,
        is_damaged: Callable[[int, memoryview], bool] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.local_tiers = local_tiers
        self._recorder = recorder
        self._peer_source = peer_source
        self.is_damaged = is_damaged or (lambda unit, data: False)
        """Whether bytes of a unit do not match the checksums of the index."""
        self._stores = stores
        self._patience = ClaimPatience()
        self._fetch = fetch
        self._lock = threading.Lock()  # Guards `_pending`: two batches may need a unit at once.
        self._pending: dict[int, Fill] = {}

    # -- choosing ----------------------------------------------------------------------------

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
        """Return the reads of some fills; neighbours in the store are read together."""
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
        """Return for each fill but the first whether it can be read with the one before."""
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
        """Forget fills that are over, and call their waiters."""
        with self._lock:
            for fill in run.fills:
                self._pending.pop(fill.unit, None)
        for fill in run.fills:
            fill.finish(error)

    def fetched_now(self, unit: int) -> memoryview | None:
        """Fetch a unit in this thread, and write it to its tier; None if it is being fetched."""
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
        """Return how long to wait for another process; 0 shortly after one was given up."""
        return self._patience.seconds(self._stores(), time.monotonic())

    def hurry(self) -> None:
        """Record that another process holds claims and does not finish."""
        self._patience.gave_up(time.monotonic())

    # -- fetching ----------------------------------------------------------------------------

    def claim(self, fill: Fill) -> bool:
        """Claim a unit; return whether it is now ours to fetch."""
        number = self.local_tiers.tiers.tier_of_one(fill.unit)
        if number < 0:
            return True  # It belongs to no tier: it is fetched only for the batches that wait.
        tier = self.local_tiers.tiers.tiers[number]
        if not tier.claim(fill.unit):
            return False
        fill.claimed = tier
        return True

    def release(self, fill: Fill) -> None:
        """Release the claim of a unit."""
        tier, fill.claimed = fill.claimed, None
        if tier is not None:
            tier.release(fill.unit)

    def found_elsewhere(self, fill: Fill) -> bool:
        """Copy a claimed unit from another place on this node, if it is there."""
        data = self.local_tiers.read_elsewhere(fill.unit)
        if data is not None:
            self._take([fill], [data], may_write=True)
        return data is not None

    def still_missing(self, claimed: list[Fill]) -> list[Fill]:
        """Copy claimed units from other nodes that have kept them; return those still missing."""
        if self._peer_source is None or not claimed:
            return claimed
        return self._peer_source.bring(claimed, self)

    def fetch(self, run: list[Fill], *, may_write: bool) -> int:
        """Fetch neighbouring units from their store; return the number of retries."""
        parts, num_retries = self._fetch(run[0].unit, len(run))
        self._take(run, parts, may_write=may_write)
        return num_retries

    def take_copy(self, fill: Fill, data: memoryview) -> None:
        """Write the bytes of a peer to the tier, unless another process is fetching the unit."""
        if not self.claim(fill):
            fill.data = data
            return
        try:
            self._take([fill], [data], may_write=True)
        finally:
            self.release(fill)

    def take_claimed(self, fill: Fill, data: memoryview) -> None:
        """Write the bytes of a peer to the tier, for a unit that we have claimed."""
        self._take([fill], [data], may_write=True)

    def _take(self, fills: list[Fill], parts: list[memoryview], *, may_write: bool) -> None:
        """Write bytes to the tiers; bytes that do not go there are kept for the waiting batches."""
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
