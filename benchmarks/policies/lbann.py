"""LBANN's data store (CLUSTER 2019): every sample in the memory of one node, sent when needed.

*Dynamic*: the node that first uses a sample keeps it. *Preloading*: shards are loaded first. Both
need the whole set to fit into the memory of all nodes.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from benchmarks.policies.shards import reads_from, staging_of
from penstock.simulate.policies import Policy
from penstock.simulate.policies.sharding import shard_starts
from penstock.simulate.reads import EpochReads, StagingWork
from penstock.units import show_bytes


class LbannDynamic(Policy):
    """Samples stay where they were first used."""

    title = "LBANN dynamic"

    def why_not(self) -> str:
        job = self.job
        memory = int(job.capacities[0]) * job.num_nodes if job.num_tiers else 0
        if job.size_bytes > memory:
            return (
                f"it needs the whole set in memory: {show_bytes(job.size_bytes)} do not fit into "
                f"{show_bytes(memory)}"
            )
        return ""

    def start(self) -> StagingWork | None:
        self._holders = np.full(len(self.job.sizes), -1, np.int64)
        return None

    def reads(self, epoch: int) -> EpochReads:
        """Return the store for first uses, the holder's memory after that."""
        job, uses = self.job, self.job.accesses(epoch)
        nodes = job.nodes_of(uses.workers)
        held = self._holders[uses.ids]
        first = held < 0
        reads = reads_from(job, uses, held, 0)
        reads = replace(reads, holders=np.where(first, nodes, held))
        self._holders[uses.ids[first]] = nodes[first]
        if not first.all():
            return reads
        # They are read straight into memory, which holds all: no stage bounds how far ahead.
        return replace(
            reads, background=True, stage_bytes=math.inf, threads=job.scenario.loader.fill_threads
        )


class LbannPreloading(LbannDynamic):
    """Shards are in memory before the first step."""

    title = "LBANN preloading"

    def start(self) -> StagingWork:
        """Load each node's shard."""
        counts = np.diff(shard_starts(self.job))
        self._holders = np.repeat(np.arange(self.job.num_nodes), counts)
        return staging_of(self.job, self._holders, 0)
