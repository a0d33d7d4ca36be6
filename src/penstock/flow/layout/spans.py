"""Spans: the layout cut into even pieces, so that location can be computed for any number of units.

A node is the home of spans, not of single units, so the table of homes has at most 2**18 entries,
for a thousand samples or a billion. A span is `span_bytes` of the layout, a power of two, and a
unit belongs to the span in which it begins. So a span has more or fewer bytes than its width says,
and where units are wider than spans some have none. In a layout with holes it counts for its width,
holes and all.

Spans are as narrow as their number allows. Narrow ones spread evenly over nodes and leave little
room unused at the edge of a full one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.dataset.part import Ints
from penstock.errors import OptionError
from penstock.flow.layout.placement import UnitLayout

SPAN_BYTES_MIN = 1 << 16
"""A unit has about as much or more; narrower spans would mostly be empty."""
SPANS_MAX = 1 << 18
"""What homes are computed for at most: 2 MB a table, and seconds on a thousand nodes."""

_UNITS_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """The pieces of a layout, in its order."""

    span_bytes: int
    """Of the layout, a power of two."""
    lengths: Ints
    """By span: bytes of the units that begin in it."""

    def __post_init__(self) -> None:
        if self.span_bytes < 1 or self.span_bytes & (self.span_bytes - 1):
            raise OptionError(f"a span is a power of two of bytes wide, got {self.span_bytes}")

    @property
    def num_spans(self) -> int:
        """How many there are, empty ones included."""
        return len(self.lengths)

    @property
    def size_bytes(self) -> int:
        """Bytes of all units."""
        return int(self.lengths.sum())

    def number_of(self, offsets: Ints) -> Ints:
        """Return the span of each unit, by where the unit begins in the layout."""
        out: Ints = offsets // self.span_bytes
        return out


def spans_of(layout: UnitLayout) -> Spans:
    """Return the spans of a layout."""
    span_bytes = span_bytes_of(layout.size_bytes)
    # One past the end, since a unit without bytes may lie there.
    num_spans = layout.size_bytes // span_bytes + 1
    if layout.known is not None:
        # Too many units to look at each.
        return Spans(span_bytes=span_bytes, lengths=layout.span_bytes(span_bytes, num_spans))
    lengths = np.zeros(num_spans, np.int64)
    for start in range(0, len(layout.offsets), _UNITS_AT_ONCE):
        part = slice(start, start + _UNITS_AT_ONCE)
        np.add.at(lengths, layout.offsets[part] // span_bytes, layout.lengths[part])
    return Spans(span_bytes=span_bytes, lengths=lengths)


def span_bytes_of(size_bytes: int) -> int:
    """Return how wide the spans of so many bytes are: as narrow as their number allows.

    >>> span_bytes_of(10**9), span_bytes_of(10**12), span_bytes_of(10**15)
    (65536, 4194304, 4294967296)
    """
    span_bytes = SPAN_BYTES_MIN
    while size_bytes // span_bytes + 1 > SPANS_MAX:
        span_bytes *= 2
    return span_bytes
