"""Placement: which units a tier keeps, and where in it.

Every unit of a data set has a place in one imaginary sequence of bytes, most valuable per byte
first. A capacity only cuts that sequence: the first bytes belong to the fastest tier, the next ones
to the second, the rest is not placed. So the place of a unit depends on nothing but the index. A
tier is a sparse file that uses these offsets as they are: growing, shrinking or swapping tiers
moves no byte, and jobs with different limits agree on the same file.

Value per byte: to hold a unit saves uses · (t_store - t_hit) with t = latency + bytes/bandwidth,
divided by its bytes. In plain epochs all units are used equally often, and what is left,
latency/bytes plus a constant, falls with the size, whatever the latency. So the order is by size,
in classes of powers of two, and inside a class as in the data set, which keeps neighbours together.
Where some are used more often, as in a mixture, these go first: twice the uses are worth twice as
much per byte, half the size at most that.

Of a very large data set nothing is kept for each unit, and sorting by size would take that. There
the layout is a *shadow* of the objects: they follow each other as in the index, and a unit lies
where it lies in its object. The bytes between units are holes and take no room. In sets of so many
units all units are alike, so little is lost. Sets of a mixture that are used more often go first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.dataset.part import Ints
from penstock.flow.layout.units import Units
from penstock.storage.tier_shape import PAGE_BYTES, ComputedShape, UnitColumn

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitLayout:
    """Where each unit lies in the sequence of all units."""

    offsets: Ints | UnitColumn
    """By unit number."""
    lengths: Ints | UnitColumn
    """By unit number."""
    size_bytes: int
    """Bytes of all units; of a shadow, with its holes."""
    known: ComputedShape | None = None
    """Of a shadow, what a tier must know of it; else None."""

    def span_bytes(self, span_bytes: int, num_spans: int) -> Ints:
        """Return how many bytes of a shadow each span covers, holes and all.

        A unit belongs to the span in which it begins. What reaches into the next is a part of one
        unit among many, and is not looked up.
        """
        assert self.known is not None
        return np.clip(self.size_bytes - span_bytes * np.arange(num_spans), 0, span_bytes)


def layout_of(units: Units, uses: Floats | None = None) -> UnitLayout:
    """Return the place of every unit.

    `uses` is how often an epoch uses each, if not alike; where units are computed, those of each of
    `units.tables`.
    """
    if units.is_computed:
        return _shadow_of(units, uses)
    lengths = units.lengths
    assert isinstance(lengths, np.ndarray)
    return UnitLayout(
        offsets=offsets_of(lengths, uses), lengths=lengths, size_bytes=units.size_bytes
    )


def paged_layout_of(units: Units) -> UnitLayout:
    """Return a place for every unit that shares no page of memory or disk with another one.

    For tiers whose units come and go: the room of one is given back whole.
    """
    lengths = units.lengths
    assert isinstance(lengths, np.ndarray)
    ends = np.cumsum(paged(lengths))
    offsets = ends - paged(lengths)
    return UnitLayout(
        offsets=offsets, lengths=lengths, size_bytes=int(ends[-1]) if len(ends) else 0
    )


def paged(lengths: Ints) -> Ints:
    """Return what units take where each has pages of its own."""
    return -(-lengths // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptUnits:
    """A data set as tiers of some size divide it.

    Tiers keep whole units, with what lies between their samples (headers of a tar file). Samples
    without a place are read alone in a uniform shuffle, and whole runs of them where the order goes
    block by block.
    """

    unit_bytes: int
    """Bytes of the units that have a place."""
    loose_bytes: int
    """Bytes of the samples that have none."""
    loose_run_bytes: int
    """The same with what lies between them."""


def kept_by(units: Units, layout: UnitLayout, capacity_bytes: int) -> KeptUnits:
    """Return what tiers of some bytes keep, and what they leave to the store."""
    if units.is_computed:
        # Nothing is known of single units. A shadow cuts by the object, so it is nearly exact.
        kept = min(capacity_bytes, layout.size_bytes)
        rest = layout.size_bytes - kept
        return KeptUnits(unit_bytes=kept, loose_bytes=rest, loose_run_bytes=rest)
    assert isinstance(layout.offsets, np.ndarray)
    assert isinstance(layout.lengths, np.ndarray)
    is_kept = layout.offsets + layout.lengths <= capacity_bytes
    kept = int(layout.lengths[is_kept].sum())
    return KeptUnits(
        unit_bytes=kept,
        loose_bytes=int(units.wanted_bytes[~is_kept].sum()),
        loose_run_bytes=layout.size_bytes - kept,
    )


def _shadow_of(units: Units, uses: Floats | None) -> UnitLayout:
    sizes = np.array(units.table_bytes, np.int64)
    order = np.arange(len(sizes))
    if uses is not None:
        assert len(uses) == len(sizes), f"{len(uses)} uses, {len(sizes)} tables"
        order = np.argsort(-np.frexp(uses)[1].astype(np.int64), kind="stable")
    begins = np.empty(len(sizes), np.int64)
    begins[order] = np.cumsum(sizes[order]) - sizes[order]
    digest = xxhash.xxh3_64_intdigest(units.name.encode() + order.astype("<i8").tobytes())
    size_bytes = int(sizes.sum())
    return UnitLayout(
        offsets=units.object_places(begins),
        lengths=units.lengths,
        size_bytes=size_bytes,
        known=ComputedShape(size_bytes=size_bytes, digest=digest),
    )


def offsets_of(lengths: Ints, uses: Floats | None = None) -> Ints:
    """Return the offset of each unit when small classes go first, and before that often used ones.

    >>> offsets_of(np.array([5000, 100, 5001, 90]))
    array([ 190,    0, 5190,  100])
    >>> offsets_of(np.array([5000, 100, 5001, 90]), uses=np.array([1, 1, 4, 1]))
    array([5191, 5001,    0, 5101])
    """
    # The exponent of a float is the class, exactly so for all lengths below 2**53.
    classes = np.frexp(lengths.astype(np.float64))[1].astype(np.int16)
    if uses is not None:
        classes -= np.int16(64) * np.frexp(uses)[1].astype(np.int16)
    order = np.argsort(classes, kind="stable")
    offsets = np.empty(len(lengths), np.int64)
    ends = np.cumsum(lengths[order])
    offsets[order] = ends - lengths[order]
    return offsets
