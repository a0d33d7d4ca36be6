"""Runs: the blocks of an order that goes block by block, as they are read.

In such an order all samples of a block are used within one window, so a block is worth one large
read. On a node with several ranks each of them uses its share of a block only. Whether it reads
blocks whole all the same depends on what a request costs, which the flow measures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from penstock.dataset.part import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRuns:
    """Where the runs of an order begin, and when they are read."""

    starts: Ints
    """The first sample of each, and the number of samples at the end."""
    first_epoch_only: bool
    """Whether later epochs have another order."""
    read_whole: Callable[[], bool]
    """Whether one rank's share of a run is worth reading all of it."""

    def are_used_in(self, epoch: int) -> bool:
        """Return whether the order of an epoch goes by runs."""
        return epoch == 0 or not self.first_epoch_only

    def are_read_whole(self, epoch: int) -> bool:
        """Return whether runs are read whole in an epoch, where no tier keeps them."""
        return self.are_used_in(epoch) and self.read_whole()

    def numbers(self, ids: Ints) -> Ints:
        """Return the run that each sample lies in."""
        return np.searchsorted(self.starts, ids, side="right") - 1

    def ends(self, ids: Ints) -> tuple[Ints, Ints]:
        """Return the first sample of each run that some samples lie in, and where it ends."""
        numbers = np.unique(self.numbers(ids))
        return self.starts[numbers], self.starts[numbers + 1]
