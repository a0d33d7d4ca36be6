"""Which source of a mixture fills which slot: an interleave that is exact at every length.

After t slots, source j should have had t * share_j / total of them. Tijdeman ("The chairman
assignment problem", 1980) showed that a schedule exists that is never off by more than
1 - 1/(2J - 2) for J sources, and how to find it: the k-th draw of a source may not come before the
count would be too high without it, nor after it would be too low; among those that may come, take
the one that must come first. Everything repeats after `total` slots, so one table of that length
answers both ways: slot to (source, draw) and back.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from penstock.arguments import number_of
from penstock.errors import OptionError
from penstock.order.keys import Ids

TOTAL_MAX = 2**16
"""Slots until the interleave repeats, at most; weights are rounded to parts of this."""
SOURCES_MAX = 2**15 - 1
"""Sources, at most: their numbers are kept, and sorted, in 16 bits."""
_TABLES_KEPT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Interleave:
    """The endless sequence of sources with the given shares.

    >>> sources, draws = interleave_of((3, 1)).draws_at(np.arange(8))
    >>> sources, draws
    (array([0, 0, 1, 0, 0, 0, 1, 0], dtype=int16), array([0, 1, 0, 2, 3, 4, 1, 5]))
    """

    shares: Ids
    """Slots of each source until the sequence repeats."""
    source_at: npt.NDArray[np.int16]
    """Slot to source, for one repeat."""
    draw_at: Ids
    """Slot to how often its source came before, for one repeat."""
    slots_of: tuple[Ids, ...]
    """Source and draw to slot, for one repeat."""

    @property
    def total(self) -> int:
        """Slots until the sequence repeats."""
        return len(self.source_at)

    def draws_at(self, slots: Ids) -> tuple[npt.NDArray[np.int16], Ids]:
        """Return the source of each slot, and how often that source came before it."""
        repeats = slots // self.total
        places = slots - repeats * self.total
        sources = self.source_at[places]
        return sources, repeats * self.shares[sources] + self.draw_at[places]

    def slots_at(self, source: int, draws: Ids) -> Ids:
        """Return the slot of each draw of a source: the inverse of `draws_at`."""
        share = int(self.shares[source])
        repeats = draws // share
        places: Ids = self.slots_of[source][draws - repeats * share]
        return repeats * self.total + places

    def num_draws(self, source: int, slot: int) -> int:
        """Return how many of the slots before one belong to a source."""
        repeats, place = divmod(slot, self.total)
        within = int(np.searchsorted(self.slots_of[source], place))
        return repeats * int(self.shares[source]) + within


def shares_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Return whole numbers in proportion to the weights.

    Exact when the weights, as written, have a common denominator of at most `TOTAL_MAX`; otherwise
    rounded to parts of `TOTAL_MAX`, largest remainder first. A source of weight 0 is never drawn.

    >>> shares_of([0.7, 0.3]), shares_of([2, 2, 4])
    ((7, 3), (1, 1, 2))
    >>> shares_of([1 / 3, 2 / 3]), sum(shares_of([1, 2**0.5]))
    ((1, 2), 32768)
    """
    weights = [number_of("a weight", weight) for weight in weights]
    if not any(weights):
        raise OptionError(f"weights are positive numbers, one for each source; got {weights}")
    if len(weights) > SOURCES_MAX:
        raise OptionError(f"a mixture has at most {SOURCES_MAX} sources, got {len(weights)}")
    # From their decimal text, because 0.7 is meant as 7/10 and not as the float nearest to it.
    exact = [Fraction(str(weight)) for weight in weights]
    parts = [weight / sum(exact) for weight in exact]
    total = math.lcm(*(part.denominator for part in parts))
    if total <= TOTAL_MAX:
        return tuple(int(part * total) for part in parts)
    shares = [int(part * TOTAL_MAX) for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda j: (shares[j] - parts[j] * TOTAL_MAX, j))
    for j in by_remainder[: TOTAL_MAX - sum(shares)]:
        shares[j] += 1
    for share, weight in zip(shares, weights, strict=True):
        if share == 0 and weight:
            raise OptionError(
                f"weight {weight} is less than 1/{TOTAL_MAX} of the sum {sum(weights)}; "
                "leave that source out, or give it more"
            )
    divisor = math.gcd(*shares)
    return tuple(share // divisor for share in shares)


@lru_cache(maxsize=_TABLES_KEPT)
def interleave_of(shares: tuple[int, ...]) -> Interleave:
    """Return the interleave for whole-numbered shares, whose sum is its length."""
    assert 1 <= sum(shares) <= TOTAL_MAX, shares
    source_at = np.array(_schedule(shares), dtype=np.int16)
    slots_of = tuple(np.flatnonzero(source_at == j) for j in range(len(shares)))
    draw_at = np.empty(len(source_at), dtype=np.int64)
    for slots in slots_of:
        draw_at[slots] = np.arange(len(slots))
        slots.setflags(write=False)
    # All orders with these shares use the same tables.
    for table in (source_at, draw_at):
        table.setflags(write=False)
    return Interleave(
        shares=np.array(shares, dtype=np.int64),
        source_at=source_at,
        draw_at=draw_at,
        slots_of=slots_of,
    )


def _schedule(shares: tuple[int, ...]) -> list[int]:
    """Return the source of each slot: of the draws released so far, the one due first."""
    total = sum(shares)
    slack = max(2 * sum(map(bool, shares)) - 2, 2)
    releases = sorted(
        (
            -(-total * (slack * draw + 1) // (slack * share)),
            total * (slack * draw + slack - 1) // (slack * share),
            source,
        )
        for source, share in enumerate(shares)
        for draw in range(share)
    )
    waiting: list[tuple[int, int]] = []
    schedule = []
    released = 0
    for slot in range(1, total + 1):
        while released < total and releases[released][0] <= slot:
            heapq.heappush(waiting, releases[released][1:])
            released += 1
        schedule.append(heapq.heappop(waiting)[1])
    return schedule
