"""No cache: every sample comes from the store, ahead of its step."""

from __future__ import annotations

from penstock.simulate.policies.base import Policy
from penstock.simulate.reads import Reads


class DoubleBuffering(Policy):
    """Every sample from the store, ahead of its step: the loaders of torch and tf.data."""

    title = "double buffering"

    def reads(self, epoch: int) -> Reads:
        """Return the whole epoch from the store."""
        return self.all_from_store(epoch)
