"""DeepIO (MASCOTS 2018): each node loads part of the set into memory first, then they share.

Where not everything fits, *ordered* reads the rest from the store when it is asked for, without
looking ahead; *opportunistic* leaves the rest out and trains on what is in memory.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.policies.shards import reads_from, sharded, staging_of
from penstock.simulate.policies import Policy
from penstock.simulate.policies.sharding import repeated
from penstock.simulate.reads import EpochReads, StagingWork


class DeepioOrdered(Policy):
    """The order is kept; samples that are not in memory are read when asked for."""

    title = "DeepIO ordered"

    def why_not(self) -> str:
        return "" if self.job.num_tiers else "it caches in memory, and the machine has no tier"

    def start(self) -> StagingWork:
        """Load each node's part of the set into its memory."""
        self._holders = sharded(self.job, 0)
        return staging_of(self.job, self._holders, 0)

    def reads(self, epoch: int) -> EpochReads:
        """Return memory ahead of time, the store at the last moment."""
        uses = self.job.accesses(epoch)
        reads = reads_from(self.job, uses, self._holders[uses.ids], 0)
        return replace(reads, ahead=reads.sources != self.job.store)


class DeepioOpportunistic(DeepioOrdered):
    """What is in memory is trained on, again and again; what is not is never visited."""

    title = "DeepIO opport."

    def why_not(self) -> str:
        without = super().why_not()
        if not without and int(self.job.capacities[0]) < int(self.job.sizes.max()):
            return "its memory does not hold a single sample"
        return without

    def reads(self, epoch: int) -> EpochReads:
        """Return draws from memory, each sample as often as the next."""
        job, uses = self.job, self.job.accesses(epoch)
        pool = np.flatnonzero(self._holders >= 0)
        ids = repeated(pool, len(uses.ids), job.scenario.job.seed + epoch)
        return reads_from(job, replace(uses, ids=ids), self._holders[ids], 0)
