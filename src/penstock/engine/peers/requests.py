"""What a server has been asked for, and what is left to send of it.

A request is *parked* while units of it are absent and may still come, *settling* while units that
an earlier run left are checked, and otherwise turned into an `OutgoingFrame`: a head and segments
of files, neighbours in one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from penstock.engine.peers.base import ABSENT, HeldFile, Lookup, Shelf
from penstock.engine.peers.wire import FEW, INSIDE, LENGTH, UNIT_OFFSET, Ints

COST_OF_ONE = 8
"""Of a request, in ranges, for what it takes besides them."""


@dataclass(slots=True, kw_only=True, eq=False)
class PeerRequest:
    """An ask that has not been answered."""

    connection: object
    number: int
    shelf: bytes
    ranges: Ints
    deadline_s: float
    """Until when it may be parked."""
    asked_ns: int = 0
    """When it came (perf_counter_ns)."""
    was_parked: bool = False
    has_settled: bool = False
    """Whether what was unchecked has been checked: what still is then counts as absent."""
    missing: int = 0
    """The number of a range whose unit was absent when we last looked."""

    @property
    def cost(self) -> int:
        """Return what it counts against the bounds."""
        return COST_OF_ONE + len(self.ranges)


@dataclass(slots=True)
class FileSegment:
    """Bytes of a file that are to be sent."""

    file: HeldFile
    offset: int
    length: int


@dataclass(slots=True, kw_only=True, eq=False)
class OutgoingFrame:
    """A frame on its way out."""

    head: memoryview
    segments: deque[FileSegment] = field(default_factory=deque)
    request: PeerRequest | None = None
    """What it answers."""
    shelf: Shelf | None = None
    size_bytes: int = 0
    """Of its segments, all together."""


def segments_of(ranges: Ints, found: Lookup) -> deque[FileSegment]:
    """Return where the bytes of the ranges that are here lie, in order, neighbours in one."""
    if len(ranges) <= FEW:
        return _segments_of_few(ranges, found)
    places, offsets = found.places, ranges[:, UNIT_OFFSET] + ranges[:, INSIDE]
    lengths = ranges[:, LENGTH]
    is_sent = (places > ABSENT) & (lengths > 0)
    if not is_sent.all():
        places, offsets, lengths = places[is_sent], offsets[is_sent], lengths[is_sent]
    if len(places) > 1:
        is_first = np.empty(len(places), np.bool_)
        is_first[0] = True
        is_first[1:] = (offsets[1:] != offsets[:-1] + lengths[:-1]) | (places[1:] != places[:-1])
        firsts = np.flatnonzero(is_first)
        if len(firsts) < len(places):
            lengths = np.add.reduceat(lengths, firsts)
            places, offsets = places[firsts], offsets[firsts]
    columns = zip(places.tolist(), offsets.tolist(), lengths.tolist(), strict=True)
    return deque(
        FileSegment(found.files[place], offset, length) for place, offset, length in columns
    )


def _segments_of_few(ranges: Ints, found: Lookup) -> deque[FileSegment]:
    segments: deque[FileSegment] = deque()
    last, last_place, end = None, ABSENT, -1
    for row, place in zip(ranges.tolist(), found.places.tolist(), strict=True):
        length = row[LENGTH]
        if place <= ABSENT or not length:
            continue
        offset = row[UNIT_OFFSET] + row[INSIDE]
        if last is not None and place == last_place and offset == end:
            last.length += length
        else:
            last, last_place = FileSegment(found.files[place], offset, length), place
            segments.append(last)
        end = offset + length
    return segments
