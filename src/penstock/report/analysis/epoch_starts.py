"""Waits at the start of epochs: workers that begin anew make nobody's batch ahead of time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.report.analysis.interference import settled_real
from penstock.report.analysis.values import Analysis


@dataclass(frozen=True, kw_only=True)
class EpochStartWait:
    """Waits in the first steps of epochs: one a worker, but a quarter of an epoch at most."""

    num_steps: int
    share_of_waits: float
    """Share of all waiting that falls into these steps."""
    share_of_time: float

    @property
    def is_most(self) -> bool:
        """Whether most of the waiting is at the start of epochs."""
        return self.share_of_waits > 0.5 and self.share_of_time > 0.05


def epoch_start_wait(analysis: Analysis) -> EpochStartWait:
    """Return how much of the waiting falls into the first steps of epochs."""
    table, kept = analysis.steps, settled_real(analysis.steps)
    changes = (np.diff(table.epoch, prepend=-1) != 0) | (np.diff(table.rank, prepend=-1) != 0)
    first = np.flatnonzero(changes)
    length = np.diff(np.append(first, len(table)))
    place = np.arange(len(table)) - np.repeat(first, length)
    workers, quarter = analysis.workers.num_workers, int(np.median(length)) // 4
    count = max(1, min(workers, quarter))
    of = kept & (place < count)
    wait_s = float(table.wait_s[kept].sum())
    # Without workers nobody begins anew; epochs of few steps are all beginning.
    if not workers or not quarter or not wait_s:
        return EpochStartWait(num_steps=count, share_of_waits=0.0, share_of_time=0.0)
    at_start_s = float(table.wait_s[of].sum())
    return EpochStartWait(
        num_steps=count,
        share_of_waits=at_start_s / wait_s,
        share_of_time=at_start_s / float(table.wall_s[kept].sum()),
    )
