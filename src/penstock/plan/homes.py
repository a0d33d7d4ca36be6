"""Homes: which node keeps a unit. Computed by everybody, looked up nowhere.

Capacity-weighted rendezvous hashing: every node draws a number for every unit, and the unit's home
is the node with the best one. A draw is -w / ln(h) with h a hash of unit and node in (0, 1) and w
the node's capacity, so a node wins in proportion to its capacity. A draw depends on one node
alone: if a node is lost, the others' draws stay, and only its own units move.

All ranks must agree to the last unit, on any platform. So h comes from integers alone, and its
logarithm is made of sums, products and quotients, which IEEE 754 fixes to the last bit; those of
mathematical libraries differ in theirs.

A cluster of C bytes has homes for the first C bytes of the layout. Chance gives some nodes more
than they hold: what is too much goes to its next best node that has room, the last of the layout
first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.dataset.part import Ints
from penstock.errors import OptionError
from penstock.plan.placement import Layout

NOBODY = -1
"""The home of a unit that is not placed."""

_CHUNK_UNITS = 1 << 16
"""Units drawn for together: their numbers stay in the processor's cache."""

Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node as a home."""

    name: str
    """What its draws are made from; it keeps its units as long as it keeps its name."""
    capacity_bytes: int
    """All its tiers together."""

    def __post_init__(self) -> None:
        if self.capacity_bytes < 0:
            raise OptionError(
                f"node {self.name!r} has {self.capacity_bytes} bytes; 0 or more make sense"
            )


def homes_of(layout: Layout, nodes: Sequence[Node]) -> Ints:
    """Return the home of each unit, as a place in `nodes`; `NOBODY` where it has none."""
    homes = np.full(len(layout.offsets), NOBODY, np.int64)
    left = _placed(layout, sum(node.capacity_bytes for node in nodes))
    free = np.array([node.capacity_bytes for node in nodes], np.int64)
    is_open = [node.capacity_bytes > 0 for node in nodes]
    while len(left) and any(is_open):
        choice = best_nodes(left, nodes, is_open)
        spilled = np.zeros(len(left), bool)
        by_node = np.argsort(choice, kind="stable")
        edges = np.searchsorted(choice[by_node], np.arange(len(nodes) + 1))
        for number in np.flatnonzero(np.diff(edges)).tolist():
            mine = by_node[edges[number] : edges[number + 1]]
            filled = np.cumsum(layout.lengths[left[mine]])
            fits = filled <= free[number]
            homes[left[mine[fits]]] = number
            if not fits.all():
                # A node that had to refuse one is full for good, so this ends after `nodes` rounds.
                spilled[mine[~fits]] = True
                is_open[number] = False
            free[number] -= int(filled[fits][-1]) if fits.any() else 0
        left = left[spilled]
    return homes


def _placed(layout: Layout, capacity_bytes: int) -> Ints:
    """Return the units of the first bytes of the layout, in its order."""
    ends = layout.offsets + layout.lengths
    placed = np.flatnonzero(ends <= capacity_bytes)
    out: Ints = placed[np.argsort(layout.offsets[placed], kind="stable")]
    return out


def best_nodes(units: Ints, nodes: Sequence[Node], is_open: Sequence[bool] | None = None) -> Ints:
    """Return the node with the best draw for each unit, among those that are open.

    Equal draws go to the name that sorts first, whatever the order of `nodes`.
    """
    numbers = [n for n in range(len(nodes)) if is_open is None or is_open[n]]
    numbers = [n for n in numbers if nodes[n].capacity_bytes > 0]
    numbers.sort(key=lambda n: nodes[n].name)
    names = [nodes[n].name for n in numbers]
    if not numbers or len(set(names)) < len(names):
        raise OptionError(
            f"homes need nodes with room and with different names, got {names or list(nodes)}"
        )
    out = np.empty(len(units), np.int64)
    for start in range(0, len(units), _CHUNK_UNITS):
        chunk = units[start : start + _CHUNK_UNITS]
        out[start : start + len(chunk)] = _best(chunk, [nodes[n] for n in numbers], numbers)
    return out


def _best(units: Ints, nodes: list[Node], numbers: list[int]) -> Ints:
    mixed = _mix(units.astype(np.uint64))
    # Where all weigh the same the largest hash wins, and no logarithm is needed.
    is_even = len({node.capacity_bytes for node in nodes}) == 1
    best = np.full(len(units), np.inf)
    out = np.empty(len(units), np.int64)
    for node, number in zip(nodes, numbers, strict=True):
        hashed = _mix(mixed ^ np.uint64(xxhash.xxh3_64_intdigest(node.name.encode())))
        # 53 bits and a half: above 0, below 1, exact.
        h = ((hashed >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        cost = -h if is_even else minus_log(h) / node.capacity_bytes
        better = cost < best
        best[better] = cost[better]
        out[better] = number
    return out


def _mix(words: Words) -> Words:
    """Return words with all bits stirred: a bijection (the finaliser of SplitMix64)."""
    out = words + np.uint64(0x9E3779B97F4A7C15)
    out ^= out >> np.uint64(30)
    out *= np.uint64(0xBF58476D1CE4E5B9)
    out ^= out >> np.uint64(27)
    out *= np.uint64(0x94D049BB133111EB)
    out ^= out >> np.uint64(31)
    return out


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
