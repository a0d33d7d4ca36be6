"""Filling tiers further ahead than batches are made.

A batch in the making takes memory; a unit in its tier takes none. So the tiers are filled in the
order of first use as far ahead as the store allows, across the end of an epoch, up to the point
where everything that has a place was seen once.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from penstock.dataset.dataset import Dataset
from penstock.dataset.mixture import Mixture
from penstock.loader.fills import FillRun
from penstock.loader.job import Group, Slot
from penstock.loader.staging import Stager

_SAMPLES_AT_ONCE = 4096


class FillAhead:
    """The units that later batches need, in their order."""

    def __init__(
        self,
        slots: Iterator[Slot],
        dataset: Dataset | Mixture,
        stager: Stager,
        *,
        num_slots: int,
        slots_a_job: int,
    ) -> None:
        self._slots = islice(slots, num_slots)
        self._dataset = dataset
        self._stager = stager
        self._slots_a_job = slots_a_job
        self._num_seen = 0
        self.is_exhausted = False

    def next(self) -> list[tuple[int, FillRun]]:
        """Return requests that nobody has begun, with the job of each, for the next batches."""
        first = next(self._slots, None)
        if first is None:
            self.is_exhausted = True
            return []
        several = [first]
        several += islice(self._slots, _SAMPLES_AT_ONCE // max(1, len(first.ids)))
        jobs = (self._num_seen + np.arange(len(several))) // self._slots_a_job
        self._num_seen += len(several)
        ids = np.concatenate([s.ids for s in several])
        job_of = np.repeat(jobs, [len(s.ids) for s in several])
        out: list[tuple[int, FillRun]] = []
        for bound, where, local_ids in self._dataset.groups(ids):
            group = Group(bound=bound, where=where, local_ids=local_ids)
            out += self._stager.fills_ahead(group, job_of[where], first.epoch)
        return sorted(out, key=lambda item: item[0])
