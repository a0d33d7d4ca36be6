"""Sums of parts of units: what an asker can check where the index has no checksums.

The sum that a tier has of a whole unit says nothing about one row of it. So whoever serves a part
reads it first, checked as all reads from a tier are, and answers with the sum of just these bytes.
What is damaged is absent; what changes between that look and the sending has another sum.

Parts of large units are pieces of an ask for all of it, and have the unit's sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from penstock.engine.peers.base import ABSENT, Lookup
from penstock.engine.peers.wire import LENGTH, UNIT_LENGTH, Ints
from penstock.storage.tier_cells import CUT_BYTES_MAX
from penstock.storage.tier_reads import ReadableTier, range_sums


def are_parts(ranges: Ints) -> npt.NDArray[np.bool_]:
    """Return which ranges are answered with a sum of their own."""
    lengths = ranges[:, UNIT_LENGTH]
    parts: npt.NDArray[np.bool_] = (ranges[:, LENGTH] < lengths) & (lengths <= CUT_BYTES_MAX)
    return parts


def with_part_sums(ranges: Ints, found: Lookup, tiers: Sequence[ReadableTier]) -> Lookup:
    """Return what was found, with the sums of parts; parts that are damaged are absent."""
    is_part = are_parts(ranges)
    if not is_part.any():
        return found
    places, sums = found.places.copy(), found.sums.copy()
    for number, tier in enumerate(tiers):
        rows = np.flatnonzero(is_part & (found.places == number))
        for row, total in zip(rows.tolist(), range_sums(tier, ranges[rows]), strict=True):
            places[row] = ABSENT if total is None else number
            sums[row] = total or 0
    return replace(found, places=places, sums=sums)
