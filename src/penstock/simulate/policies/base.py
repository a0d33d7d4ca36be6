"""The interface of every policy, and the plainest one.

A policy is asked once per epoch for the source of each use of a sample. It computes beforehand what
it would do at run time (fill, evict, move), because the order is known.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from penstock.simulate.job import SimulatedJob
from penstock.simulate.reads import EpochReads, StagingWork


class Policy:
    """A way of getting samples to the nodes that use them."""

    title: ClassVar[str]
    """Its name for people."""
    across_epochs: ClassVar[bool] = True
    """Whether reading ahead goes on past the end of an epoch."""

    def __init__(self, job: SimulatedJob) -> None:
        self.job = job

    def why_not(self) -> str:
        """Return the reason why it cannot run here; empty where it can."""
        return ""

    def start(self) -> StagingWork | None:
        """Return the work before the first step; None where there is none."""
        return None

    def reads(self, epoch: int) -> EpochReads:
        """Return the sources of the samples of an epoch; epochs are asked for in order."""
        raise NotImplementedError

    def store_left(self, now_s: float) -> float:
        """Return the share of a node's store bandwidth that filling leaves to reading ahead."""
        return 1.0

    def background_bytes(self, time_s: float) -> tuple[float, float]:
        """Return the bytes filled in the background by some time: from the store, from peers."""
        return 0.0, 0.0

    def all_from_store(self, epoch: int) -> EpochReads:
        """Return the reads of an epoch that reads everything from the store."""
        uses = self.job.accesses(epoch)
        sources = np.full(len(uses.ids), self.job.store, np.uint8)
        return EpochReads(ids=uses.ids, steps=uses.steps, workers=uses.workers, sources=sources)


class DoubleBuffering(Policy):
    """No cache: every sample from the store, ahead of its step, as torch and tf.data read."""

    title = "double buffering"

    def reads(self, epoch: int) -> EpochReads:
        """Return the whole epoch from the store."""
        return self.all_from_store(epoch)
