"""Importance sampling, compared: systems that choose samples, and the caches that go with them.

A system is a stream of samples to train on. A training loop drives it like this:

    drawn = source.draw()                       # again whenever the stretch is used up
    for each global batch of drawn:
        hits = source.access(ids)               # which samples need not be read from the store
        losses = forward(ids)                   # one for each sample
        step on mean(weights * losses)
        source.observe(ids, losses)

A system draws the same samples for the same seed. It holds no bytes: a cache is a set of ids, and
its result is a count of hits. All samples count as equally large.

* `uniform`, `uniform-lru` – plain epochs over a cache that never evicts, and over LRU
* `importance`, `importance-loss`, `cost-aware` – Penstock's own, by its three scores. The same
  values decide here and in a run: `ImportanceCourse` draws, `Residency` evicts.

`benchmarks.samplers` has others from the literature behind the same interface, SHADE among them.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.arguments import count_of, word_of
from penstock.flow.residency import Gaps, Residency
from penstock.order import GlobalOrder, Ids
from penstock.order.importance import (
    Importance,
    ImportanceCourse,
    ImportanceOrder,
    Probabilities,
    StepLosses,
)

Floats: TypeAlias = npt.NDArray[np.floating[Any]]
Bools: TypeAlias = npt.NDArray[np.bool_]

SCORES = {"importance": "loss-rank", "importance-loss": "loss", "cost-aware": "cost-aware"}
"""Penstock's own systems, and how each scores a sample."""
SOURCES = ("uniform", "uniform-lru", *SCORES)
"""Names of the systems that can be compared."""


def source_of(
    name: str, *, num_samples: int, batch_size: int, cache_samples: int, seed: int
) -> TrainingSource:
    """Return a system by its name.

    >>> source = source_of("uniform", num_samples=4, batch_size=2, cache_samples=1, seed=0)
    >>> source.draw().ids
    array([3, 0, 1, 2])
    """
    word_of("name", name, SOURCES)
    count_of("batch_size", batch_size)
    num_samples = count_of("num_samples", num_samples)
    cache_samples = count_of("cache_samples", cache_samples, least=0)
    if name in SCORES:
        return ImportanceSource(
            name,
            Importance(score=SCORES[name]),
            num_samples=num_samples,
            cache_samples=cache_samples,
            seed=seed,
        )
    cache = FillOnceCache(cache_samples) if name == "uniform" else LruCache(cache_samples)
    return UniformSource(name, num_samples=num_samples, cache=cache, seed=seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnStretch:
    """A stretch of the stream: a window or an epoch."""

    ids: Ids
    """Samples in the order of use."""
    weights: Floats
    """Factor of each loss; 1 where nothing is corrected. Batch loss = mean(weights * losses)."""


class TrainingSource(Protocol):
    """A system: it chooses samples and caches some of them."""

    name: str

    def draw(self) -> DrawnStretch:
        """Return the next stretch of the stream; to be called when the last one is used up."""
        ...

    def access(self, ids: Ids) -> Bools:
        """Read one global batch, in order, and return which samples were in the cache."""
        ...

    def observe(self, ids: Ids, losses: Floats) -> None:
        """Record the per-sample losses of one global batch, after its step."""
        ...


# -- plain epochs ----------------------------------------------------------------------------------


class UniformSource:
    """Plain epochs over a given cache.

    With a cache that never evicts this meets the bound of plain epochs: an epoch hits as many
    samples as the cache holds, and no policy hits more.
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


class SampleCache(Protocol):
    """The ids of the samples that a cache holds."""

    def __contains__(self, sample: object) -> bool: ...

    def __len__(self) -> int: ...

    def access(self, sample: int) -> bool:
        """Use a sample, and return whether it was cached."""
        ...


def access_all(cache: SampleCache, ids: Ids) -> Bools:
    """Use samples in a row, and return which of them were cached."""
    return np.fromiter(map(cache.access, ids.tolist()), np.bool_, len(ids))


class FillOnceCache:
    """Keeps the first samples until it is full, and never evicts (MinIO, CoorDL)."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
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
    """Evicts the sample that was used longest ago, like the page cache."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._resident: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, sample: object) -> bool:
        return sample in self._resident

    def __len__(self) -> int:
        return len(self._resident)

    def access(self, sample: int) -> bool:
        """Use a sample; it is now the last to be evicted."""
        hit = sample in self._resident
        self._resident[sample] = None
        self._resident.move_to_end(sample)
        if len(self._resident) > self._capacity:
            self._resident.popitem(last=False)
        return hit


# -- Penstock's own --------------------------------------------------------------------------------


class ImportanceSource:
    """Importance sampling as in the loader, without the loader."""

    def __init__(
        self,
        name: str,
        options: Importance,
        *,
        num_samples: int,
        cache_samples: int,
        seed: int,
    ) -> None:
        self.name = name
        plain = GlobalOrder(num_samples=num_samples, seed=seed)
        options = replace(options, cached=cache_samples / num_samples)
        self.course = ImportanceCourse(ImportanceOrder(plain=plain, options=options))
        self._residency = Residency(np.ones(num_samples, np.int64), cache_samples)
        self._ids: Ids = np.empty(0, np.int64)
        self._hits: Bools = np.empty(0, np.bool_)
        self._has_begun = False

    def draw(self) -> DrawnStretch:
        """Return the next window."""
        if self._has_begun:
            # The scores of the window that ends here draw the window after the next one.
            self.course.close_window()
        self._has_begun = True
        now = self.course.draws(self.course.window)
        following = self.course.draws(self.course.window + 1)
        gaps = expected_gaps(following.chances, self.course.order.num_ids)
        hits = self._residency.window(now.ids, following.ids, gaps).is_hit
        self._ids = np.concatenate([self._ids, now.ids])
        self._hits = np.concatenate([self._hits, hits])
        return DrawnStretch(ids=now.ids, weights=now.weights)

    def access(self, ids: Ids) -> Bools:
        """Return the hits that were decided when the window was drawn."""
        count = len(ids)
        assert np.array_equal(ids, self._ids[:count]), "batches must be used in the order drawn"
        hits = self._hits[:count]
        self._ids, self._hits = self._ids[count:], self._hits[count:]
        return hits

    def observe(self, ids: Ids, losses: Floats) -> None:
        """Score the samples of a step; the window after the next one is drawn by these scores."""
        self.course.observe(StepLosses(ids, np.asarray(losses, np.float32)))


def expected_gaps(chances: Probabilities | None, num_samples: int) -> Gaps:
    """Return the mean number of draws until each sample comes back: 1/p; an epoch if plain."""
    if chances is None:
        return np.full(num_samples, float(num_samples))
    gaps: Gaps = chances.total / chances.points
    return gaps
