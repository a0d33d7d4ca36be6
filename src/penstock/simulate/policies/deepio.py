"""DeepIO (MASCOTS 2018): each node loads part of the set into memory first, then they share.

Where not everything fits, *ordered* reads the rest from the store when it is asked for, without
looking ahead; *opportunistic* leaves the rest out and trains on what is in memory.
"""

from __future__ import annotations

import numpy as np

from penstock.dataset.part import Ints
from penstock.simulate.policies.base import Policy, bytes_by_node, sharded, sources_of
from penstock.simulate.reads import Reads, StagingWork


class DeepioOrdered(Policy):
    """The order is kept; samples that are not in memory are read when asked for."""

    title = "DeepIO ordered"

    def why_not(self) -> str:
        """It needs memory."""
        return "" if self.job.num_tiers else "it caches in memory, and the machine has no tier"

    def start(self) -> StagingWork:
        """Load each node's part of the set into its memory."""
        self._holders = sharded(self.job, 0)
        held = bytes_by_node(self.job, self._holders)
        return StagingWork(store_bytes=held, peer_bytes=np.zeros_like(held), tier=0)

    def reads(self, epoch: int) -> Reads:
        """Return memory ahead of time, the store at the last moment."""
        from dataclasses import replace

        reads = self.from_holders(self.job.accesses(epoch), self._holders, 0)
        return replace(reads, ahead=reads.sources != self.job.store)


class DeepioOpportunistic(DeepioOrdered):
    """What is in memory is trained on, again and again; what is not is never visited."""

    title = "DeepIO opport."

    def why_not(self) -> str:
        """It needs something in memory."""
        without = super().why_not()
        if not without and int(self.job.capacities[0]) < int(self.job.sizes.max()):
            return "its memory does not hold a single sample"
        return without

    def reads(self, epoch: int) -> Reads:
        """Return draws from memory, each sample as often as the next."""
        job, uses = self.job, self.job.accesses(epoch)
        ids = repeated(
            np.flatnonzero(self._holders >= 0), len(uses.ids), job.scenario.job.seed + epoch
        )
        held = self._holders[ids]
        return Reads(
            ids=ids,
            steps=uses.steps,
            workers=uses.workers,
            sources=sources_of(job, held, job.nodes_of(uses.workers), 0),
            holders=held,
        )


def repeated(pool: Ints, count: int, seed: int) -> Ints:
    """Return so many samples from a pool: all of it in a random order, then all of it again."""
    rng = np.random.default_rng(seed)
    passes = [rng.permutation(pool) for _ in range(-(-count // len(pool)))]
    return np.concatenate(passes)[:count]
