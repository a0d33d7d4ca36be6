"""Penstock: every cached sample has one home, all nodes know it, nothing is evicted.

What is dearest per byte is cached first (`plan.placement`), memory before disk. In the first epoch
the home reads a sample from the store when it is first needed, keeps it and sends it on; from then
on it comes from there. What is not cached comes from the store. So the store is read
S + (E-1) max(0, S-C) bytes, which is the least that any cache of C bytes can do.
"""

from __future__ import annotations

import numpy as np

from penstock.plan.placement import offsets_of
from penstock.simulate.policies.base import Policy, sources_of
from penstock.simulate.reads import Reads, Start


class Ours(Policy):
    """Coordinated homes, filled once."""

    title = "Penstock"

    def start(self) -> Start | None:
        """Decide what is cached where."""
        job = self.job
        ends = offsets_of(job.sizes) + job.sizes
        limits = np.cumsum(job.capacities) * job.num_nodes
        self._tiers = np.searchsorted(limits, ends, side="left")
        placed = self._tiers < job.num_tiers
        self._homes = np.where(placed, homes_of(job.num_nodes, len(job.sizes)), -1)
        self._filled = np.zeros(len(job.sizes), np.bool_)
        return None

    def reads(self, epoch: int) -> Reads:
        """Return the home's tier, by way of the store where it is not filled yet."""
        job, uses = self.job, self.job.accesses(epoch)
        homes = self._homes[uses.ids]
        new = (homes >= 0) & ~self._filled[uses.ids]
        self._filled[uses.ids[new]] = True
        tier = self._tiers[uses.ids]
        return Reads(
            ids=uses.ids,
            steps=uses.steps,
            workers=uses.workers,
            sources=sources_of(job, homes, job.nodes_of(uses.workers), tier),
            holders=homes,
            fillers=np.where(new, homes, -1) if new.any() else None,
            threads=self._threads(),
        )

    def _threads(self) -> int:
        """Return the reads in flight per rank that the flow settles at: what the store rewards."""
        loader, ranks = self.job.scenario.loader, self.job.scenario.job.ranks
        useful = -(-max(self.job.scenario.machine.store.throughput.counts) // ranks)
        return max(useful, loader.threads + loader.fill_threads * self.job.num_tiers)


def homes_of(num_nodes: int, num_samples: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return a node for every sample: the same everywhere, and even."""
    scattered = np.arange(num_samples, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return ((scattered >> np.uint64(32)) % np.uint64(num_nodes)).astype(np.int64)
