"""Caches of equally large samples, in the process: which samples are kept, never their bytes.

Each answers `access` for one sample after another and changes as it does. All are exact models of
their rule; `strings` runs them over a given access string.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol, TypeAlias

import numpy as np

from penstock.arguments import count_of
from penstock.order import Ids
from penstock.simulate.importance.base import Bools

Priority: TypeAlias = tuple[float, int]
"""Weight, then how often the sample was scored; compared in this order."""

_STALE_MAX = 4
"""Entries of the heap for each cached sample, at most; then it is built anew."""


class SampleCache(Protocol):
    """Which samples are near."""

    def __contains__(self, sample: object) -> bool: ...

    def __len__(self) -> int: ...

    def access(self, sample: int) -> bool:
        """Use a sample, and return whether it was cached."""
        ...


def access_all(cache: SampleCache, ids: Ids) -> Bools:
    """Use samples one after the other, and return which of them were cached."""
    return np.fromiter(map(cache.access, ids.tolist()), np.bool_, len(ids))


def cached_of(cache: SampleCache, ids: Ids) -> Bools:
    """Return which samples are cached now; nothing changes."""
    return np.fromiter((i in cache for i in ids.tolist()), np.bool_, len(ids))


class FillOnceCache:
    """Takes in what comes first until it is full, and never evicts (MinIO, CoorDL)."""

    def __init__(self, capacity: int) -> None:
        self._capacity = count_of("the capacity of a cache", capacity, least=0)
        self._resident: set[int] = set()

    def __contains__(self, sample: object) -> bool:
        return sample in self._resident

    def __len__(self) -> int:
        return len(self._resident)

    def access(self, sample: int) -> bool:
        """Use a sample; a miss is kept while there is room."""
        if sample in self._resident:
            return True
        if len(self._resident) < self._capacity:
            self._resident.add(sample)
        return False


class LruCache:
    """Evicts what was used longest ago: the page cache."""

    def __init__(self, capacity: int) -> None:
        self._capacity = count_of("the capacity of a cache", capacity, least=0)
        self._resident: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, sample: object) -> bool:
        return sample in self._resident

    def __len__(self) -> int:
        return len(self._resident)

    def access(self, sample: int) -> bool:
        """Use a sample; it is the last to be evicted from now on."""
        hit = sample in self._resident
        self._resident[sample] = None
        self._resident.move_to_end(sample)
        if len(self._resident) > self._capacity:
            self._resident.popitem(last=False)
        return hit


class PriorityQueue:
    """Samples by priority, lowest first. A priority can be changed at any time."""

    def __init__(self) -> None:
        self._priorities: dict[int, Priority] = {}
        # A changed priority is pushed once more; entries that no longer agree with the dictionary
        # are skipped when they come up. Cheaper than to move them inside the heap.
        self._heap: list[tuple[Priority, int]] = []

    def __contains__(self, sample: object) -> bool:
        return sample in self._priorities

    def __getitem__(self, sample: int) -> Priority:
        return self._priorities[sample]

    def __setitem__(self, sample: int, priority: Priority) -> None:
        self._priorities[sample] = priority
        heapq.heappush(self._heap, (priority, sample))
        if len(self._heap) > _STALE_MAX * len(self._priorities) + 64:
            self._heap = [(kept, other) for other, kept in self._priorities.items()]
            heapq.heapify(self._heap)

    def lowest(self) -> Priority | None:
        """Return the lowest priority, None where there is no sample."""
        while self._heap:
            priority, sample = self._heap[0]
            if self._priorities.get(sample) == priority:
                return priority
            heapq.heappop(self._heap)
        return None

    def pop(self) -> int:
        """Take out the sample of the lowest priority."""
        assert self.lowest() is not None
        sample = heapq.heappop(self._heap)[1]
        del self._priorities[sample]
        return sample


class PriorityCache:
    """SHADE's cache as described: evicts the least important sample, for a more important one.

    The ghost has the priority of every sample that was ever scored, cached or not. A miss is
    admitted into a full cache if its ghost priority is above the lowest one in the cache; a sample
    that was never scored is not.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = count_of("the capacity of a cache", capacity, least=0)
        self._resident: set[int] = set()
        self._queue = PriorityQueue()
        self._ghost: dict[int, Priority] = {}

    def __contains__(self, sample: object) -> bool:
        return sample in self._resident

    def __len__(self) -> int:
        return len(self._resident)

    def access(self, sample: int) -> bool:
        """Use a sample; a miss may take the place of the least important one."""
        if sample in self._resident:
            return True
        known = self._ghost.get(sample)
        if len(self._resident) >= self._capacity:
            lowest = self._queue.lowest()
            if known is None or lowest is None or known <= lowest:
                return False
            self._resident.remove(self._queue.pop())
        self._resident.add(sample)
        if known is not None:
            self._queue[sample] = known
        return False

    def score(self, ids: Iterable[int], weights: Iterable[float]) -> None:
        """Set the weight of samples that were used, cached or not, and count the use."""
        for sample, weight in zip(ids, weights, strict=True):
            _, times = self._ghost.get(sample, (0.0, 0))
            self._ghost[sample] = priority = (weight, times + 1)
            if sample in self._resident:
                self._queue[sample] = priority
