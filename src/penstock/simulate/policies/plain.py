"""Policies without a cache: nothing, reading when asked, and a buffer that is filled ahead."""

from __future__ import annotations

import numpy as np

from penstock.simulate.policies.base import Policy
from penstock.simulate.reads import Reads


class Naive(Policy):
    """Every sample from the store, at the moment it is used."""

    title = "naive"
    ahead = False

    def reads(self, epoch: int) -> Reads:
        """Return the whole epoch from the store."""
        uses = self.job.accesses(epoch)
        return Reads(
            ids=uses.ids,
            steps=uses.steps,
            workers=uses.workers,
            sources=np.full(len(uses.ids), self.job.store, np.uint8),
            ahead=self.ahead,
        )


class DoubleBuffering(Naive):
    """Every sample from the store, ahead of its step: the loaders of torch and tf.data."""

    title = "double buffering"
    ahead = True


class Perfect(Policy):
    """No sample is ever waited for: computing alone."""

    title = "perfect"

    def reads(self, epoch: int) -> Reads:
        """Return reads that cost nothing."""
        uses = self.job.accesses(epoch)
        return Reads(
            ids=uses.ids,
            steps=uses.steps,
            workers=uses.workers,
            sources=np.full(len(uses.ids), self.job.store, np.uint8),
            free=True,
        )
