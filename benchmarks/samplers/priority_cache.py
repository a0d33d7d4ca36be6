"""SHADE's cache: priorities, and a queue of them that can be changed at any time."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import TypeAlias

import numpy as np

from penstock.order import Ids
from penstock.simulate.importance import Bools, SampleCache

Priority: TypeAlias = tuple[float, int]
"""Weight, then how often the sample was scored; compared in this order."""

_STALE_MAX = 4
"""Entries of the heap for each cached sample, at most; then it is built anew."""


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
        self._capacity = capacity
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


def cached_of(cache: SampleCache, ids: Ids) -> Bools:
    """Return which samples are cached now; nothing changes."""
    return np.fromiter((i in cache for i in ids.tolist()), np.bool_, len(ids))
