"""Caches that evict, one on each node and on its own: LRU (the page cache) and Belady's MIN.

Both look at the string of a node's own uses. LRU keeps what was used last, in memory. MIN knows the
future and keeps what is used next, in all tiers of the node; no other eviction has fewer misses.
Neither asks another node.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.dataset.part import Ints
from penstock.simulate.job import SimulatedJob
from penstock.simulate.policies.base import Policy
from penstock.simulate.policies.strings import neighbours, node_strings, uses_by_node
from penstock.simulate.reads import Reads

AnyInts = npt.NDArray[np.signedinteger[Any]]
Hits = npt.NDArray[np.bool_]


class _Evicting(Policy):
    """Hits are worked out for the whole run at once."""

    hits_of: Callable[[AnyInts, Ints, float], Hits]

    def capacity_bytes(self) -> int:
        """Return what a node's cache holds."""
        raise NotImplementedError

    def tiers_of(self, ids: Ints) -> Ints:
        """Return the tier that hits are read from."""
        return np.zeros(len(ids), np.int64)

    def why_not(self) -> str:
        """It needs a tier."""
        return "" if self.job.num_tiers else "it is a cache, and the machine has no tier"

    def reads(self, epoch: int) -> Reads:
        """Return the own tier for hits, the store for misses."""
        if epoch == 0:
            self._hits = all_hits(self.job, type(self).hits_of, self.capacity_bytes())
        uses = self.job.accesses(epoch)
        tiers = self.tiers_of(uses.ids)
        sources = np.where(self._hits[epoch], tiers, self.job.store).astype(np.uint8)
        return Reads(ids=uses.ids, steps=uses.steps, workers=uses.workers, sources=sources)


def all_hits(
    job: SimulatedJob, hits_of: Callable[[AnyInts, Ints, float], Hits], capacity: float
) -> Hits:
    """Return which uses are hits, by epoch and place in the epoch."""
    ids, bounds = uses_by_node(job)
    hits = np.zeros(ids.shape, np.bool_)
    for node, string in node_strings(ids, bounds):
        part = hits_of(string, job.sizes[string], capacity)
        hits[:, bounds[node] : bounds[node + 1]] = part.reshape(len(ids), -1)
    nodes = job.nodes_of(job.accesses(0).workers)
    back = np.empty(len(nodes), np.int64)
    back[np.argsort(nodes, kind="stable")] = np.arange(len(nodes))
    return hits[:, back]


def lru_hits(string: AnyInts, sizes: Ints, capacity: float) -> Hits:
    """Return which uses find their sample in a cache that drops what was used longest ago.

    The cache is a run of the string that ends now. Its far end only moves forwards, past uses
    until what is left fits; so one pass does.

    >>> lru_hits(np.array([1, 2, 1, 3, 2]), np.ones(5), 2)
    array([False, False,  True, False, False])
    """
    before = neighbours(string)[0].tolist()
    size = sizes.tolist()
    alive, hits = bytearray(len(size)), bytearray(len(size))
    used, far = 0, 0
    for now, last in enumerate(before):
        alive[now] = 1
        if last >= far:
            hits[now] = 1
            alive[last] = 0
            continue
        used += size[now]
        while used > capacity:
            if alive[far]:
                used -= size[far]
                alive[far] = 0
            far += 1
    return np.frombuffer(hits, np.bool_)


def min_hits(string: AnyInts, sizes: Ints, capacity: float) -> Hits:
    """Return which uses find their sample in a cache that drops what is used last from now.

    A sample in the cache is known by the place of its next use. One whose next use is further off
    than those of all others is not taken in.

    >>> min_hits(np.array([1, 2, 1, 3, 2, 1]), np.ones(6), 2)
    array([False, False,  True, False,  True,  True])
    """
    after, size = neighbours(string)[1].tolist(), sizes.tolist()
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


class Lru(_Evicting):
    """The page cache of each node."""

    title = "LRU"
    hits_of = staticmethod(lru_hits)

    def capacity_bytes(self) -> int:
        """Return the node's memory."""
        return int(self.job.capacities[0])


class Belady(_Evicting):
    """MIN on each node, over all its tiers."""

    title = "Belady"
    hits_of = staticmethod(min_hits)

    def capacity_bytes(self) -> int:
        """Return all tiers of the node."""
        return int(self.job.capacities.sum())

    def tiers_of(self, ids: Ints) -> Ints:
        """Return a tier for each sample, as often as the tier is large."""
        ends = np.cumsum(self.job.capacities) / max(1, self.job.capacities.sum())
        # A fixed scatter of the ids: which tier a hit lies in is not MIN's concern.
        scattered = (ids * 2654435761 % 2**32) / 2**32
        tiers = np.searchsorted(ends, scattered, side="right")
        return np.minimum(tiers, self.job.num_tiers - 1)
