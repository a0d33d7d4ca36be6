"""Parallel staging: each node copies its shard of the set to its own storage before the first step.

The shard comes from the store, then as much of the other shards as fits comes from peers.
Afterwards a node draws only from what it holds. So samples never mix across nodes again, and where
the shards do not fit, some samples are never visited.
"""

from __future__ import annotations

import numpy as np

from penstock.dataset.part import Ints
from penstock.simulate.job import SimulatedJob
from penstock.simulate.policies.base import Policy
from penstock.simulate.reads import EpochReads, StagingWork


class ParallelStaging(Policy):
    """Shards on local storage; the order is drawn inside each shard."""

    title = "parallel staging"

    def why_not(self) -> str:
        """It needs local storage that holds at least a sample."""
        if not self.job.num_tiers:
            return "it copies to local storage, and the machine has no tier"
        if int(self.job.capacities[-1]) < int(self.job.sizes.max()):
            return "its storage does not hold a single sample"
        return ""

    def start(self) -> StagingWork:
        """Copy the shard from the store and the rest from peers, as far as it fits."""
        job = self.job
        capacity = int(job.capacities[-1])
        starts = shard_starts(job)
        twice = np.concatenate([[0], np.cumsum(np.tile(job.sizes, 2))])
        first, stop = starts[:-1], starts[1:]
        fits = np.searchsorted(twice, twice[first] + capacity, side="right") - 1
        stops = np.minimum(fits, first + len(job.sizes))
        self._first, self._counts = first, stops - first
        own = twice[np.minimum(stop, stops)] - twice[first]
        held = twice[stops] - twice[first]
        return StagingWork(
            store_bytes=own.astype(float),
            peer_bytes=(held - own).astype(float),
            tier=job.num_tiers - 1,
        )

    def reads(self, epoch: int) -> EpochReads:
        """Return draws of each node from what it holds, as many as its share of each batch."""
        job, uses = self.job, self.job.accesses(epoch)
        nodes = job.nodes_of(uses.workers)
        ids = np.empty_like(uses.ids)
        by_node = np.argsort(nodes, kind="stable")
        bounds = np.searchsorted(nodes[by_node], np.arange(job.num_nodes + 1))
        for node in range(job.num_nodes):
            mine = by_node[bounds[node] : bounds[node + 1]]
            pool = np.arange(self._first[node], self._first[node] + self._counts[node])
            seed = (job.scenario.job.seed + epoch) * job.num_nodes + node
            ids[mine] = repeated(pool, len(mine), seed) % len(job.sizes)
        sources = np.full(len(ids), job.num_tiers - 1, np.uint8)
        return EpochReads(ids=ids, steps=uses.steps, workers=uses.workers, sources=sources)


def shard_starts(job: SimulatedJob) -> Ints:
    """Return the first sample of each node's shard, and the number of samples at the end."""
    return np.arange(job.num_nodes + 1) * len(job.sizes) // job.num_nodes


def repeated(pool: Ints, count: int, seed: int) -> Ints:
    """Return a number of samples: the pool in a random order, again and again."""
    rng = np.random.default_rng(seed)
    passes = [rng.permutation(pool) for _ in range(-(-count // len(pool)))]
    return np.concatenate(passes)[:count]
