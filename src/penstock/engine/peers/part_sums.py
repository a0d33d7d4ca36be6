"""Checksums of parts of units, for clients whose index has no checksums.

The sum that a tier has of a whole unit cannot check one row of it. So a server reads a requested
part first, verified like every read from a tier, and answers with the sum of just these bytes. A
damaged part counts as absent. If the file changes before the part is sent, the sum does not match.

A part of a large unit is one piece of a request for all of it, and is answered with the unit's sum.
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
    """Return which ranges are answered with a sum of just their bytes."""
    lengths = ranges[:, UNIT_LENGTH]
    parts: npt.NDArray[np.bool_] = (ranges[:, LENGTH] < lengths) & (lengths <= CUT_BYTES_MAX)
    return parts


def with_part_sums(ranges: Ints, found: Lookup, tiers: Sequence[ReadableTier]) -> Lookup:
    """Return a lookup with the sums of parts filled in; damaged parts become absent."""
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
