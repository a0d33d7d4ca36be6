"""Intervals laid on one line, and which activities cover each part of it.

The intervals of interest (the waits of a training loop, or its work) are laid end to end on a line.
`JoinedIntervals.place` maps a time to its place on the line, so that an activity becomes a stretch
of the line without a join: what lies outside of all intervals has no length there. `covered` then
cuts the line at all ends of activities and counts, for each piece, how many activities of each
category run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from penstock.report.analysis.values import Floats, Ints


@dataclass(frozen=True, kw_only=True)
class JoinedIntervals:
    """Disjoint intervals, sorted by time, laid end to end."""

    start_ns: Ints
    end_ns: Ints

    @cached_property
    def base_ns(self) -> Ints:
        """Where each interval begins on the line; one more: the length of the line."""
        return np.concatenate([[0], np.cumsum(self.end_ns - self.start_ns)])

    def place(self, times_ns: Ints) -> Ints:
        """Return the places of times; a time outside of all intervals is at the next one's begin.

        >>> line = JoinedIntervals(start_ns=np.array([0, 10]), end_ns=np.array([5, 20]))
        >>> line.place(np.array([-1, 2, 7, 12, 30])).tolist()
        [0, 2, 5, 7, 15]
        """
        if not len(self.start_ns):
            return np.zeros(len(times_ns), np.int64)
        at = np.searchsorted(self.start_ns, times_ns, side="right") - 1
        inside = np.clip(at, 0, None)
        length = self.end_ns[inside] - self.start_ns[inside]
        return np.where(
            at < 0, 0, self.base_ns[inside] + np.clip(times_ns - self.start_ns[inside], 0, length)
        )


@dataclass(frozen=True, kw_only=True)
class Activities:
    """Stretches of a line, each with a category and with weights of its own."""

    low: Ints
    high: Ints
    category: Ints
    starved: Floats
    """Share of the stretch that is spent runnable without a core."""
    unseen: Floats
    """Share of the stretch that is spent blocked while no read was seen."""

    @staticmethod
    def joined(parts: list[Activities]) -> Activities:
        """Return all activities of some parts."""
        if not parts:
            empty, none = np.zeros(0, np.int64), np.zeros(0)
            return Activities(low=empty, high=empty, category=empty, starved=none, unseen=none)
        return Activities(
            low=np.concatenate([p.low for p in parts]),
            high=np.concatenate([p.high for p in parts]),
            category=np.concatenate([p.category for p in parts]),
            starved=np.concatenate([p.starved for p in parts]),
            unseen=np.concatenate([p.unseen for p in parts]),
        )


@dataclass(frozen=True, kw_only=True)
class Cover:
    """Pieces of a line, and what runs in each."""

    interval: Ints
    """The interval that a piece lies in."""
    length: Floats
    """Length of each piece, in the unit of the line."""
    active: npt.NDArray[np.int32]
    """How many activities run, one row a category."""
    starved: Floats
    unseen: Floats
    """Sums of the weights of the activities that run."""


def covered(base: Ints, found: Activities, num_categories: int) -> Cover:
    """Return the pieces of a line whose intervals begin at `base[:-1]` and end at `base[1:]`."""
    bounds = np.unique(np.concatenate([base, found.low, found.high]))
    length = np.diff(bounds).astype(np.float64)
    low, high = np.searchsorted(bounds, found.low), np.searchsorted(bounds, found.high)
    size = len(bounds)
    active = np.zeros((num_categories, len(length)), np.int32)
    for category in np.unique(found.category).tolist():
        of = found.category == category
        change = np.bincount(low[of], minlength=size) - np.bincount(high[of], minlength=size)
        active[category] = np.cumsum(change)[:-1]

    def weighted(weight: Floats) -> Floats:
        heavy = weight > 0
        change = np.bincount(low[heavy], weight[heavy], size)
        return np.cumsum(change - np.bincount(high[heavy], weight[heavy], size))[:-1]

    # Intervals of no length share their place with the next one: the last of them gets the piece.
    return Cover(
        interval=np.searchsorted(base, bounds[:-1], side="right") - 1,
        length=length,
        active=active,
        starved=weighted(found.starved),
        unseen=weighted(found.unseen),
    )
