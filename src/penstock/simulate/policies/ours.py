"""Penstock: every cached unit has one home, all nodes know it, and nothing is evicted.

The units that cost most per byte are cached first (`flow.layout.placement`), in memory before disk.
Units are those of real tiers: a sample, or a run of small ones. In the first epoch the home reads a
unit from the store when a node first needs it, keeps it and passes it on. From then on the unit
comes from its home. Units without a home come from the store. So the store is read S + (E-1) max(0,
S-C) bytes, which is the least for any cache of C bytes.

Where the nodes together have room for more than the set, a node also keeps copies of units of other
homes. It keeps a copy when it first uses the unit; a copy never needs the store again.

A sample is computed by the rank that has its place in the batch or, with locality, on its home as
far as the shares allow (`flow.layout.assignment`).
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from penstock.dataset.part import Ints
from penstock.flow.cost import requests_in_flight
from penstock.flow.layout.assignment import assign_local
from penstock.flow.layout.cuts import are_joined
from penstock.flow.layout.homes import NOBODY, HomeNode, Homes, cluster_homes
from penstock.flow.layout.placement import UnitLayout, offsets_of
from penstock.flow.layout.spans import spans_of
from penstock.simulate.job import Accesses, Codes, SimulatedJob
from penstock.simulate.policies.base import Policy
from penstock.simulate.reads import EpochReads, Flags, StagingWork
from penstock.storage.tier_places import NOWHERE, dealt

_NOT_HELD = 255


class Ours(Policy):
    """Coordinated homes, filled once."""

    title = "Penstock"

    def start(self) -> StagingWork | None:
        """Decide what is cached where."""
        job = self.job
        self._unit_of, self._lengths = units_of(job.sizes)
        offsets = offsets_of(self._lengths)
        layout = UnitLayout(offsets=offsets, lengths=self._lengths, size_bytes=job.size_bytes)
        capacity = int(job.capacities.sum())
        nodes = [HomeNode(name=f"node {n}", capacity_bytes=capacity) for n in range(job.num_nodes)]
        homes = cluster_homes(spans_of(layout), nodes)
        self._homes = homes.home_of(offsets)
        self._spans = homes.spans.number_of(offsets)
        self._tiers = tiers_of(job, homes)
        # A tier keeps whole units: what would lie across the end of the last one has no place.
        has_place = self._tiers[self._homes, self._spans] != _NOT_HELD
        self._homes = np.where(has_place, self._homes, NOBODY)
        self._is_filled = np.zeros(len(self._lengths), np.bool_)
        self._copied = np.zeros(0, np.int64)
        return None

    def uses(self, epoch: int) -> Accesses:
        """Return who uses what."""
        return self.job.accesses(epoch)

    def reads(self, epoch: int) -> EpochReads:
        """Return the own tier or that of the home; homes fill from the store on the first use."""
        job, uses = self.job, self.uses(epoch)
        units, nodes = self._unit_of[uses.ids], job.nodes_of(uses.workers)
        homes, spans = self._homes[units], self._spans[units]
        is_near = (homes == nodes) | self._is_copied(units, nodes)
        near = self._tiers[nodes, spans]
        far = job.num_tiers + self._tiers[homes, spans]
        sources = np.where(homes == NOBODY, job.store, np.where(is_near, near, far))
        fillers, fill_bytes = self._fills(units)
        return EpochReads(
            ids=uses.ids,
            steps=uses.steps,
            workers=uses.workers,
            sources=sources.astype(np.uint8),
            holders=homes,
            fillers=fillers,
            fill_bytes=fill_bytes,
            threads=self._threads(),
        )

    def _is_copied(self, units: Ints, nodes: Ints) -> Flags:
        """Return by access whether its node has a copy, and record the copies that it keeps now."""
        found = np.zeros(len(units), np.bool_)
        may = self._tiers[nodes, self._spans[units]] != _NOT_HELD
        may &= self._homes[units] != nodes
        keys = (nodes * len(self._lengths) + units)[may]
        if len(keys):
            at = np.searchsorted(self._copied, keys)
            found[may] = np.append(self._copied, -1)[at] == keys
            self._copied = np.union1d(self._copied, keys)
        return found

    def _fills(self, units: Ints) -> tuple[Ints | None, Ints | None]:
        """Return by access which node fetches its unit now, and how many bytes that is."""
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
        """Return the reads in flight per rank: as many as the store rewards, like the real flow."""
        job = self.job
        if job.scenario.model.store_share == "thread":
            loader = job.scenario.loader  # As many as the other policies have in all.
            return loader.threads + loader.fill_threads * job.num_tiers
        sample_bytes = job.size_bytes / len(job.sizes)
        useful = -(-requests_in_flight(job.scenario.machine.store, sample_bytes) // job.ranks)
        return max(useful, job.scenario.loader.threads)


class OursLocal(Ours):
    """The same homes; samples are computed there as far as the shares stay equal."""

    title = "Penstock, locality"

    def uses(self, epoch: int) -> Accesses:
        """Return the same samples in the same steps, used by their homes where shares allow."""
        job, uses = self.job, self.job.accesses(epoch)
        homes = self._homes[self._unit_of[uses.ids]]
        ranks = np.arange(job.num_workers)
        bounds = np.searchsorted(uses.steps, np.arange(job.num_steps + 1)).tolist()
        taken = []
        for start, stop in pairwise(bounds):
            sizes = np.bincount(uses.workers[start:stop], minlength=job.num_workers)
            taken.append(start + assign_local(homes[start:stop], job.nodes_of(ranks), sizes))
        # The shares of ranks stay as they are, so the columns of steps and ranks do, too.
        return Accesses(ids=uses.ids[np.concatenate(taken)], steps=uses.steps, workers=uses.workers)


def units_of(sizes: Ints) -> tuple[Ints, Ints]:
    """Return the unit of each sample and the bytes of each unit, as if all lay in one object.

    >>> units_of(np.array([70_000, 40_000, 40_000, 90_000]))
    (array([0, 1, 1, 2]), array([70000, 80000, 90000]))
    """
    starts = np.cumsum(sizes) - sizes
    ids, objects = np.arange(len(sizes)), np.zeros(len(sizes), np.int64)
    begins = np.append(True, ~are_joined(ids, objects, starts, sizes))
    units = np.cumsum(begins) - 1
    lengths: Ints = np.add.reduceat(sizes, np.flatnonzero(begins))
    return units, lengths


def tiers_of(job: SimulatedJob, homes: Homes) -> Codes:
    """Return by node and span the tier that holds it: the layout's first bytes in the fastest."""
    capacities = job.capacities.astype(np.int64).tolist()
    tiers = np.full((job.num_nodes, homes.spans.num_spans), _NOT_HELD, np.uint8)
    for node in range(job.num_nodes if job.num_tiers else 0):
        held = np.flatnonzero(homes.holds(node))
        ends = np.cumsum(homes.spans.lengths[held])
        numbers = dealt(ends, capacities, [0] * len(capacities))
        tiers[node, held] = np.where(numbers == NOWHERE, _NOT_HELD, numbers)
    return tiers
