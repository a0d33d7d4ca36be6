"""What every policy answers, and how samples are cut into shards.

A policy is asked once per epoch where each use of a sample finds its bytes. Whatever it would do at
run time (fill, evict, move) it works out beforehand: the order is known.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from penstock.dataset.part import Ints
from penstock.simulate.job import Accesses, Codes, Floats, SimulatedJob, added
from penstock.simulate.reads import Reads, StagingWork


class Policy:
    """A way of getting samples to the nodes that use them."""

    title: ClassVar[str]
    """Its name for people."""
    across_epochs: ClassVar[bool] = True
    """Whether reading ahead goes on past the end of an epoch."""

    def __init__(self, job: SimulatedJob) -> None:
        self.job = job

    def why_not(self) -> str:
        """Return why it cannot run here; nothing where it can."""
        return ""

    def start(self) -> StagingWork | None:
        """Return what is loaded before the first step."""
        return None

    def reads(self, epoch: int) -> Reads:
        """Return where the samples of an epoch come from. Epochs are asked for in order."""
        raise NotImplementedError

    def store_left(self, now_s: float) -> float:
        """Return the share of a node's store bandwidth that filling leaves to reading ahead."""
        return 1.0

    def background_bytes(self, time_s: float) -> tuple[float, float]:
        """Return what was filled in the background by some time: from the store, from peers."""
        return 0.0, 0.0

    def from_holders(self, accesses: Accesses, holders: Ints, tiers: Ints | int) -> Reads:
        """Return reads from the nodes that hold samples (-1: nobody), in the given tiers."""
        job = self.job
        held = holders[accesses.ids]
        tier = tiers[accesses.ids] if isinstance(tiers, np.ndarray) else tiers
        return Reads(
            ids=accesses.ids,
            steps=accesses.steps,
            workers=accesses.workers,
            sources=sources_of(job, held, job.nodes_of(accesses.workers), tier),
            holders=held,
        )


def sources_of(job: SimulatedJob, held: Ints, nodes: Ints, tier: Ints | int) -> Codes:
    """Return the source of each access: the own tier, a peer's, or the store where held is -1."""
    near = np.where(held == nodes, tier, job.num_tiers + tier)
    return np.where(held < 0, job.store, near).astype(np.uint8)


def shard_starts(job: SimulatedJob) -> Ints:
    """Return the first sample of each node's shard, and the number of samples at the end."""
    return np.arange(job.num_nodes + 1) * len(job.sizes) // job.num_nodes


def sharded(job: SimulatedJob, tier: int) -> Ints:
    """Return the node that holds each sample when shards are cut to what a tier holds; -1: none."""
    starts = shard_starts(job)
    before = np.concatenate([[0], np.cumsum(job.sizes)])
    nodes = np.repeat(np.arange(job.num_nodes), np.diff(starts))
    end_in_shard = before[1:] - before[starts[nodes]]
    return np.where(end_in_shard <= job.capacities[tier], nodes, -1)


def bytes_by_node(job: SimulatedJob, holders: Ints) -> Floats:
    """Return the bytes that each node holds."""
    held = holders >= 0
    return added(holders[held], job.sizes[held].astype(np.float64), job.num_nodes)
