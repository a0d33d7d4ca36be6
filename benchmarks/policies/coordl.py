"""CoorDL's MinIO cache (VLDB 2021): memory that is filled once and never evicts, read by all nodes.

A node keeps what it used first, until its memory is full. In plain epochs that is as good as any
eviction could be. Disks are not used, and which node keeps a sample depends on who came first.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.policies.shards import reads_from
from penstock.dataset.part import Ints
from penstock.simulate.job import Floats, SimulatedJob, added
from penstock.simulate.policies import Policy
from penstock.simulate.reads import EpochReads


class Coordl(Policy):
    """First come, first kept; never evicted; shared."""

    title = "CoorDL"

    def why_not(self) -> str:
        return "" if self.job.num_tiers else "it caches in memory, and the machine has no tier"

    def start(self) -> None:
        self._holders = np.full(len(self.job.sizes), -1, np.int64)
        self._free = np.full(self.job.num_nodes, float(self.job.capacities[0]))

    def reads(self, epoch: int) -> EpochReads:
        """Return memory for what is kept, the store for the rest."""
        job, uses = self.job, self.job.accesses(epoch)
        nodes = job.nodes_of(uses.workers)
        held = self._holders[uses.ids]
        new = np.flatnonzero(held < 0)
        kept = new[fits(job, nodes[new], job.sizes[uses.ids[new]], self._free)]
        self._holders[uses.ids[kept]] = nodes[kept]
        sizes = job.sizes[uses.ids[kept]].astype(np.float64)
        self._free -= added(nodes[kept], sizes, job.num_nodes)
        return replace(reads_from(job, uses, held, 0), holders=np.where(held < 0, nodes, held))


def fits(job: SimulatedJob, nodes: Ints, sizes: Ints, free: Floats) -> Ints:
    """Return which samples find room when each node takes them in order until one does not fit."""
    order = np.argsort(nodes, kind="stable")
    total = np.cumsum(sizes[order])
    starts = np.searchsorted(nodes[order], np.arange(job.num_nodes))
    before = np.concatenate([[0], total])[starts]
    inside = total - before[nodes[order]]
    out: Ints = order[inside <= free[nodes[order]]]
    return out
