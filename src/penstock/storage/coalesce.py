"""Merges near byte ranges of one object into fewer, larger ones.

A request costs about as much as a megabyte of transfer, so reading a small gap is cheaper than a
second request. Pure: it knows offsets and lengths, and nothing of samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Int64s: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """Ranges to read, and where each wanted range lies in them."""

    offsets: Int64s
    """Start of each merged range, ascending."""
    lengths: Int64s
    """Length of each merged range."""
    index: Int64s
    """For each wanted range, in input order: which merged range holds it."""
    inside: Int64s
    """For each wanted range: its offset inside that merged range."""


def merge_ranges(
    offsets: ArrayLike, lengths: ArrayLike, *, gap_bytes_max: int, length_bytes_max: int
) -> Merged:
    """Return the wanted ranges merged where at most `gap_bytes_max` lie between them.

    No merged range is longer than `length_bytes_max`, unless a single wanted one is. The input may
    be in any order and may overlap.

    >>> merged = merge_ranges([0, 300, 120], [100, 50, 80], gap_bytes_max=20, length_bytes_max=1000)
    >>> merged.offsets, merged.lengths, merged.index, merged.inside
    (array([  0, 300]), array([200,  50]), array([0, 1, 0]), array([  0,   0, 120]))
    """
    offsets, lengths = np.asarray(offsets, np.int64), np.asarray(lengths, np.int64)
    assert offsets.shape == lengths.shape == (offsets.size,)
    assert min(gap_bytes_max, length_bytes_max - 1) >= 0
    if not offsets.size:
        none = np.empty(0, np.int64)
        return Merged(offsets=none, lengths=none, index=none, inside=none)
    by_offset = np.lexsort((lengths, offsets))
    starts = offsets[by_offset]
    reached = np.maximum.accumulate(starts + lengths[by_offset])
    firsts = _firsts(starts, reached, gap_bytes_max, length_bytes_max)
    ends = np.maximum.reduceat(starts + lengths[by_offset], firsts)
    in_group = np.zeros(starts.size, np.int64)
    in_group[firsts[1:]] = 1
    index = np.empty(starts.size, np.int64)
    index[by_offset] = np.cumsum(in_group)
    return Merged(
        offsets=starts[firsts],
        lengths=ends - starts[firsts],
        index=index,
        inside=offsets - starts[firsts][index],
    )


def _firsts(starts: Int64s, reached: Int64s, gap_bytes_max: int, length_bytes_max: int) -> Int64s:
    """Return the positions, in sorted order, where a merged range begins.

    The first cuts are at gaps, for all ranges at once. Runs that are still too long are then cut
    greedily from the left, in a loop over merged ranges, not over wanted ones. A new range starts
    where the end reached so far exceeds the bound. All ranges before it end earlier, so `reached`
    is also right inside the new range.
    """
    cuts = np.flatnonzero(starts[1:] - reached[:-1] > gap_bytes_max) + 1
    runs = np.concatenate(([0], cuts, [starts.size]))
    too_long = np.flatnonzero(reached[runs[1:] - 1] - starts[runs[:-1]] > length_bytes_max)
    more: list[int] = []
    for run in too_long:
        first, stop = int(runs[run]), int(runs[run + 1])
        while first < stop:
            bound = max(int(starts[first]) + length_bytes_max, int(reached[first]))
            first += int(np.searchsorted(reached[first:stop], bound, side="right"))
            more.append(first)
    inner = np.asarray(more, np.int64)
    return np.union1d(runs[:-1], inner[inner < starts.size])
