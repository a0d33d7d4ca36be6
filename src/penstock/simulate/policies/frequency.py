"""NoPFS's placement: every worker keeps what it will use most often itself.

Each worker counts its own uses over all epochs and fills its tiers with the samples that it uses
most; it loads a tier in the order of first use. Workers do not coordinate: when all tiers together
hold k times the set, many workers keep some samples, and none keeps about e^-k of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.dataset.part import Ints
from penstock.simulate.job import SimulatedJob

_TIE_BITS = 31


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedCopies:
    """The copies of all workers: one row each, sorted by worker, tier and order of loading."""

    workers: Ints
    ids: Ints
    tiers: Ints
    ends: Ints
    """Bytes that the worker has loaded into the tier once this copy is there."""
    places: Ints
    """How many copies the worker has loaded into the tier before."""


def place(job: SimulatedJob, *, ties: str) -> PlacedCopies:
    """Return the copies of every worker. Ties of equal counts are broken "random" or by "index"."""
    workers, ids, counts, first = _counted(job)
    rng = np.random.default_rng(job.scenario.job.seed)
    tie = rng.integers(0, 1 << _TIE_BITS, len(ids)) if ties == "random" else ids
    most = int(counts.max())
    # One integer sort instead of three: worker, then how seldom, then the tie.
    key = ((workers * (most + 1) + (most - counts)) << _TIE_BITS) | tie
    order = np.argsort(key)
    workers, ids, first = workers[order], ids[order], first[order]
    ends = _sum_inside(workers, job.sizes[ids])
    limits = np.cumsum(job.capacities // job.ranks)
    tiers = np.searchsorted(limits, ends, side="left")
    placed = tiers < job.num_tiers
    workers, ids, first, tiers = workers[placed], ids[placed], first[placed], tiers[placed]
    groups = workers * job.num_tiers + tiers
    order = np.lexsort((first, groups))
    groups, ids = groups[order], ids[order]
    return PlacedCopies(
        workers=workers[order],
        ids=ids,
        tiers=tiers[order],
        ends=_sum_inside(groups, job.sizes[ids]),
        places=np.arange(len(groups)) - np.searchsorted(groups, groups),
    )


def known_holders(job: SimulatedJob, copies: PlacedCopies) -> Ints:
    """Return the row of the one copy of each sample that all workers know of; -1: none.

    It is the copy in the fastest tier, and of those the one that is loaded first.
    """
    order = np.lexsort((copies.places, copies.tiers, copies.ids))
    ids = copies.ids[order]
    first = np.ones(len(ids), np.bool_)
    first[1:] = ids[1:] != ids[:-1]
    rows = np.full(len(job.sizes), -1, np.int64)
    rows[ids[first]] = order[first]
    return rows


class OwnCopies:
    """Finds a worker's own copy of a sample."""

    def __init__(self, job: SimulatedJob, copies: PlacedCopies) -> None:
        self._num_samples = len(job.sizes)
        keys = copies.workers * self._num_samples + copies.ids
        self._order = np.argsort(keys)
        self._keys = keys[self._order]

    def rows(self, workers: Ints, ids: Ints) -> Ints:
        """Return the row of each worker's own copy of a sample; -1 where it has none."""
        if not len(self._keys):
            return np.full(len(ids), -1, np.int64)
        wanted = workers * self._num_samples + ids
        at = np.minimum(np.searchsorted(self._keys, wanted), len(self._keys) - 1)
        return np.where(self._keys[at] == wanted, self._order[at], -1)


def _counted(job: SimulatedJob) -> tuple[Ints, Ints, Ints, Ints]:
    """Return each pair of worker and sample, its number of uses, and the place of the first."""
    samples, epochs = len(job.sizes), job.scenario.job.epochs
    keys = []
    for epoch in range(epochs):
        uses = job.accesses(epoch)
        keys.append(uses.workers * samples + uses.ids)
    pairs, first, counts = np.unique(np.concatenate(keys), return_index=True, return_counts=True)
    return pairs // samples, pairs % samples, counts, first


def _sum_inside(groups: Ints, sizes: Ints) -> Ints:
    """Return running sums of sizes that begin anew in every group; groups are sorted."""
    total = np.cumsum(sizes)
    starts = np.searchsorted(groups, groups)
    out: Ints = total - np.concatenate([[0], total])[starts]
    return out
