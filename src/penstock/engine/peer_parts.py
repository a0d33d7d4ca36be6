"""Asking a peer for more than goes into one answer.

An answer is bounded, a unit is not: a row group of a Parquet file or a video may have hundreds of
megabytes. So ranges are cut into pieces and asked for one answer after the other; what comes back
looks as if it had been one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from penstock.dataset.part import Ints
from penstock.engine.peers.base import Answer, Ask
from penstock.errors import PeerError

PIECE_BYTES = 16 << 20
_INSIDE, _LENGTH = 3, 4

Done = Callable[[Answer | PeerError], None]
AskOne = Callable[[Ask, memoryview, Done], None]


def ask_in_pieces(ask: Ask, into: memoryview, ask_one: AskOne, done: Done) -> None:
    """Ask for ranges of any size; `done` gets one answer for all of them."""
    if len(into) <= PIECE_BYTES:
        ask_one(ask, into, done)
        return
    _Pieces(ask, into, ask_one, done).next()


class _Pieces:
    """An ask that takes several answers."""

    def __init__(self, ask: Ask, into: memoryview, ask_one: AskOne, done: Done) -> None:
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
            cursor=answer.cursor,
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
