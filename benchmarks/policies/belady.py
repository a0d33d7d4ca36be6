"""Belady's MIN on each node: it knows the future and keeps what is used next, in all tiers.

No other eviction has fewer misses. It does not ask another node.
"""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from penstock.dataset.part import Ints
from penstock.simulate.job import Codes
from penstock.simulate.policies.lru import AccessString, Lru
from penstock.simulate.reads import EpochReads, Flags


class Belady(Lru):
    """MIN on each node, over all its tiers."""

    title = "Belady"

    def hits_of(self, string: AccessString, sizes: Ints) -> Flags:
        return min_hits(string, sizes, float(self.job.capacities.sum()))

    def reads(self, epoch: int) -> EpochReads:
        reads = super().reads(epoch)
        is_hit = reads.sources != self.job.store
        return replace(reads, sources=np.where(is_hit, self._tiers_of(reads.ids), reads.sources))

    def _tiers_of(self, ids: Ints) -> Codes:
        """Return a tier for each sample, as often as the tier is large."""
        ends = np.cumsum(self.job.capacities) / max(1, self.job.capacities.sum())
        # A fixed scatter of the ids: which tier a hit lies in is not MIN's concern.
        scattered = (ids * 2654435761 % 2**32) / 2**32
        tiers = np.searchsorted(ends, scattered, side="right")
        return np.minimum(tiers, self.job.num_tiers - 1).astype(np.uint8)


def min_hits(string: npt.NDArray[np.integer], sizes: Ints, capacity: float) -> Flags:
    """Return which uses find their sample in a cache that drops what is used last from now.

    A sample in the cache is known by the place of its next use. One whose next use is further off
    than those of all others is not taken in.

    >>> min_hits(np.array([1, 2, 1, 3, 2, 1]), np.ones(6), 2)
    array([False, False,  True, False,  True,  True])
    """
    after, size = next_uses(string).tolist(), sizes.tolist()
    count = len(size)
    kept = bytearray(count + 1)
    heap: list[int] = []
    free = capacity
    for now, following in enumerate(after):
        need = size[now]
        if kept[now]:
            free += need
        if following == count:
            continue
        while free < need and heap:
            furthest = -heap[0]
            if furthest > now and kept[furthest]:
                if furthest <= following:
                    break
                kept[furthest] = 0
                free += size[furthest]
            heapq.heappop(heap)
        if free >= need:
            kept[following] = 1
            heapq.heappush(heap, -following)
            free -= need
    return np.frombuffer(kept, np.bool_)[:count]


def next_uses(string: npt.NDArray[np.integer]) -> Ints:
    """Return for each use where the same sample is used next; the length where it is not.

    >>> next_uses(np.array([7, 8, 7, 7]))
    array([2, 4, 3, 4])
    """
    count = len(string)
    order = np.argsort(string, kind="stable")
    same = string[order][1:] == string[order][:-1]
    after = np.full(count, count)
    after[order[:-1][same]] = order[1:][same]
    return after
