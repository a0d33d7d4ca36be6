"""NoPFS as its code was released (`penstock.simulate.policies.nopfs` is the published form).

| | as published | as released |
|---|---|---|
| a second copy of a sample comes from | the peer that has it | the store |
| ties between equal counts | random | by index, which makes workers keep the same |
| a peer's copy is taken to be there | when it is | when the own loading is 20 further |
| reading ahead | goes on into the next epoch | ends with the epoch |
"""

from __future__ import annotations

import numpy as np

from penstock.dataset.part import Ints
from penstock.simulate.job import Floats
from penstock.simulate.policies.nopfs import Nopfs
from penstock.simulate.reads import EpochReads

_PEER_LEAD = 20
"""How much further the own loading must be than a peer's copy, in samples."""


class NopfsReleased(Nopfs):
    """The code as it was released."""

    title = "NoPFS released"
    across_epochs = False
    ties = "index"
    copies_from_peers = False

    def _seen_s(self, uses: EpochReads, rows: Ints) -> Floats:
        """Return when the worker's own loading is some samples past the place of the copy."""
        copies, tiers = self._copies, self.job.num_tiers
        groups = copies.workers * tiers + copies.tiers
        starts = np.searchsorted(groups, np.arange(self.job.num_workers * tiers + 1))
        mine = uses.workers * tiers + copies.tiers[rows]
        wanted = starts[mine] + copies.places[rows] + _PEER_LEAD
        last = starts[mine + 1] - 1
        seen = np.where(last >= starts[mine], self._loaded_s[np.minimum(wanted, last)], 0.0)
        # A wrong guess costs an empty answer: the copy is used once it is really there.
        return np.maximum(seen, self._loaded_s[rows])
