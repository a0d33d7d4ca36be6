"""Penstock: every cached unit has one home, all nodes know it, nothing is evicted.

What is dearest per byte is cached first (`plan.placement`), memory before disk, in the units that
tiers really keep: a sample, or a run of small ones. In the first epoch the home reads a unit from
the store when it is first needed, keeps it and sends on what was asked for; from then on it comes
from there. What is not cached comes from the store. So the store is read S + (E-1) max(0, S-C)
bytes, which is the least that any cache of C bytes can do.
"""

from __future__ import annotations

import numpy as np

from penstock.dataset.part import Ints
from penstock.plan.cost import requests_in_flight
from penstock.plan.homes import NOBODY, Node, homes_of
from penstock.plan.placement import Layout, offsets_of
from penstock.plan.units import ALONE_BYTES, RUN_BYTES
from penstock.simulate.job import Job
from penstock.simulate.policies.base import Policy, sources_of
from penstock.simulate.reads import Reads, Start


class Ours(Policy):
    """Coordinated homes, filled once."""

    title = "Penstock"

    def start(self) -> Start | None:
        """Decide what is cached where."""
        job = self.job
        self._unit_of, lengths = units_of(job.sizes)
        layout = Layout(offsets=offsets_of(lengths), lengths=lengths, size_bytes=job.size_bytes)
        capacity = int(job.capacities.sum())
        nodes = [Node(name=f"node {n}", capacity_bytes=capacity) for n in range(job.num_nodes)]
        self._lengths = lengths
        self._homes = homes_of(layout, nodes)
        self._tiers = tiers_of(job, layout, self._homes)
        self._is_filled = np.zeros(len(lengths), np.bool_)
        return None

    def reads(self, epoch: int) -> Reads:
        """Return the home's tier, by way of the store where it is not filled yet."""
        job, uses = self.job, self.job.accesses(epoch)
        units = self._unit_of[uses.ids]
        homes = self._homes[units]
        fillers, fill_bytes = self._fills(units)
        return Reads(
            ids=uses.ids,
            steps=uses.steps,
            workers=uses.workers,
            sources=sources_of(job, homes, job.nodes_of(uses.workers), self._tiers[units]),
            holders=homes,
            fillers=fillers,
            fill_bytes=fill_bytes,
            threads=self._threads(),
        )

    def _fills(self, units: Ints) -> tuple[Ints | None, Ints | None]:
        """Return by access which node fetches its unit now, and how many bytes that are."""
        wanted = np.flatnonzero((self._homes[units] != NOBODY) & ~self._is_filled[units])
        if not len(wanted):
            return None, None
        chosen, first = np.unique(units[wanted], return_index=True)
        self._is_filled[chosen] = True
        fillers, sizes = np.full(len(units), -1), np.zeros(len(units), np.int64)
        fillers[wanted[first]] = self._homes[chosen]
        sizes[wanted[first]] = self._lengths[chosen]
        return fillers, sizes

    def _threads(self) -> int:
        """Return the reads in flight per rank that the flow settles at: what the store rewards."""
        job = self.job
        if job.scenario.model.store_share == "thread":
            loader = job.scenario.loader  # As many as the other policies have in all.
            return loader.threads + loader.fill_threads * job.num_tiers
        sample_bytes = job.size_bytes / len(job.sizes)
        useful = -(-requests_in_flight(job.scenario.machine.store, sample_bytes) // job.ranks)
        return max(useful, job.scenario.loader.threads)


def units_of(sizes: Ints) -> tuple[Ints, Ints]:
    """Return the unit of each sample and the bytes of each unit, as if all lay in one object.

    >>> units_of(np.array([70_000, 40_000, 40_000, 90_000]))
    (array([0, 1, 1, 2]), array([70000, 80000, 90000]))
    """
    starts = np.cumsum(sizes) - sizes
    is_large = sizes >= ALONE_BYTES
    begins = np.diff(starts // RUN_BYTES) > 0
    begins |= is_large[1:] | is_large[:-1]
    units = np.concatenate([[0], np.cumsum(begins)])
    lengths: Ints = np.add.reduceat(sizes, np.flatnonzero(np.append(True, begins)))
    return units, lengths


def tiers_of(job: Job, layout: Layout, homes: Ints) -> Ints:
    """Return the tier of each unit on its home: the layout's first bytes in the fastest.

    Nothing straddles two tiers. What fits none has no home: `homes` is changed.
    """
    order = np.lexsort((layout.offsets, homes))
    sorted_homes, total = homes[order], np.cumsum(layout.lengths[order])
    before = np.concatenate([[0], total])[np.searchsorted(sorted_homes, sorted_homes)]
    tiers = np.empty(len(order), np.int64)
    tiers[order] = np.searchsorted(np.cumsum(job.capacities), total - before, side="left")
    homes[tiers >= job.num_tiers] = NOBODY
    return np.minimum(tiers, max(0, job.num_tiers - 1))
