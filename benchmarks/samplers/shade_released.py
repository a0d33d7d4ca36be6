"""SHADE as released (github.com/R-I-S-Khan/SHADE at b20454d): what the program does, not the paper.

Written anew from what the program does; what is peculiar to it is kept on purpose:

* Losses are in the order in which samples were used, but are attributed by the order in which they
  were drawn. The two differ by a sort, a slice, a split and shuffles: scores reach other samples.
* Each rank has weights, draws, queue and ghost of its own; only the cache (Redis) is shared.
* While accuracy improves a rank keeps the most drawn 1/world of its draws; else every world-th.
* Draws that are cached when an epoch begins are used three times, before all others.
* The cache's size is counted once a batch, one batch late, and 50 is added. So it exceeds its
  capacity, and then it evicts for a while without taking anything in.
* Only a miss of a sample that has a ghost entry is counted as a miss (`published_hit_share`).
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
from benchmarks.samplers.priority_cache import Priority, PriorityQueue
from penstock.errors import OptionError
from penstock.order import Ids, key_of
from penstock.simulate.importance import Bools, DrawnStretch, Floats

_SLACK = 50
"""Added to every count of cached samples. A cache of fewer samples stays empty."""


class _Cached:
    """The cache that ranks share, and how full they take it to be."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.resident: set[int] = set()
        self.assumed = 0
        """How many were cached when the previous batch began."""

    def mask(self, ids: Ids) -> Bools:
        """Return which samples are cached."""
        return np.fromiter((i in self.resident for i in ids.tolist()), np.bool_, len(ids))


class _Rank:
    """One process: its weights, draws, queue and ghost."""

    def __init__(self, *, num_samples: int, batch_size: int, cached: _Cached, seed: int) -> None:
        self.weights = np.full(num_samples, FIRST_WEIGHT)
        self.scored: Ids = np.empty(0, np.int64)
        self.num_hits = self.num_misses_counted = 0
        self._log_ranks = log_ranks(batch_size)
        self._cached = cached
        self._queue = PriorityQueue()
        self._ghost: dict[int, Priority] = {}
        self._smoothing = Smoothing()
        self._rng = np.random.default_rng(seed)
        self._drawn: Ids = np.empty(0, np.int64)
        self._position = 0

    def draw(self, *, epoch: int, rank: int, num_ranks: int, improves: bool, copies: float) -> Ids:
        """Return the share of the rank in an epoch."""
        self._smoothing.end_epoch()
        self._position = 0
        num_samples = len(self.weights)
        self._drawn = multinomial(self.weights + self._smoothing.term, num_samples, self._rng)
        length = -(-num_samples // num_ranks)
        if epoch > 0 and improves:
            padded = np.resize(most_drawn_first(self._drawn), length * num_ranks)
            ids = self._rng.permutation(padded[:length])
        else:
            mixed = self._rng.permutation(self._drawn) if epoch == 0 else self._drawn
            ids = np.resize(mixed, length * num_ranks)[rank::num_ranks]
        near, far = replayed(ids, self._cached.mask(ids), copies, self._rng)
        return np.concatenate([near, far])

    def access(self, sample: int) -> bool:
        """Read a sample, and perhaps keep it."""
        cached = self._cached
        if sample in cached.resident:
            self.num_hits += 1
            return True
        known = self._ghost.get(sample)
        self.num_misses_counted += known is not None
        count = cached.assumed + _SLACK
        lowest = self._queue.lowest()
        if count >= cached.capacity and known is not None and lowest is not None and known > lowest:
            cached.resident.discard(self._queue.pop())
            count -= 1
        if count < cached.capacity:
            cached.resident.add(sample)
        return False

    def observe(self, losses: Floats) -> None:
        """Write scores to the samples that stand at these places of the draw."""
        self._smoothing.observe(float(np.mean(losses)))
        order = np.argsort(losses, kind="stable")
        weights = self._log_ranks[: len(losses)]
        self.scored = self._drawn[self._position + order]
        self._position += len(self._log_ranks)
        self.weights[self.scored] = weights
        for sample, weight in zip(self.scored.tolist(), weights.tolist(), strict=True):
            self._score(sample, weight)

    def _score(self, sample: int, weight: float) -> None:
        """Update queue and ghost. Where the queue is new to a sample, both counts begin anew."""
        _, seen = self._ghost.get(sample, (0.0, 0))
        if sample in self._cached.resident:
            queued = sample in self._queue
            self._queue[sample] = (weight, self._queue[sample][1] + 1 if queued else 1)
            seen = seen if queued else 0
        self._ghost[sample] = (weight, seen + 1)


def most_drawn_first(drawn: Ids) -> Ids:
    """Return draws by how often their sample was drawn, most often first, then by id.

    >>> most_drawn_first(np.array([5, 2, 7, 5, 7, 1]))
    array([5, 5, 7, 7, 1, 2])
    """
    return drawn[np.lexsort((drawn, -np.bincount(drawn)[drawn]))]


class ShadeReleasedSource:
    """The released program with some ranks, in one process. Defaults are the program's."""

    name = "shade-released"

    def __init__(
        self,
        *,
        num_samples: int,
        batch_size: int,
        cache_samples: int,
        seed: int,
        num_ranks: int = 1,
        replication: float = 3.0,
    ) -> None:
        if batch_size % num_ranks:
            raise OptionError(
                f"a batch of {batch_size} samples cannot be split over {num_ranks} ranks; "
                f"take a multiple of {num_ranks}"
            )
        self._batch_size = batch_size // num_ranks
        self._cached = _Cached(cache_samples)
        self._replication = replication
        self._progress = AccuracyTrend()
        self._epoch = 0
        self._ranks = [
            _Rank(
                num_samples=num_samples,
                batch_size=self._batch_size,
                cached=self._cached,
                seed=key_of(seed, self.name, rank),
            )
            for rank in range(num_ranks)
        ]

    @property
    def scored(self) -> Ids:
        """Samples that the last batch has set a weight for, rank by rank, easiest first."""
        return np.concatenate([rank.scored for rank in self._ranks])

    @property
    def weights(self) -> Floats:
        """The weights of samples, by rank."""
        return np.stack([rank.weights for rank in self._ranks])

    @property
    def cached(self) -> Ids:
        """The samples that are cached now."""
        return np.fromiter(self._cached.resident, np.int64, len(self._cached.resident))

    @property
    def published_hit_share(self) -> float:
        """Hits as the project's README counts them: first misses of a sample do not count."""
        hits = sum(rank.num_hits for rank in self._ranks)
        return hits / max(1, hits + sum(rank.num_misses_counted for rank in self._ranks))

    def draw(self) -> DrawnStretch:
        """Return an epoch: in each step the batch of rank 0, of rank 1, and so on."""
        shares = np.stack(
            [
                rank.draw(
                    epoch=self._epoch,
                    rank=number,
                    num_ranks=len(self._ranks),
                    improves=self._progress.improves,
                    copies=self._replication,
                )
                for number, rank in enumerate(self._ranks)
            ]
        )
        self._epoch += 1
        starts = range(0, shares.shape[1], self._batch_size)
        ids = np.concatenate([shares[:, s : s + self._batch_size].ravel() for s in starts])
        return DrawnStretch(ids=ids, weights=np.ones(len(ids), np.float32))

    def access(self, ids: Ids) -> Bools:
        """Read one batch of every rank."""
        count = len(self._cached.resident)
        parts = ids.reshape(len(self._ranks), -1).tolist()
        hits = [rank.access(i) for rank, part in zip(self._ranks, parts, strict=True) for i in part]
        self._cached.assumed = count
        return np.array(hits, np.bool_)

    def observe(self, ids: Ids, losses: Floats) -> None:
        """Take in losses in the order of use. The ids are not looked at: that is the defect."""
        parts = np.asarray(losses).reshape(len(self._ranks), -1)
        for rank, part in zip(self._ranks, parts, strict=True):
            rank.observe(part)

    def validated(self, accuracy: float) -> None:
        """Sampling is aggressive as long as accuracy improves."""
        self._progress.validated(accuracy)
