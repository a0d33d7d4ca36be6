"""The rules that both forms of SHADE share: scores, draws, replays and the two feedback loops.

SHADE (Khan et al., "SHADE: Enable Fundamental Cacheability for Distributed Deep Learning Training",
FAST 2023) draws an epoch with replacement, by weights that are logarithms of the rank of a sample's
loss within its batch. PADS, its sampler, may replay draws that are cached in place of others.
"""

from __future__ import annotations

import numpy as np

from penstock.order import Ids
from penstock.simulate.importance import Bools, Floats

FIRST_WEIGHT = 1.0
"""Of samples that were never scored. It is below every score: they are drawn least."""
_SMOOTHING_SHARE = 0.01
_IMPROVEMENTS_KEPT = 3


def log_ranks(batch_size: int) -> Floats:
    """Return the weight for each rank of a loss within a batch, easiest first.

    >>> log_ranks(64)[[0, 63]].round(3)
    array([2.303, 4.29 ])
    """
    weights: Floats = np.log(np.arange(batch_size) + 10.0)
    return weights


def multinomial(weights: Floats, count: int, rng: np.random.Generator) -> Ids:
    """Return samples drawn with replacement, with probabilities in proportion to their weights."""
    ends = np.cumsum(weights, dtype=np.float64)
    places = rng.random(count) * ends[-1]
    # A product can round up to the end itself.
    drawn: Ids = np.minimum(np.searchsorted(ends, places, side="right"), len(weights) - 1)
    return drawn


def replayed(
    ids: Ids, cached: Bools, replication: float, rng: np.random.Generator
) -> tuple[Ids, Ids]:
    """Return the cached draws, so many times each, and the misses for which that leaves room.

    Both are shuffled; together they are as long as `ids`. A half in `replication` is one more copy
    of the first half of the cached draws.

    >>> near, far = replayed(
    ...     np.arange(8), np.arange(8) < 2, 2.5, np.random.default_rng(0)
    ... )
    >>> sorted(near.tolist()), len(far)
    ([0, 0, 0, 1, 1], 3)
    """
    hits, misses = ids[cached], ids[~cached]
    half = hits[: len(hits) // 2] if replication % 1 else hits[:0]
    near = rng.permutation(np.concatenate([np.tile(hits, int(replication)), half]))
    far = rng.permutation(misses)
    return near[: len(ids)], far[: max(0, len(ids) - len(near))]


class Smoothing:
    """A term that is added to all weights of a draw; it falls as the training loss falls."""

    def __init__(self) -> None:
        self.term = 0.0
        self._previous: float | None = None
        self._batch_losses: list[float] = []

    def observe(self, batch_loss: float) -> None:
        """Take in the mean loss of a batch."""
        self._batch_losses.append(batch_loss)

    def end_epoch(self) -> None:
        """Set the term from the mean loss of the epoch that has just ended."""
        if not self._batch_losses:
            return
        loss = float(np.mean(self._batch_losses))
        self._batch_losses.clear()
        if self._previous is None:
            self.term = loss * _SMOOTHING_SHARE
        elif self._previous > 0:
            self.term *= float(np.exp((loss - self._previous) / self._previous))
        self._previous = loss


class AccuracyTrend:
    """Whether validation accuracy improves: the mean of its last three changes is above zero."""

    def __init__(self) -> None:
        self._accuracy: float | None = None
        self._changes: list[float] = []

    def validated(self, accuracy: float) -> None:
        """Take in the accuracy of an epoch."""
        self._changes.append(0.0 if self._accuracy is None else accuracy - self._accuracy)
        self._accuracy = accuracy

    @property
    def improves(self) -> bool:
        """True also as long as nobody has validated."""
        if len(self._changes) < _IMPROVEMENTS_KEPT:
            return not self._changes or self._changes[-1] > 0
        return sum(self._changes[-_IMPROVEMENTS_KEPT:]) > 0
