"""Caches over a given access string, so that policies are compared and not samplers.

`lru_hits` and `min_hits` are those of plain strings; `priority_hits` is SHADE's rule, and
`byte_hit_bound` what no cache of these bytes can pass, whatever the sizes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from benchmarks.policies.belady import min_hits
from benchmarks.samplers.priority_cache import PriorityCache
from penstock.flow.bound import belady_bytes
from penstock.order import Ids
from penstock.simulate.importance import Bools, Floats
from penstock.simulate.policies.lru import lru_hits

__all__ = ["byte_hit_bound", "lru_hits", "min_hits", "priority_hits"]


def priority_hits(string: Ids, scores: Floats, capacity: int) -> Bools:
    """Return which uses find their sample in SHADE's cache; each use then sets its score.

    >>> priority_hits(np.array([1, 2, 3, 3, 1, 2]), np.array([5, 1, 4, 4, 5, 1.0]), 2)
    array([False, False, False, False,  True, False])
    """
    cache = PriorityCache(capacity)
    hits = np.zeros(len(string), np.bool_)
    for at, (sample, score) in enumerate(zip(string.tolist(), scores.tolist(), strict=True)):
        hits[at] = cache.access(sample)
        cache.score((sample,), (score,))
    return hits


def byte_hit_bound(string: Ids, sizes: npt.ArrayLike, capacity_bytes: int) -> float:
    """Return the share of the bytes of a string that MIN finds; no cache finds more.

    Samples may be kept in part, which makes it exact; where they may not, it is a bound. `sizes`
    is by id.

    >>> byte_hit_bound(np.array([0, 1, 0, 1]), [10, 30], 20)
    0.25
    """
    used = int(np.asarray(sizes, np.int64)[string].sum())
    return 1 - belady_bytes(string, sizes, capacity_bytes) / used if used else 0.0
