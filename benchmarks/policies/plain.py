"""Policies without a cache: reading when asked, and no reading at all."""

from __future__ import annotations

from dataclasses import replace

from penstock.simulate.policies import Policy
from penstock.simulate.reads import EpochReads


class Naive(Policy):
    """Every sample from the store, at the moment it is used."""

    title = "naive"

    def reads(self, epoch: int) -> EpochReads:
        return replace(self.all_from_store(epoch), ahead=False)


class Perfect(Policy):
    """No sample is ever waited for: computing alone."""

    title = "perfect"

    def reads(self, epoch: int) -> EpochReads:
        return replace(self.all_from_store(epoch), free=True)
