"""Hits of a cache, against the most that were possible."""

import numpy as np
import pytest

from penstock.engine.cache_hits import HitCounter

SIZES = np.full(4, 10)


def counted(uses: list[int], held: list[int]) -> HitCounter:
    """Count uses, each a step, of a cache that keeps `held` for ever."""
    counter = HitCounter()
    for unit in uses:
        counter.begin_step(np.array([unit]), lambda: np.array(held, np.int64))
        counter.count(SIZES[[unit]], np.array([unit in held]))
    return counter


def test_hits_are_counted_by_bytes() -> None:
    hits = counted([0, 1, 0, 2], held=[0]).hits(SIZES, 10)
    assert (hits.used_bytes, hits.hit_bytes, hits.share) == (40, 20, 0.5)


@pytest.mark.parametrize(("capacity_bytes", "most"), [(0, 0.0), (10, 0.25), (40, 0.5)])
def test_the_most_is_that_of_a_cache_that_knows_the_order(capacity_bytes: int, most: float) -> None:
    hits = counted([0, 1, 0, 1], held=[]).hits(SIZES, capacity_bytes)
    assert hits.most_share == pytest.approx(most)


def test_units_that_were_there_from_the_beginning_are_no_reads() -> None:
    assert counted([0, 1], held=[0, 1]).hits(SIZES, 40).most_share == pytest.approx(1.0)
