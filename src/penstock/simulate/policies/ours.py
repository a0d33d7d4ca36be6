"""Penstock: every cached sample has one home, all nodes know it, nothing is evicted.

What is dearest per byte is cached first (`plan.placement`), memory before disk. In the first epoch
the home reads a sample from the store when it is first needed, keeps it and sends it on; from then
on it comes from there. What is not cached comes from the store. So the store is read
S + (E-1) max(0, S-C) bytes, which is the least that any cache of C bytes can do.
"""

from __future__ import annotations

import numpy as np

from penstock.dataset.part import Ints
from penstock.plan.cost import requests_in_flight
from penstock.plan.homes import NOBODY, Node, homes_of
from penstock.plan.placement import Layout, offsets_of
from penstock.simulate.policies.base import Policy, sources_of
from penstock.simulate.reads import Reads, Start


class Ours(Policy):
    """Coordinated homes, filled once."""

    title = "Penstock"

    def start(self) -> Start | None:
        """Decide what is cached where."""
        job = self.job
        layout = Layout(offsets=offsets_of(job.sizes), lengths=job.sizes, size_bytes=job.size_bytes)
        capacity = int(job.capacities.sum())
        nodes = [Node(name=f"node {n}", capacity_bytes=capacity) for n in range(job.num_nodes)]
        self._homes = homes_of(layout, nodes)
        self._tiers = self._tiers_of(layout)
        self._filled = np.zeros(len(job.sizes), np.bool_)
        return None

    def _tiers_of(self, layout: Layout) -> Ints:
        """Return the tier of each sample on its home: the layout's first bytes in the fastest."""
        job = self.job
        order = np.lexsort((layout.offsets, self._homes))
        homes = self._homes[order]
        total = np.cumsum(job.sizes[order])
        before = np.concatenate([[0], total])[np.searchsorted(homes, homes)]
        tiers = np.empty(len(order), np.int64)
        tiers[order] = np.searchsorted(np.cumsum(job.capacities), total - before, side="left")
        # Nothing straddles two tiers: what does not fit the one goes to the next, or stays out.
        self._homes[tiers >= job.num_tiers] = NOBODY
        return np.minimum(tiers, max(0, job.num_tiers - 1))

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
        job = self.job
        if job.scenario.model.store_share == "thread":
            loader = job.scenario.loader  # As many as the other policies have in all.
            return loader.threads + loader.fill_threads * job.num_tiers
        sample_bytes = job.size_bytes / len(job.sizes)
        useful = -(-requests_in_flight(job.scenario.machine.store, sample_bytes) // job.ranks)
        return max(useful, job.scenario.loader.threads)
