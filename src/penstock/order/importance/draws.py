"""Draws of one window: probabilities as whole numbers, systematic sampling, repeats far apart.

A sample's probability is its share of an integer total, so p is exact and the same on every rank.
Systematic sampling lays the samples in a row, each as long as its probability, in an order of this
window's own, and takes whatever lies under W evenly spaced marks. The first mark is random. A
sample of probability p is drawn W·p times on average, and always less than one time more or less
than that. So one with W·p ≥ 1 is surely drawn.

The weight of a draw is q/p, where q is how often a plain epoch would take the sample: 1/F. Then the
mean of weighted losses estimates the mean over the data set, for any p above 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.errors import OptionError
from penstock.order.importance.options import Floats
from penstock.order.keys import Ids, key_of, member_keys

Whole: TypeAlias = npt.NDArray[np.int64]

_TOTAL_BITS = 62
_MEAN_BITS_MAX, _MEAN_BITS_MIN = 24, 8
"""Resolution of a mean probability: below the second, floor and scores would be rounded away."""
_ROUNDED_DOWN = 1 - 2**-50
"""More than two roundings of a float can add: a product with it never exceeds the exact one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probabilities:
    """How often each sample is drawn."""

    points: Whole
    """By sample; its probability is its share of the total."""
    base: Whole
    """What the points would be in plain epochs."""
    sizes: tuple[int, ...]
    """Samples of each source; sources follow one another."""
    total: int

    @property
    def weights(self) -> Floats:
        """Return the factor of each sample's loss, were it drawn."""
        return self.weights_of(np.arange(len(self.points)))

    def weights_of(self, ids: Ids) -> Floats:
        """Return the factors of some samples' losses."""
        # Only a source of share 0 has no points; it is never drawn.
        return (self.base[ids] / np.maximum(1, self.points[ids])).astype(np.float32)

    @property
    def effective_share(self) -> float:
        """Effective sample size of draws, as a share of their number: (Σv)² / (n Σv²)."""
        # E[v] = Σ p·q/p = 1 and E[v²] = Σ q²/p.
        share = self.base.astype(np.float64)
        return float(self.total / (share * share / np.maximum(1, self.points)).sum())

    def gain(self, norms: npt.NDArray[np.float64]) -> float:
        """Return how much less a gradient varies than with uniform draws, if its norms are these.

        Both with replacement: Σ q·g² against Σ (q·g)²/p.
        """
        base = self.base / self.total
        uniform = float((base * norms * norms).sum())
        drawn = float(((base * norms) ** 2 * (self.total / np.maximum(1, self.points))).sum())
        return uniform / drawn if drawn > 0 else 1.0


def probabilities(
    preference: Whole, *, sizes: tuple[int, ...], shares: tuple[int, ...], floor: float, draws: int
) -> Probabilities:
    """Return p = q·((1 - floor)·preference/mean + floor) as points.

    The samples lie in sources of some sizes, which keep their shares of the draws whatever their
    preferences are.
    """
    num_samples = len(preference)
    bits = min(_MEAN_BITS_MAX, _TOTAL_BITS - draws.bit_length() - num_samples.bit_length())
    if bits < _MEAN_BITS_MIN:
        raise OptionError(
            f"a window of {draws:,} draws from {num_samples:,} samples is too large to be exact; "
            f"give a window of at most {2 ** (_TOTAL_BITS - 9) // num_samples:,} draws"
        )
    points, base = np.empty(num_samples, np.int64), np.empty(num_samples, np.int64)
    first = 0
    for size, share in zip(sizes, shares, strict=True):
        # Points of one sample of this source in plain epochs: they add up to its share.
        plain = max(share > 0, (num_samples << bits) * share // (sum(shares) * size))
        here = slice(first, first + size)
        points[here] = _source_points(preference[here], plain, floor)
        base[here] = plain
        first += size
    return Probabilities(points=points, base=base, sizes=sizes, total=int(points.sum()))


def _source_points(preference: Whole, plain: int, floor: float) -> Whole:
    """Return points that add up to `plain` for each sample, exactly."""
    size = len(preference)
    least = math.ceil(floor * plain)  # Rounded up: no weight may exceed 1 / floor.
    spread = plain * size - least * size
    total = int(preference.sum())
    if spread <= 0 or total <= 0:
        return np.full(size, plain, np.int64)
    # In floats, and then made exact: what is rounded off goes to the first samples, a point each.
    # Never rounded up, or there would be points to take away, and some would fall below `least`.
    share = np.floor(preference * (spread / total * _ROUNDED_DOWN)).astype(np.int64)
    points: Whole = least + share
    left = plain * size - int(points.sum())
    points += left // size
    points[: left % size] += 1
    return points


def draw(chances: Probabilities, num_draws: int, *, seed: int, window: int) -> Ids:
    """Return `num_draws` ids, in the order of use."""
    order_key, start_key, phase_key = (
        key_of(seed, "importance", purpose, window) for purpose in ("order", "start", "phase")
    )
    row = _row(order_key, chances.sizes)
    start = (start_key << 64 | key_of(start_key, "low")) % chances.total
    counts = counts_in_row(chances.points[row], num_draws, start)
    is_drawn = counts > 0
    return _spread(row[is_drawn], counts[is_drawn], chances.sizes, phase_key)


def counts_in_row(points: Whole, num_draws: int, start: int) -> Whole:
    """Return how many of the evenly spaced marks lie over each sample of a row.

    `start` is where the first mark lies, from 0 to the sum of the points.
    """
    ends = np.cumsum(points)
    marks = (ends * num_draws + start) // int(ends[-1])
    return np.diff(marks, prepend=np.int64(0))


def _row(key: int, sizes: tuple[int, ...]) -> Ids:
    """Return all ids at random, but source by source: then each source has its share of marks."""
    parts, first = [], 0
    for size in sizes:
        members = np.arange(first, first + size, dtype=np.uint64)
        parts.append(first + np.argsort(member_keys(key, members), kind="stable"))
        first += size
    return np.concatenate(parts)


def _spread(ids: Ids, counts: Whole, sizes: tuple[int, ...], key: int) -> Ids:
    """Return each id as often as it counts, its copies evenly spaced and the rest at random.

    Samples of one source that are drawn equally often are a class. The draws of a class lie on a
    grid over the whole window, at equal distances, and its samples take turns on it, in an order at
    random. So every stretch of the window has its share of each class, to within one draw.
    """
    source = np.searchsorted(np.cumsum(sizes), ids, side="right")
    turns = np.lexsort((member_keys(key, ids.astype(np.uint64)), counts, source))
    ids, counts, source = ids[turns], counts[turns], source[turns]
    is_first = np.ones(len(ids), bool)
    is_first[1:] = (counts[1:] != counts[:-1]) | (source[1:] != source[:-1])
    firsts = np.flatnonzero(is_first)
    members = np.diff(firsts, append=len(ids))
    turn = np.arange(len(ids)) - np.repeat(firsts, members)
    drawn = np.repeat(np.arange(len(ids)), counts)
    copy = np.arange(len(drawn)) - np.repeat(np.cumsum(counts) - counts, counts)
    members = np.repeat(members, members)
    # The middle of a place on the grid, as a share of the window in whole numbers.
    bits = _TOTAL_BITS - (2 * len(drawn)).bit_length()
    halves = 2 * (copy * members[drawn] + turn[drawn]) + 1
    places = (halves << bits) // (2 * members * counts)[drawn]
    return ids[drawn[np.argsort(places, kind="stable")]]
