"""Draws: which node is best for a key, by rendezvous hashing. Every rank computes the same.

Every node draws a number for every key, and the best one wins. A draw is -ln(h) / w, the smaller
the better, with h a hash of key and name in (0, 1) and w the node's weight: so a node wins in
proportion to its weight. A draw depends on one node alone: if a node is lost, the others' draws
stay, and only what it had won goes to others, to the second best of each.

All ranks must agree to the last key, on any platform. So h comes from integers alone, and its
logarithm is made of sums, products and quotients, which IEEE 754 fixes to the last bit; those of
mathematical libraries differ in theirs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.dataset.part import Ints
from penstock.order.keys import GOLDEN, Words, mix64

NOBODY = -1
"""In place of a node where there is none."""

_CHUNK_KEYS = 1 << 15
"""Keys drawn for together: their numbers stay in the processor's cache."""
_SURELY = 1 + 2.0**-20
"""More than `minus_log` can be wrong by."""

Floats = npt.NDArray[np.float64]


def best_draws(keys: Ints, names: Sequence[str], weights: Sequence[int], num_best: int) -> Ints:
    """Return for each key the places in `names` of its best draws, best first.

    The rows are `num_best`; where there are fewer names with a weight the last ones are `NOBODY`.
    Equal draws go to the name that sorts first, whatever the order of `names`.
    """
    out = np.full((num_best, len(keys)), NOBODY, np.int64)
    by_name = sorted((name, n) for n, name in enumerate(names) if weights[n] > 0)
    drawers = [(n, _seed(name), weights[n]) for name, n in by_name]
    for start in range(0, len(keys), _CHUNK_KEYS):
        chunk = slice(start, start + _CHUNK_KEYS)
        out[:, chunk] = _best_of_chunk(_stirred(keys[chunk]), drawers, num_best)
    return out


def costs_of(keys: Ints, name: str, weight: int) -> Floats:
    """Return what one node draws for each key; the smaller, the better."""
    return _costs(_mix(_stirred(keys) ^ _seed(name)), weight)


def _best_of_chunk(
    stirred: Words, drawers: Sequence[tuple[int, np.uint64, int]], num_best: int
) -> Ints:
    """Return the best drawers of each key; they come sorted by name."""
    costs = np.full((num_best, len(stirred)), np.inf)
    places = np.full((num_best, len(stirred)), NOBODY, np.int64)
    limit = np.full(len(stirred), np.inf)
    for number, seed, weight in drawers:
        hashed = _mix(stirred ^ seed)
        # -ln(h) >= 1 - h, so most draws are seen to lose without a logarithm.
        some = np.flatnonzero((1 - _fraction(hashed)) < limit * weight)
        cost = _costs(hashed[some], weight)
        better = cost < costs[-1, some]
        some, cost = some[better], cost[better]
        if not len(some):
            continue
        several = np.vstack([costs[:, some], cost])
        order = np.argsort(several, axis=0, kind="stable")[:num_best]
        named = np.vstack([places[:, some], np.full(len(some), number)])
        costs[:, some] = np.take_along_axis(several, order, axis=0)
        places[:, some] = np.take_along_axis(named, order, axis=0)
        limit[some] = costs[-1, some] * _SURELY
    return places


def _seed(name: str) -> np.uint64:
    return np.uint64(xxhash.xxh3_64_intdigest(name.encode()))


def _stirred(keys: Ints) -> Words:
    return _mix(keys.astype(np.uint64))


def _costs(hashed: Words, weight: int) -> Floats:
    return minus_log(_fraction(hashed)) / weight


def _fraction(hashed: Words) -> Floats:
    """Return words as numbers above 0 and up to 1."""
    return ((hashed >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _mix(words: Words) -> Words:
    """Return words with all bits stirred: one step of SplitMix64."""
    return mix64(words + np.uint64(GOLDEN))


_LN2 = 0.6931471805599453
_SQRT_HALF = 0.7071067811865476


def minus_log(h: Floats) -> Floats:
    """Return -ln(h) to eight digits, the same bits on every platform.

    h = m · 2**e with m near 1, and ln m = 2·(t + t³/3 + t⁵/5 + …) with t = (m - 1)/(m + 1).
    """
    mantissa, exponent = np.frexp(h)
    low = mantissa < _SQRT_HALF
    m = np.where(low, 2 * mantissa, mantissa)
    e = np.where(low, exponent - 1, exponent).astype(np.float64)
    t = (m - 1) / (m + 1)
    squared = t * t
    series = 1 / 9 * squared
    for term in (1 / 7, 1 / 5, 1 / 3):
        series = (series + term) * squared
    out: Floats = -(e * _LN2 + 2 * t * (series + 1))
    return out
