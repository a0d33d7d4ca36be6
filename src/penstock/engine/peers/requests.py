"""The requests that a server has not answered yet, and the frames that it has not sent yet.

A request is *parked* while some of its units are absent and may still come. It is *settling* while
units that an earlier run left are checked. Otherwise it becomes an `OutgoingFrame`: a head and
segments of files; ranges that are adjacent in a file form one segment.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from penstock.engine.peers.base import ABSENT, HeldFile, Lookup, Shelf
from penstock.engine.peers.wire import FEW, INSIDE, LENGTH, UNIT_OFFSET, Ints

COST_OF_ONE = 8
"""Added to the number of ranges, so that requests for nothing have a cost, too."""


@dataclass(slots=True, kw_only=True, eq=False)
class PeerRequest:
    """A request that has not been answered."""

    connection: object
    number: int
    shelf: bytes
    ranges: Ints
    deadline_s: float
    """Until when it may be parked."""
    asked_ns: int = 0
    """When it arrived (perf_counter_ns)."""
    was_parked: bool = False
    has_settled: bool = False
    """Whether its units have been checked; those that are still UNCHECKED count as absent."""
    missing: int = 0
    """The number of a range whose unit was absent at the last lookup."""

    @property
    def cost(self) -> int:
        """Return its share of the server's bounds, in ranges."""
        return COST_OF_ONE + len(self.ranges)


@dataclass(slots=True)
class FileSegment:
    """Bytes of a file to send."""

    file: HeldFile
    offset: int
    length: int


@dataclass(slots=True, kw_only=True, eq=False)
class OutgoingFrame:
    """A frame that waits to be sent, or is being sent."""

    head: memoryview
    segments: deque[FileSegment] = field(default_factory=deque)
    request: PeerRequest | None = None
    """The request that it answers; None: it is no answer."""
    shelf: Shelf | None = None
    size_bytes: int = 0
    """The bytes of all its segments."""


def segments_of(ranges: Ints, found: Lookup) -> deque[FileSegment]:
    """Return the segments of the ranges that are here, in order; adjacent ranges are joined."""
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
