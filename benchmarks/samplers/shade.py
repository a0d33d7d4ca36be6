"""SHADE as its authors describe it: every score reaches its own sample.

Known to us from the abstract, from notes of readers and from the released program; the text of the
paper was not at hand. Where the program contradicts the description, this follows the description:

* Losses are attributed by the ids that come with them, over the whole global batch.
* The draws of an epoch are shuffled as one, cached and not.
* Ranks share weights, draws and cache, so no rank loses a part of the data set.
* The cache keeps to its capacity.

Nothing corrects for unequal draws: all weights of the losses are 1. `shade_released` is the other.
"""

from __future__ import annotations

import numpy as np

from benchmarks.samplers.pads import (
    FIRST_WEIGHT,
    AccuracyTrend,
    Smoothing,
    log_ranks,
    multinomial,
    replayed,
)
from benchmarks.samplers.priority_cache import PriorityCache, cached_of
from penstock.order import Ids, key_of
from penstock.simulate.importance import Bools, DrawnStretch, Floats, access_all


class ShadeSource:
    """Draws with replacement by rank of the loss; a priority cache with a ghost.

    While validation accuracy improves, draws that are cached are used `replication` times.
    """

    name = "shade"

    def __init__(
        self,
        *,
        num_samples: int,
        batch_size: int,
        cache_samples: int,
        seed: int,
        replication: float = 1.0,
    ) -> None:
        self.weights = np.full(num_samples, FIRST_WEIGHT)
        self.scored: Ids = np.empty(0, np.int64)
        """Samples that the last batch has set a weight for, easiest first."""
        self._log_ranks = log_ranks(batch_size)
        self._cache = PriorityCache(cache_samples)
        self._replication = replication
        self._rng = np.random.default_rng(key_of(seed, self.name))
        self._smoothing = Smoothing()
        self._progress = AccuracyTrend()

    def draw(self) -> DrawnStretch:
        """Return as many draws as there are samples."""
        self._smoothing.end_epoch()
        num_samples = len(self.weights)
        ids = multinomial(self.weights + self._smoothing.term, num_samples, self._rng)
        if self._replication != 1 and self._progress.improves:
            parts = replayed(ids, cached_of(self._cache, ids), self._replication, self._rng)
            ids = self._rng.permutation(np.concatenate(parts))
        return DrawnStretch(ids=ids, weights=np.ones(len(ids), np.float32))

    def access(self, ids: Ids) -> Bools:
        """Read a batch through the priority cache."""
        return access_all(self._cache, ids)

    def observe(self, ids: Ids, losses: Floats) -> None:
        """Give each sample the logarithm of its loss' rank in this batch."""
        self._smoothing.observe(float(np.mean(losses)))
        self.scored = ids[np.argsort(losses, kind="stable")]
        weights = self._log_ranks[: len(ids)]
        self.weights[self.scored] = weights
        self._cache.score(self.scored.tolist(), weights.tolist())

    def validated(self, accuracy: float) -> None:
        """Replays stop when accuracy no longer improves."""
        self._progress.validated(accuracy)
