"""LRU: the page cache of each node, on its own. It keeps in memory what was used last."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from penstock.dataset.part import Ints
from penstock.simulate.policies.base import Policy
from penstock.simulate.reads import EpochReads, Flags

AccessString = npt.NDArray[np.int32]
"""Sample ids in the order of use: four bytes each keep the uses of a whole run small."""


class Lru(Policy):
    """A cache on each node that asks no other. Hits are worked out for the whole run at once."""

    title = "LRU"

    def why_not(self) -> str:
        """It needs a tier."""
        return "" if self.job.num_tiers else "it is a cache, and the machine has no tier"

    def reads(self, epoch: int) -> EpochReads:
        """Return the node's memory for hits, the store for misses."""
        # Hits of an epoch depend on all epochs before it, so they are computed together.
        if epoch == 0:
            self._hits = self._all_hits()
        reads = self.all_from_store(epoch)
        return replace(reads, sources=np.where(self._hits[epoch], np.uint8(0), reads.sources))

    def hits_of(self, string: AccessString, sizes: Ints) -> Flags:
        """Return which uses of a node's string find their sample in its memory."""
        return lru_hits(string, sizes, float(self.job.capacities[0]))

    def _all_hits(self) -> Flags:
        """Return which uses are hits, by epoch and place in the epoch."""
        num_epochs = self.job.scenario.job.epochs
        epochs = [self.job.accesses(epoch).ids.astype(np.int32) for epoch in range(num_epochs)]
        hits = np.zeros((num_epochs, len(epochs[0])), np.bool_)
        # Shares are fixed, so a node has the same places in every epoch.
        nodes = self.job.nodes_of(self.job.accesses(0).workers)
        by_node = np.argsort(nodes, kind="stable")
        starts = np.searchsorted(nodes[by_node], np.arange(1, self.job.num_nodes))
        for places in np.split(by_node, starts):
            string = np.concatenate([ids[places] for ids in epochs])
            hits[:, places] = self.hits_of(string, self.job.sizes[string]).reshape(num_epochs, -1)
        return hits


def lru_hits(string: npt.NDArray[np.integer], sizes: Ints, capacity: float) -> Flags:
    """Return which uses find their sample in a cache that drops what was used longest ago.

    The cache is a run of the string that ends now. Its far end only moves forwards, past uses
    until what is left fits; so one pass does.

    >>> lru_hits(np.array([1, 2, 1, 3, 2]), np.ones(5), 2)
    array([False, False,  True, False, False])
    """
    size = sizes.tolist()
    alive, hits = bytearray(len(size)), bytearray(len(size))
    used, far = 0, 0
    last_use: dict[int, int] = {}
    for now, sample in enumerate(string.tolist()):
        last = last_use.get(sample, -1)
        last_use[sample] = now
        alive[now] = 1
        if last >= far:
            hits[now] = 1
            alive[last] = 0
            continue
        used += size[now]
        while used > capacity:
            if alive[far]:
                used -= size[far]
                alive[far] = 0
            far += 1
    return np.frombuffer(hits, np.bool_)
