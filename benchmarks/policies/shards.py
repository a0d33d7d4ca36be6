"""Samples cut into shards, and samples that are read from whoever holds them."""

from __future__ import annotations

import numpy as np

from penstock.dataset.part import Ints
from penstock.simulate.job import Accesses, Codes, Floats, SimulatedJob, added
from penstock.simulate.policies.sharding import shard_starts
from penstock.simulate.reads import EpochReads, StagingWork


def reads_from(job: SimulatedJob, accesses: Accesses, held: Ints, tier: int) -> EpochReads:
    """Return reads from a tier of the node that holds each access (-1: nobody, so the store)."""
    sources = sources_of(job, held, job.nodes_of(accesses.workers), tier)
    return EpochReads(
        ids=accesses.ids,
        steps=accesses.steps,
        workers=accesses.workers,
        sources=sources,
        holders=held,
    )


def sources_of(job: SimulatedJob, held: Ints, nodes: Ints, tier: int) -> Codes:
    """Return the source of each access: the own tier, a peer's, or the store where held is -1."""
    near = np.where(held == nodes, tier, job.num_tiers + tier)
    return np.where(held < 0, job.store, near).astype(np.uint8)


def sharded(job: SimulatedJob, tier: int) -> Ints:
    """Return the node that holds each sample when shards are cut to what a tier holds; -1: none."""
    starts = shard_starts(job)
    before = np.concatenate([[0], np.cumsum(job.sizes)])
    nodes = np.repeat(np.arange(job.num_nodes), np.diff(starts))
    end_in_shard = before[1:] - before[starts[nodes]]
    return np.where(end_in_shard <= job.capacities[tier], nodes, -1)


def staging_of(job: SimulatedJob, holders: Ints, tier: int) -> StagingWork:
    """Return the work of loading what each node holds from the store."""
    held = holders >= 0
    store_bytes: Floats = added(holders[held], job.sizes[held].astype(np.float64), job.num_nodes)
    return StagingWork(store_bytes=store_bytes, peer_bytes=np.zeros_like(store_bytes), tier=tier)
