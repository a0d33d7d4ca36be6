"""Reads that ask other nodes first: ranges for the batches of this rank, units for the tiers here.

If the peer does not answer, does not have some bytes, or sends other bytes than were indexed, both
read those from the store. Each answer is received into a buffer of its own, never into
memory that a batch already looks at; the copy that is complete first counts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from penstock.dataset.bound import BoundPart
from penstock.dataset.checks import has_checksums
from penstock.dataset.part import Ints
from penstock.engine.fetcher import Done, ReadOutcome
from penstock.engine.fills import Fill, FillRun, Fills
from penstock.engine.local_tiers import LocalTiers
from penstock.engine.peers.base import Answer, Ask
from penstock.engine.peers.part_sums import are_parts
from penstock.errors import PeerError
from penstock.flow.holders import Sources

if TYPE_CHECKING:
    from penstock.engine.cluster import Cluster

PIECE_BYTES = 16 << 20
"""Bytes of one answer."""
_INSIDE, _LENGTH = 3, 4
"""Columns of `Ask.ranges`."""
RANGES_MAX, BYTES_MAX = 32, 1 << 20
"""Most ranges and bytes of one question: more would make no link faster, and if the peer is lost,
all of them are read from the store one after the other."""
_GAP_BYTES = 16 << 10
"""The largest gap that is read between two units that no peer has sent, with one request."""
_WAIT_S = 600.0
"""How long a peer may take to fetch the units itself; it keeps sending signs of life meanwhile."""
_BRING_S = 5.0
"""How long to wait for a peer that is asked only for what it has now."""


class PeerQuestion(NamedTuple):
    """A question to a peer, with what its row in a trace will say."""

    source: str
    begin_ns: int
    step: int = -1
    epoch: int = -1
    flags: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRanges:
    """Ranges of units that one peer shall send, with their samples."""

    ranges: Ints
    """A row for each range, as in `Ask`."""
    bound: BoundPart
    table: int
    ids: Ints
    """The samples of the part, one for each range."""

    def at(self, chosen: Ints | slice) -> PeerRanges:
        """Return some of the ranges."""
        return PeerRanges(
            ranges=self.ranges[chosen], bound=self.bound, table=self.table, ids=self.ids[chosen]
        )

    def cut(self) -> list[PeerRanges]:
        """Return the ranges in parts, each small enough for one question."""
        return [self.at(slice(start, stop)) for start, stop in peer_cuts(self.ranges)]


def peer_cuts(ranges: Ints) -> Iterator[tuple[int, int]]:
    """Yield start and stop of each part that is asked for with one question."""
    sizes = np.cumsum(ranges[:, _LENGTH])
    start = 0
    while start < len(sizes):
        before = int(sizes[start - 1]) if start else 0
        stop = int(np.searchsorted(sizes, before + BYTES_MAX, side="right"))
        stop = min(max(stop, start + 1), start + RANGES_MAX)
        yield start, stop
        start = stop


class RangesRead:
    """Ranges on their way into the stage of a batch."""

    staged = True

    def __init__(
        self,
        wanted: PeerRanges,
        sources: Sources,
        cluster: Cluster,
        read: Callable[[PeerRanges, int], tuple[memoryview, int]],
    ) -> None:
        self.wanted = wanted
        self.sources = sources.names
        self._may_wait_at = sources.may_wait_at
        self.size_bytes = int(wanted.ranges[:, _LENGTH].sum())
        self._cluster = cluster
        self._read = read
        # Guards `parts`: a peer and the store may bring the same range, and the first one counts.
        self._lock = threading.Lock()
        self.parts: list[memoryview | None] = [None] * len(wanted.ranges)
        """The bytes of each range, once they are there."""

    def _missing(self) -> list[int]:
        with self._lock:
            return [i for i, part in enumerate(self.parts) if part is None]

    def _take(self, number: int, data: memoryview) -> None:
        with self._lock:
            if self.parts[number] is None:  # Else another attempt was first, and it may be in use.
                self.parts[number] = data

    def __call__(self, attempt: int) -> ReadOutcome:
        """Read the missing ranges from the store."""
        num_retries = 0
        for number in self._missing():
            data, again = self._read(self.wanted, number)
            num_retries += again
            self._take(number, data)
        return ReadOutcome(moved=True, num_retries=num_retries)

    def ask(self, source: str, deferred: Callable[[], None], answered: Done) -> None:
        """Ask a peer for the missing ranges."""
        missing = self._missing()
        ranges = self.wanted.ranges[missing]
        into = self._cluster.buffer(int(ranges[:, _LENGTH].sum()))
        asked = self._cluster.begun(source)

        def done(answer: Answer | PeerError) -> None:
            if isinstance(answer, PeerError):
                self._cluster.failed(asked)
            else:
                answer = self._arrived(asked, missing, into, answer) or answer
            answered(answer if isinstance(answer, PeerError) else None)

        wait_s = _WAIT_S if self._may_wait_at(source) else 0.0
        ask = Ask(shelf=self._cluster.shelf, ranges=ranges, wait_s=wait_s)
        self._cluster.ask(source, ask, into, parked=deferred, done=done)

    def _arrived(
        self, asked: PeerQuestion, missing: list[int], into: memoryview, answer: Answer
    ) -> PeerError | None:
        """Take the good ranges; return an error if some are damaged or absent."""
        source = asked.source
        wanted, absent = self.wanted, set(answer.absent)
        lengths = wanted.ranges[missing, _LENGTH].tolist()
        sums = _expected(wanted, missing, answer)
        start = size_bytes = 0
        damaged = ""
        for i, number in enumerate(missing):
            data = into[start : start + lengths[i]]
            start += lengths[i]
            if i in absent:
                continue
            if sums[i] is not None and xxhash.xxh3_64_intdigest(data) != sums[i]:
                damaged = wanted.bound.where(int(wanted.ids[number]))
                continue
            size_bytes += lengths[i]
            self._take(number, data)
        self._cluster.count(asked, size_bytes, len(missing) - len(absent), answer)
        if damaged:
            self._cluster.blame(source, f"other bytes than were indexed of {damaged}")
            return PeerError(f"{source} sent wrong bytes of {damaged}", kind="broken")
        if absent:
            return PeerError(f"{source} lacks {len(absent)} of {len(missing)}", kind="absent")
        return None


def _expected(wanted: PeerRanges, numbers: list[int], answer: Answer) -> list[int | None]:
    """Return the checksum that each range must have; None if there is none.

    A checksum of the index is the most reliable. Without one it is the checksum that the peer has
    sent: of the whole unit, or of the part that was asked for.
    """
    if has_checksums(wanted.bound):
        blocks = wanted.bound.part.tables[0].extents(wanted.ids[numbers]).block
        return list(wanted.bound.part.columns["checksum"][blocks].tolist())
    asked = wanted.ranges[numbers]
    has_sum = (asked[:, _LENGTH] == asked[:, 2]) | are_parts(asked)
    return [
        total if is_known else None
        for total, is_known in zip(answer.sums, has_sum.tolist(), strict=True)
    ]


class UnitsRead(FillRun):
    """Units that other nodes have, on their way into a tier here."""

    def __init__(
        self,
        fills: Sequence[Fill],
        work: Fills,
        sources: tuple[str, ...],
        ranges: Ints,
        cluster: Cluster,
    ) -> None:
        super().__init__(fills, work, _GAP_BYTES)
        self.sources = sources
        self._ranges = ranges
        self._cluster = cluster
        self._is_asked = False

    def __call__(self, attempt: int) -> ReadOutcome:
        """Read from the store; unless a peer is being asked, this is the first attempt."""
        return super().__call__(attempt if self._is_asked else 0)

    def ask(self, source: str, deferred: Callable[[], None], answered: Done) -> None:
        """Ask a peer for all units."""
        into = self._cluster.buffer(self.size_bytes)
        self._is_asked = True
        asked = self._cluster.begun(source)

        def take(answer: Answer) -> None:
            error: BaseException | None
            try:
                error = self._arrived(asked, into, answer, self._work.take_copy)
            except BaseException as raised:  # Raised again in the thread that asks for the batch.
                error = raised
            self._is_asked = False
            answered(error)

        def done(answer: Answer | PeerError) -> None:
            if isinstance(answer, PeerError):
                self._cluster.failed(asked)
                self._is_asked = False
                answered(answer)
            else:
                self._cluster.run_in_thread(lambda: take(answer))

        ask = Ask(shelf=self._cluster.shelf, ranges=self._ranges, wait_s=_WAIT_S)
        self._cluster.ask(source, ask, into, parked=deferred, done=done)

    def bring(self, source: str) -> list[Fill]:
        """Ask a peer for the units that it has now, and wait; return the fills that have come.

        The units are claimed by the caller.
        """
        into = self._cluster.buffer(self.size_bytes)
        asked = self._cluster.begun(source)
        answers: list[Answer | PeerError] = []
        brought: list[Fill] = []
        has_come = threading.Event()  # `done` is called in the thread of the client.

        def done(answer: Answer | PeerError) -> None:
            answers.append(answer)
            has_come.set()

        def take(fill: Fill, data: memoryview) -> None:
            self._work.take_claimed(fill, data)
            brought.append(fill)

        ask = Ask(shelf=self._cluster.shelf, ranges=self._ranges)
        self._cluster.ask(source, ask, into, parked=lambda: None, done=done)
        if has_come.wait(_BRING_S) and not isinstance(answers[0], PeerError):
            self._arrived(asked, into, answers[0], take)
        else:
            self._cluster.failed(asked)
        return brought

    def _arrived(
        self,
        asked: PeerQuestion,
        into: memoryview,
        answer: Answer,
        take: Callable[[Fill, memoryview], None],
    ) -> PeerError | None:
        source = asked.source
        lengths, start, damaged = self._ranges[:, _LENGTH].tolist(), 0, -1
        absent = set(answer.absent)
        size_bytes = 0
        for i, fill in enumerate(self.fills):
            data = into[start : start + lengths[i]]
            start += lengths[i]
            if i in absent:
                continue
            if xxhash.xxh3_64_intdigest(data) != answer.sums[i] or self._work.is_damaged(
                fill.unit, data
            ):
                damaged = fill.unit
                continue
            size_bytes += lengths[i]
            take(fill, data)
        self._cluster.count(asked, size_bytes, len(self.fills) - len(absent), answer)
        if damaged >= 0:
            self._cluster.blame(source, f"other bytes than were indexed of unit {damaged}")
            return PeerError(f"{source} sent wrong bytes of unit {damaged}", kind="broken")
        if absent:
            return PeerError(f"{source} lacks {len(absent)} of {len(lengths)}", kind="absent")
        return None


class PeerFills:
    """Asks other nodes for units before the store is asked.

    A unit whose home is another node is copied from there. A unit whose home is here comes from the
    store, with one exception: while a node was cut off or stood still, others may have read its
    share in its place. Then it copies what it lacks from them; else those bytes would be read from
    the store twice.
    """

    def __init__(self, local_tiers: LocalTiers, cluster: Cluster) -> None:
        self._local_tiers = local_tiers
        self._cluster = cluster

    def requests(self, fills: list[Fill], work: Fills) -> tuple[list[FillRun], list[Fill]]:
        """Return reads of the units whose home is another node, and the other fills."""
        units = np.array([fill.unit for fill in fills], np.int64)
        asked: list[FillRun] = []
        own: list[Fill] = []
        for sources, numbers in self._cluster.holders.by_home(units, ""):
            several = [fills[n] for n in numbers.tolist()]
            if sources.home:
                asked += self._reads(several, work, sources.home)
            else:
                own += several
        return asked, sorted(own, key=lambda fill: fill.unit)

    def bring(self, fills: list[Fill], work: Fills) -> list[Fill]:
        """Copy claimed units from nodes that have kept them in our place; return the missing."""
        units = np.array([fill.unit for fill in fills], np.int64)
        missing: list[Fill] = []
        for source, numbers in self._cluster.stand_ins(units):
            several = [fills[n] for n in numbers.tolist()]
            for read in self._reads(several, work, source) if source else ():
                brought = read.bring(source)
                several = [fill for fill in several if fill not in brought]
            missing += several
        return sorted(missing, key=lambda fill: fill.unit)

    def _reads(self, fills: list[Fill], work: Fills, source: str) -> list[UnitsRead]:
        """Return reads of one peer, each small enough for one question."""
        local_tiers, cluster = self._local_tiers, self._cluster
        units = np.array([fill.unit for fill in fills], np.int64)
        ranges = local_tiers.ranges(units, 0, local_tiers.layout.lengths[units])
        return [
            UnitsRead(
                fills[start:stop],
                work,
                (source, local_tiers.source(fills[start].unit)),
                ranges[start:stop],
                cluster,
            )
            for start, stop in peer_cuts(ranges)
        ]


# -- large questions -----------------------------------------------------------------------------

AnswerDone = Callable[[Answer | PeerError], None]
AskOne = Callable[[Ask, memoryview, AnswerDone], None]


def ask_in_pieces(ask: Ask, into: memoryview, ask_one: AskOne, done: AnswerDone) -> None:
    """Ask for ranges of any size; `done` is called with one answer for all of them.

    An answer is bounded, a unit is not: a row group of a Parquet file or a video may have hundreds
    of megabytes. So ranges are cut into pieces, which are asked for one after the other.
    """
    if len(into) <= PIECE_BYTES:
        ask_one(ask, into, done)
        return
    _Pieces(ask, into, ask_one, done).next()


class _Pieces:
    """A question that takes several answers."""

    def __init__(self, ask: Ask, into: memoryview, ask_one: AskOne, done: AnswerDone) -> None:
        self._ask = ask
        self._into = into
        self._ask_one = ask_one
        self._done = done
        self._rows, self._range_of = _cut(ask.ranges)
        self._at = self._byte_at = 0
        self._sums = [0] * len(ask.ranges)
        self._absent: set[int] = set()
        self._answers: list[Answer] = []

    def next(self) -> None:
        """Ask for the next pieces."""
        ends = np.cumsum(self._rows[self._at :, _LENGTH])
        count = max(1, int(np.searchsorted(ends, PIECE_BYTES, side="right")))
        rows = self._rows[self._at : self._at + count]
        size_bytes = int(ends[count - 1])
        view = self._into[self._byte_at : self._byte_at + size_bytes]
        self._ask_one(replace(self._ask, ranges=rows), view, self._answered)

    def _answered(self, answer: Answer | PeerError) -> None:
        if isinstance(answer, PeerError):
            self._done(answer)
            return
        numbers = self._range_of[self._at : self._at + len(answer.sums)].tolist()
        for number, total in zip(numbers, answer.sums, strict=True):
            self._sums[number] = total
        self._absent |= {numbers[i] for i in answer.absent}
        self._answers.append(answer)
        self._byte_at += int(self._rows[self._at : self._at + len(numbers), _LENGTH].sum())
        self._at += len(numbers)
        if self._at < len(self._rows):
            self.next()
            return
        whole = Answer(
            absent=tuple(sorted(self._absent)),
            sums=tuple(self._sums),
            progress_mark=answer.progress_mark,
            was_parked=any(each.was_parked for each in self._answers),
            seconds=sum(each.seconds for each in self._answers),
        )
        self._done(whole)


def _cut(ranges: Ints) -> tuple[Ints, Ints]:
    """Return ranges in pieces, and the number of the range that each piece belongs to."""
    pieces = np.maximum(1, -(-ranges[:, _LENGTH] // PIECE_BYTES))
    range_of = np.repeat(np.arange(len(ranges)), pieces)
    place = np.arange(len(range_of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    rows = ranges[range_of].copy()
    before = place * PIECE_BYTES
    rows[:, _INSIDE] += before
    rows[:, _LENGTH] = np.minimum(PIECE_BYTES, rows[:, _LENGTH] - before)
    return rows, range_of
