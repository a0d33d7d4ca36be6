"""Caches over strings: each is its rule, and none passes MIN."""

from __future__ import annotations

from collections import OrderedDict
from itertools import combinations

import numpy as np
import pytest
from benchmarks.samplers.priority_cache import PriorityCache, PriorityQueue, cached_of
from benchmarks.samplers.same_string import (
    byte_hit_bound,
    lru_hits,
    min_hits,
    priority_hits,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.simulate.importance import FillOnceCache, LruCache, SampleCache, access_all

STRINGS = st.lists(st.integers(0, 7), min_size=1, max_size=60)
CAPACITIES = st.integers(0, 6)


def most_hits(string: list[int], capacity: int) -> int:
    """The most hits of any cache, by trying every content after every use."""
    best = {frozenset[int](): 0}
    for sample in string:
        after: dict[frozenset[int], int] = {}
        for held, hits in best.items():
            found = hits + (sample in held)
            near = held | {sample}
            for size in range(min(capacity, len(near)) + 1):
                for kept in map(frozenset, combinations(near, size)):
                    after[kept] = max(after.get(kept, 0), found)
        best = after
    return max(best.values())


@settings(deadline=None)
@given(string=st.lists(st.integers(0, 4), min_size=1, max_size=12), capacity=st.integers(0, 3))
def test_min_has_the_most_hits_that_any_cache_has(string: list[int], capacity: int) -> None:
    hits = min_hits(np.array(string), np.ones(len(string), np.int64), capacity)
    assert hits.sum() == most_hits(string, capacity)


@given(string=STRINGS, capacity=CAPACITIES, seed=st.integers(0, 99))
def test_no_cache_passes_min(string: list[int], capacity: int, seed: int) -> None:
    ids = np.array(string)
    sizes = np.ones(len(ids), np.int64)
    scores = np.random.default_rng(seed).random(len(ids))
    most = min_hits(ids, sizes, capacity).sum()
    assert byte_hit_bound(ids, np.ones(8), capacity) * len(ids) == pytest.approx(most)
    for hits in (
        lru_hits(ids, sizes, capacity),
        priority_hits(ids, scores, capacity),
        access_all(FillOnceCache(capacity), ids),
    ):
        assert hits.sum() <= most


@given(
    string=STRINGS,
    sizes=st.lists(st.integers(1, 9), min_size=8, max_size=8),
    capacity=st.integers(0, 30),
)
def test_no_cache_of_whole_samples_finds_more_bytes_than_the_bound(
    string: list[int], sizes: list[int], capacity: int
) -> None:
    ids, by_use = np.array(string), np.array(sizes)[string]
    bound = byte_hit_bound(ids, sizes, capacity)
    for hits_of in (lru_hits, min_hits):
        hits = hits_of(ids, by_use, capacity)
        assert (by_use * hits).sum() / by_use.sum() <= bound + 1e-12


@given(string=STRINGS, capacity=CAPACITIES)
def test_lru_is_a_plain_ordered_dict(string: list[int], capacity: int) -> None:
    kept: OrderedDict[int, None] = OrderedDict()
    expected = []
    for sample in string:
        expected.append(kept.pop(sample, 0) is None)
        kept[sample] = None
        while len(kept) > capacity:
            kept.popitem(last=False)
    cache = LruCache(capacity)
    assert access_all(cache, np.array(string)).tolist() == expected
    if capacity:
        ones = np.ones(len(string), np.int64)
        assert lru_hits(np.array(string), ones, capacity).tolist() == expected
    assert [i for i in range(8) if i in cache] == sorted(kept)


@given(
    string=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 3)), max_size=60),
    capacity=CAPACITIES,
)
def test_the_priority_cache_evicts_the_least_priority_for_a_higher_one(
    string: list[tuple[int, int]], capacity: int
) -> None:
    cache = PriorityCache(capacity)
    ghost: dict[int, tuple[float, int]] = {}
    kept: set[int] = set()
    for sample, weight in string:
        assert cache.access(sample) == (sample in kept)
        if sample not in kept and len(kept) < capacity:
            kept.add(sample)
        elif sample not in kept and kept and sample in ghost:
            least = min(kept, key=lambda i: (ghost[i], i))
            if ghost[sample] > ghost[least]:
                kept = kept - {least} | {sample}
        cache.score((sample,), (float(weight),))
        ghost[sample] = (float(weight), ghost.get(sample, (0.0, 0))[1] + 1)
        assert cached_of(cache, np.arange(8)).nonzero()[0].tolist() == sorted(kept)


@given(changes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=300))
def test_the_queue_pops_by_the_latest_priorities(changes: list[tuple[int, int]]) -> None:
    queue = PriorityQueue()
    latest = {}
    for sample, weight in changes:
        queue[sample] = latest[sample] = (float(weight), 0)
    popped = []
    while queue.lowest() is not None:
        popped.append(queue.pop())
    assert popped == sorted(latest, key=lambda i: (latest[i], i))


@pytest.mark.parametrize("make", [FillOnceCache, LruCache, PriorityCache])
def test_no_cache_holds_more_than_its_capacity(make: type[SampleCache]) -> None:
    cache = make(5)
    for sample in np.random.default_rng(3).integers(0, 40, 400).tolist():
        cache.access(sample)
        assert len(cache) <= 5
    assert len(cache) == 5


def test_a_cache_that_never_evicts_finds_its_share_of_every_later_epoch() -> None:
    cache = FillOnceCache(30)
    rng = np.random.default_rng(0)
    found = [access_all(cache, rng.permutation(100)).sum() for _ in range(4)]
    assert found == [0, 30, 30, 30]
