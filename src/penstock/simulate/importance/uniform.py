"""Plain epochs: every sample once, in a fresh keyed permutation. The measure of all others."""

from __future__ import annotations

import numpy as np

from penstock.order import GlobalOrder, Ids
from penstock.simulate.importance.base import Bools, DrawnStretch, Floats
from penstock.simulate.importance.caches import FillOnceCache, LruCache, SampleCache, access_all


class UniformSource:
    """Plain epochs; the cache is given.

    With a cache that never evicts this meets the bound of plain epochs: an epoch finds as many
    samples as the cache holds, and no policy finds more.
    """

    def __init__(self, name: str, *, num_samples: int, cache: SampleCache, seed: int) -> None:
        self.name = name
        self._order = GlobalOrder(num_samples=num_samples, seed=seed)
        self._cache = cache
        self._epoch = 0

    def draw(self) -> DrawnStretch:
        """Return the next epoch."""
        ids = self._order.ids(self._epoch, 0, self._order.num_samples)
        self._epoch += 1
        return DrawnStretch(ids=ids, weights=np.ones(len(ids), np.float32))

    def access(self, ids: Ids) -> Bools:
        """Read a batch through the cache."""
        return access_all(self._cache, ids)

    def observe(self, ids: Ids, losses: Floats) -> None:
        """Ignore the losses."""

    def validated(self, accuracy: float) -> None:
        """Ignore the accuracy."""


def uniform(*, num_samples: int, batch_size: int, cache_samples: int, seed: int) -> UniformSource:
    """Return plain epochs over a cache that never evicts."""
    cache = FillOnceCache(cache_samples)
    return UniformSource("uniform", num_samples=num_samples, cache=cache, seed=seed)


def uniform_lru(
    *, num_samples: int, batch_size: int, cache_samples: int, seed: int
) -> UniformSource:
    """Return plain epochs over an LRU cache."""
    cache = LruCache(cache_samples)
    return UniformSource("uniform-lru", num_samples=num_samples, cache=cache, seed=seed)
