"""What other nodes are asked for: ranges for the batches of this rank, units for the tiers here.

Both are asked of a peer first and read from the store if that does not answer, does not have them,
or sends something else than what was indexed. Nothing is received into memory that a batch already
looks at: each answer comes into a buffer of its own, and whichever is complete first counts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import xxhash

from penstock.dataset.bound import BoundPart
from penstock.dataset.checks import has_checksums
from penstock.dataset.part import Ints
from penstock.engine.fetcher import Answered, ReadOutcome
from penstock.engine.fills import Fill, FillRun, Fills
from penstock.engine.peers.base import Answer, Ask
from penstock.engine.peers.part_sums import are_parts
from penstock.errors import PeerError
from penstock.flow.holders import Sources

RANGES_MAX, BYTES_MAX = 32, 1 << 20
"""Asked for together: more makes no link faster, and if the peer is lost all of it comes from the
store one after the other."""
_GAP_BYTES = 16 << 10
"""Between units that the store is asked for together, when no peer has sent them."""
_WAIT_S = 600.0
"""A peer may take so long to have what it fetches itself; it says that it is there meanwhile."""
_BRING_S = 5.0
"""A peer that is asked for what it has now answers, or is given up sooner than this."""


class PeerQuestion(NamedTuple):
    """A question to a peer, as it is recorded once it is answered."""

    source: str
    begin_ns: int
    step: int = -1
    epoch: int = -1
    flags: int = 0


class PeerAsker(Protocol):
    """Who can ask other nodes."""

    def ask(
        self,
        source: str,
        ask: Ask,
        into: memoryview,
        *,
        parked: Callable[[], None],
        done: Callable[[Answer | PeerError], None],
    ) -> None:
        """Ask a peer by the name of its source; `done` is called once, in another thread."""
        ...

    def blame(self, source: str, what: str) -> None:
        """Take note that a peer has sent something wrong."""
        ...

    def later(self, work: Callable[[], None]) -> None:
        """Have something done by a thread that may wait for a disk."""
        ...

    def buffer(self, size_bytes: int) -> memoryview:
        """Return memory for an answer."""
        ...

    def begun(self, source: str) -> PeerQuestion:
        """Return what `count` and `failed` are told, for a question that is asked now."""
        ...

    def count(self, asked: PeerQuestion, size_bytes: int, num_ranges: int, answer: Answer) -> None:
        """Count what came from a peer."""
        ...

    def failed(self, asked: PeerQuestion) -> None:
        """Take note that a peer did not answer."""
        ...

    @property
    def shelf(self) -> bytes:
        """What the data set is called among nodes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRanges:
    """Ranges of units that one peer is to send, and the samples they are."""

    ranges: Ints
    """As in `Ask`."""
    bound: BoundPart
    table: int
    ids: Ints
    """The samples of the part, one for each range."""

    def at(self, chosen: Ints | slice) -> PeerRanges:
        """Return some of them."""
        return PeerRanges(
            ranges=self.ranges[chosen], bound=self.bound, table=self.table, ids=self.ids[chosen]
        )

    def cut(self) -> list[PeerRanges]:
        """Return them in parts of the size that is asked for at once."""
        return [self.at(slice(start, stop)) for start, stop in peer_cuts(self.ranges)]


def peer_cuts(ranges: Ints) -> Iterator[tuple[int, int]]:
    """Yield where ranges are cut into parts that are asked for at once."""
    sizes = np.cumsum(ranges[:, 4])
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
        cluster: PeerAsker,
        read: Callable[[PeerRanges, int], tuple[memoryview, int]],
    ) -> None:
        self.wanted = wanted
        self.sources = sources.names
        self._may_wait_at = sources.may_wait_at
        self.size_bytes = int(wanted.ranges[:, 4].sum())
        self._cluster = cluster
        self._read = read
        self._lock = threading.Lock()
        self.parts: list[memoryview | None] = [None] * len(wanted.ranges)
        """The bytes of each range, once they are there."""

    def _missing(self) -> list[int]:
        with self._lock:
            return [i for i, part in enumerate(self.parts) if part is None]

    def _take(self, number: int, data: memoryview) -> None:
        with self._lock:
            if self.parts[number] is None:  # Else another copy was first, and it may be in use.
                self.parts[number] = data

    def __call__(self, attempt: int) -> ReadOutcome:
        """Read from the store what is missing."""
        num_retries = 0
        for number in self._missing():
            data, again = self._read(self.wanted, number)
            num_retries += again
            self._take(number, data)
        return ReadOutcome(moved=True, num_retries=num_retries)

    def ask(self, source: str, deferred: Callable[[], None], answered: Answered) -> None:
        """Ask a peer for what is missing."""
        missing = self._missing()
        ranges = self.wanted.ranges[missing]
        into = self._cluster.buffer(int(ranges[:, 4].sum()))
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
        """Take what is good; return an error if that is not all of it."""
        source = asked.source
        wanted, absent = self.wanted, set(answer.absent)
        lengths = wanted.ranges[missing, 4].tolist()
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
    """Return the checksum that each range must have, as far as there is one.

    The index' own is the best witness. Else it is the one that the peer has sent: of the whole
    unit, or of the part that was asked for.
    """
    if has_checksums(wanted.bound):
        blocks = wanted.bound.part.tables[0].extents(wanted.ids[numbers]).block
        return list(wanted.bound.part.columns["checksum"][blocks].tolist())
    asked = wanted.ranges[numbers]
    has_sum = (asked[:, 4] == asked[:, 2]) | are_parts(asked)
    return [
        total if is_known else None
        for total, is_known in zip(answer.sums, has_sum.tolist(), strict=True)
    ]


class UnitsRead(FillRun):
    """Units on their way into a tier here, that other nodes have."""

    def __init__(
        self,
        fills: Sequence[Fill],
        work: Fills,
        sources: tuple[str, ...],
        ranges: Ints,
        cluster: PeerAsker,
    ) -> None:
        super().__init__(fills, work, _GAP_BYTES)
        self.sources = sources
        self._ranges = ranges
        self._cluster = cluster
        self._is_asked = False

    def __call__(self, attempt: int) -> ReadOutcome:
        """Read from the store; who is not beside a peer's answer is the first copy."""
        return super().__call__(attempt if self._is_asked else 0)

    def ask(self, source: str, deferred: Callable[[], None], answered: Answered) -> None:
        """Ask a peer for all of them."""
        into = self._cluster.buffer(self.size_bytes)
        self._is_asked = True
        asked = self._cluster.begun(source)

        def take(answer: Answer) -> None:
            error: BaseException | None
            try:
                error = self._arrived(asked, into, answer, self._work.take_copy)
            except BaseException as raised:  # It is raised where the batch is asked for.
                error = raised
            self._is_asked = False
            answered(error)

        def done(answer: Answer | PeerError) -> None:
            if isinstance(answer, PeerError):
                self._cluster.failed(asked)
                self._is_asked = False
                answered(answer)
            else:
                self._cluster.later(lambda: take(answer))

        ask = Ask(shelf=self._cluster.shelf, ranges=self._ranges, wait_s=_WAIT_S)
        self._cluster.ask(source, ask, into, parked=deferred, done=done)

    def bring(self, source: str) -> list[Fill]:
        """Ask a peer for those that it has now, and wait for them; return what has come.

        The units are claimed by the caller.
        """
        into = self._cluster.buffer(self.size_bytes)
        asked = self._cluster.begun(source)
        answers: list[Answer | PeerError] = []
        brought: list[Fill] = []
        has_come = threading.Event()

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
        lengths, start, damaged = self._ranges[:, 4].tolist(), 0, -1
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
