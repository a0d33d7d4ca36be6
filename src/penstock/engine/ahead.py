"""Filling tiers further ahead than batches are made.

A batch in the making takes memory; a unit in its tier takes none. So the tiers are filled in the
order of first use as far ahead as the store allows, across the end of an epoch, up to the point
where everything that has a place was seen once.

Alone, a node goes by its own batches. Among several, what is at home here is used by all of them:
then it goes by the batches of the whole world, and its *cursor*, the position before which
everything is there, tells the others what they can count on. The ranks of a node deal out its homes
among them; when the first of them, which serves, is done with its own, it goes over those of the
others, which may be late.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

import numpy as np

from penstock.dataset.dataset import Dataset
from penstock.dataset.mixture import Mixture
from penstock.engine.fills import Fill, FillRun
from penstock.engine.job import Group, Slot
from penstock.engine.staging import Stager
from penstock.flow.planning import FILL_SAMPLES

SlotsFrom = Callable[[int, int], Iterator[Slot]]
"""Returns the batches from an epoch and a position on, until each sample was seen once."""


class FillAhead:
    """The units that later batches need, in their order."""

    def __init__(
        self,
        slots_from: SlotsFrom,
        start: tuple[int, int],
        dataset: Dataset | Mixture,
        stager: Stager,
        *,
        slots_a_job: int,
    ) -> None:
        self._slots_from = slots_from
        self._start = start
        self._slots = slots_from(*start)
        self._for_others = False
        self._dataset = dataset
        self._stager = stager
        self._slots_a_job = slots_a_job
        self._num_seen = 0
        self._version = stager.homes_version
        self._is_exhausted = False
        self.progress = Progress()

    @property
    def is_exhausted(self) -> bool:
        """Whether everything was seen, with the homes as they are now."""
        return self._is_exhausted and self._version == self._stager.homes_version

    def next(self) -> list[tuple[int, FillRun]]:
        """Return requests that nobody has begun, with the job of each, for the next batches."""
        if self._version != self._stager.homes_version:
            self._begin_again(for_others=False)
            self.progress = Progress()
        first = next(self._slots, None)
        if first is None and self._stager.fills_for_others and not self._for_others:
            self._begin_again(for_others=True)
            first = next(self._slots, None)
        if first is None:
            self._is_exhausted = True
            self.progress.end()
            return []
        several = [first]
        several += islice(self._slots, FILL_SAMPLES // max(1, len(first.ids)))
        jobs = (self._num_seen + np.arange(len(several))) // self._slots_a_job
        self._num_seen += len(several)
        ids = np.concatenate([s.ids for s in several])
        job_of = np.repeat(jobs, [len(s.ids) for s in several])
        out: list[tuple[int, FillRun]] = []
        under_way: list[Fill] = []
        for bound, where, local_ids in self._dataset.groups(ids):
            group = Group(bound=bound, where=where, local_ids=local_ids)
            reads, fills = self._stager.fills_ahead(
                group, job_of[where], first.epoch, of_others=self._for_others
            )
            out += reads
            under_way += fills
        out.sort(key=lambda item: item[0])
        last = several[-1]
        begun: list[FillRun | Fill] = [read for _, read in out]
        begun += under_way
        self.progress.began(begun, last.epoch, int(last.positions[-1]) + 1)
        for fill in under_way:
            fill.when_done(partial(_over, self.progress, fill))
        return out

    def _begin_again(self, *, for_others: bool) -> None:
        """Go over everything once more from where the batches are: other units are ours now."""
        self._for_others = for_others
        self._version = self._stager.homes_version
        slot, number = self._stager.latest
        # Our own batches are planned far ahead of what others still wait for.
        if slot is not None and not for_others:
            # That one has its own reads; what comes after it is ours to see to.
            self._slots = self._slots_from(*slot.cursor_after)
            self._num_seen = (number + 1) * self._slots_a_job
        else:
            self._slots = self._slots_from(*self._start)
            self._num_seen = 0
        self._is_exhausted = False


def _over(progress: Progress, fill: Fill, error: BaseException | None) -> None:
    progress.done(fill)


class Progress:
    """How far a node has filled what is at home there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: list[tuple[tuple[int, int], set[int]]] = []
        """Requests under way, by the place in the order that is reached once they are done."""
        self._reached = (0, 0)
        self._has_ended = False
        self._num_done = 0

    def began(self, reads: list[FillRun | Fill], epoch: int, position: int) -> None:
        """Take note of the requests for everything up to a place in the order."""
        with self._lock:
            self._begun.append(((epoch, position), {id(read) for read in reads}))
            self._advance()

    def done(self, read: FillRun | Fill) -> None:
        """Take note that a request is over."""
        with self._lock:
            self._num_done += 1
            for _, reads in self._begun:
                if id(read) in reads:
                    reads.discard(id(read))
                    break
            self._advance()

    def end(self) -> None:
        """Take note that no more will begin."""
        with self._lock:
            self._has_ended = True

    def stop(self) -> None:
        """Take note that what is under way will not come either."""
        with self._lock:
            self._has_ended = True
            self._begun.clear()

    def _advance(self) -> None:
        while self._begun and not self._begun[0][1]:
            self._reached = self._begun.pop(0)[0]

    @property
    def is_over(self) -> bool:
        """Whether what is not there by now will not come."""
        with self._lock:
            return self._has_ended and not self._begun

    @property
    def is_busy(self) -> bool:
        """Whether requests are under way, however long the store lets them wait."""
        with self._lock:
            return bool(self._begun)

    @property
    def num_done(self) -> int:
        """Requests that are over: something moves as long as this grows."""
        return self._num_done

    @property
    def reached(self) -> tuple[int, int]:
        """Epoch and position before which everything is there."""
        with self._lock:
            return self._reached
