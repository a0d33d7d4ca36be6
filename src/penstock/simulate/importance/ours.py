"""Penstock's own: windows of unbiased draws, and a cache that knows two windows.

The same values decide here and in a run: `ImportanceCourse` draws, `Residency` evicts.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from penstock.flow.residency import Gaps, Residency
from penstock.order import GlobalOrder, Ids
from penstock.order.importance import (
    Importance,
    ImportanceCourse,
    ImportanceOrder,
    Probabilities,
    StepLosses,
)
from penstock.simulate.importance.base import Bools, DrawnStretch, Floats


class ImportanceSource:
    """Importance sampling as the loader does it, without the loader."""

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
        """Return what was decided when the window was drawn."""
        count = len(ids)
        assert np.array_equal(ids, self._ids[:count]), "batches must be used in the order drawn"
        hits = self._hits[:count]
        self._ids, self._hits = self._ids[count:], self._hits[count:]
        return hits

    def observe(self, ids: Ids, losses: Floats) -> None:
        """Score the samples of a step; the window after the next one is drawn by it."""
        self.course.observe(StepLosses(ids, np.asarray(losses, np.float32)))

    def validated(self, accuracy: float) -> None:
        """Ignore the accuracy."""


def expected_gaps(chances: Probabilities | None, num_samples: int) -> Gaps:
    """Return after how many draws each sample comes back on average: 1/p, an epoch if plain."""
    if chances is None:
        return np.full(num_samples, float(num_samples))
    gaps: Gaps = chances.total / chances.points
    return gaps


def importance(
    *, num_samples: int, batch_size: int, cache_samples: int, seed: int
) -> ImportanceSource:
    """Return draws by the logarithm of the loss' rank, as SHADE scores; unbiased."""
    options = Importance(score="loss-rank")
    return ImportanceSource(
        "importance", options, num_samples=num_samples, cache_samples=cache_samples, seed=seed
    )


def importance_loss(
    *, num_samples: int, batch_size: int, cache_samples: int, seed: int
) -> ImportanceSource:
    """Return draws by the loss itself; unbiased."""
    options = Importance(score="loss")
    return ImportanceSource(
        "importance-loss", options, num_samples=num_samples, cache_samples=cache_samples, seed=seed
    )


def cost_aware(
    *, num_samples: int, batch_size: int, cache_samples: int, seed: int
) -> ImportanceSource:
    """Return draws by loss over the square root of a read's cost; unbiased."""
    options = Importance(score="cost-aware")
    return ImportanceSource(
        "cost-aware", options, num_samples=num_samples, cache_samples=cache_samples, seed=seed
    )
