"""Selective back-propagation: all samples are read and run forwards, the hard ones also backwards.

After Jiang et al., "Accelerating Deep Learning by Focusing on the Biggest Losers" (2019): a sample
is trained on with probability (percentile of its loss) ** power. Here the percentile is that of its
latest loss, an epoch old (the paper's stale variant), because a stretch is drawn before it is run.
"""

from __future__ import annotations

import numpy as np

from penstock.order import GlobalOrder, Ids, key_of
from penstock.simulate.importance import Bools, DrawnStretch, FillOnceCache, Floats, access_all


class SelectiveSource:
    """Plain epochs in which most easy samples weigh nothing.

    The weights make mean(weights * losses) the mean over the chosen samples of the batch. Samples
    of weight 0 need a forward pass, for their next percentile, and no backward pass. It saves
    compute, not reads; so the cache is the one of plain epochs.
    """

    name = "selective"

    def __init__(
        self,
        *,
        num_samples: int,
        batch_size: int,
        cache_samples: int,
        seed: int,
        power: float = 2.0,
    ) -> None:
        self._order = GlobalOrder(num_samples=num_samples, seed=seed)
        self._batch_size = batch_size
        self._power = power
        self._cache = FillOnceCache(cache_samples)
        # Infinite: what was never seen is surely trained on.
        self._losses = np.full(num_samples, np.inf)
        self._rng = np.random.default_rng(key_of(seed, self.name))
        self._epoch = 0

    def draw(self) -> DrawnStretch:
        """Return the next epoch, with the share of samples chosen that `power` gives."""
        ids = self._order.ids(self._epoch, 0, self._order.num_samples)
        self._epoch += 1
        chosen = self._rng.random(len(ids)) < self._chances()[ids]
        starts = np.arange(0, len(ids), self._batch_size)
        sizes = np.diff(np.append(starts, len(ids)))
        scale = sizes / np.maximum(1, np.add.reduceat(chosen, starts, dtype=np.int64))
        return DrawnStretch(ids=ids, weights=(chosen * np.repeat(scale, sizes)).astype(np.float32))

    def _chances(self) -> Floats:
        ranks = np.empty(len(self._losses))
        ranks[np.argsort(self._losses, kind="stable")] = np.arange(1, len(self._losses) + 1)
        chances: Floats = (ranks / len(ranks)) ** self._power
        return np.where(np.isinf(self._losses), 1.0, chances)

    def access(self, ids: Ids) -> Bools:
        """Read a batch through a cache that never evicts."""
        return access_all(self._cache, ids)

    def observe(self, ids: Ids, losses: Floats) -> None:
        """Keep the latest loss of each sample."""
        self._losses[ids] = losses
