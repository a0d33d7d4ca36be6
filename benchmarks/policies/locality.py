"""Locality-aware loading (HiPC 2019): the global batch stays, who computes which sample changes.

Shards are on local storage before the first step. Every step each node takes those samples of the
global batch that it holds; what is too many for one node, or held by none, goes to nodes that have
too few. About sqrt((1 - 1/N) / (2 pi b)) of the samples move, instead of 1 - 1/N.
"""

from __future__ import annotations

import numpy as np

from benchmarks.policies.shards import reads_from, sharded, staging_of
from penstock.dataset.part import Ints
from penstock.simulate.job import Accesses, SimulatedJob
from penstock.simulate.policies import Policy
from penstock.simulate.reads import EpochReads, StagingWork


class LocalityAware(Policy):
    """Samples are computed where they lie, as far as the shares stay equal."""

    title = "locality-aware"

    def why_not(self) -> str:
        return "" if self.job.num_tiers else "it copies to local storage, and there is no tier"

    def start(self) -> StagingWork:
        """Copy the shards, as far as they fit."""
        self._holders = sharded(self.job, self.job.num_tiers - 1)
        return staging_of(self.job, self._holders, self.job.num_tiers - 1)

    def reads(self, epoch: int) -> EpochReads:
        """Return reads of the shares that fit the holders best."""
        uses = self.job.accesses(epoch)
        moved = reassigned(self.job, uses, self._holders[uses.ids])
        return reads_from(self.job, moved, self._holders[moved.ids], self.job.num_tiers - 1)


def reassigned(job: SimulatedJob, uses: Accesses, held: Ints) -> Accesses:
    """Return the same samples in the same steps, used by their holders where shares allow."""
    nodes = job.nodes_of(uses.workers)
    shape = (job.num_steps, job.num_nodes)
    quota = np.bincount(uses.steps * job.num_nodes + nodes, minlength=shape[0] * shape[1])
    wanted = np.where(held < 0, job.num_nodes, held)
    order = np.lexsort((wanted, uses.steps))
    step, node = uses.steps[order], wanted[order]
    group = step * (job.num_nodes + 1) + node
    first = np.searchsorted(group, group)
    place = np.arange(len(group)) - first
    limit = np.append(quota, 0)[np.where(node < job.num_nodes, step * job.num_nodes + node, -1)]
    stays = place < limit
    taken = np.bincount((step * job.num_nodes + node)[stays], minlength=len(quota))
    open_slots = np.repeat(np.arange(len(quota)), quota - taken)
    # Both are sorted by step, and a step has as many open slots as samples without a place.
    cells = np.empty(len(order), np.int64)
    cells[stays] = (step * job.num_nodes + node)[stays]
    cells[~stays] = open_slots
    again = np.argsort(cells, kind="stable")
    cell = cells[again]
    slot = np.arange(len(cell)) - np.searchsorted(cell, cell)
    node = cell % job.num_nodes
    worker = node * job.ranks + slot // job.scenario.job.batch
    return Accesses(ids=uses.ids[order][again], steps=cell // job.num_nodes, workers=worker)
