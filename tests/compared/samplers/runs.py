"""Runs of a compared system in which every sample has a fixed difficulty."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from penstock.order import Ids
from penstock.simulate.importance import Floats, TrainingSource


@dataclass
class Epoch:
    """What an epoch has used, and what of it was cached."""

    ids: Ids
    weights: Floats
    hits: np.ndarray

    @property
    def hit_share(self) -> float:
        return float(self.hits.mean())

    def distinct_share(self, num_samples: int) -> float:
        return len(np.unique(self.ids)) / num_samples


def difficulties(num_samples: int) -> Floats:
    return np.random.default_rng(11).permutation(num_samples) / num_samples


def epochs_of(
    source: TrainingSource,
    losses: Floats,
    batch_size: int,
    num_epochs: int,
    after_batch: Callable[[Ids], None] = lambda ids: None,
) -> Iterator[Epoch]:
    """Yield stretch after stretch; `after_batch` is called when a batch has been observed."""
    for _ in range(num_epochs):
        drawn = source.draw()
        hits = []
        for start in range(0, len(drawn.ids), batch_size):
            ids = drawn.ids[start : start + batch_size]
            hits.append(source.access(ids))
            source.observe(ids, losses[ids])
            after_batch(ids)
        yield Epoch(drawn.ids, drawn.weights, np.concatenate(hits))
