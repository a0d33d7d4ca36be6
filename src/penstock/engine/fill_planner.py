"""Filling tiers further ahead than batches are made: `flow.filling` carried out.

A node alone follows its own batches. Among several nodes, all of them use the units whose home is
here; then it follows the batches of the whole world, and its *progress mark* tells the others
whether it still makes progress.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from penstock.dataset.dataset import Dataset
from penstock.dataset.mixture import Mixture
from penstock.engine.fills import Fill, FillRun
from penstock.engine.job import BatchSlot, SampleGroup
from penstock.engine.staging import Stager
from penstock.flow.filling import FillCourse, FillProgress

_P = ParamSpec("_P")
_R = TypeVar("_R")
SlotsFrom = Callable[[int, int], Iterator[BatchSlot]]
"""Returns the batches from an epoch and a position on, until each sample was seen once."""


class FillPlanner:
    """The units that later batches need, in their order."""

    def __init__(
        self,
        slots_from: SlotsFrom,
        start: tuple[int, int],
        dataset: Dataset | Mixture,
        stager: Stager,
        *,
        slots_a_job: int,
        num_known: Callable[[], int] = lambda: 0,
    ) -> None:
        """`num_known` grows when more of the order becomes known, if not all of it is known."""
        self._num_known = num_known
        self._course: FillCourse[tuple[int, int], BatchSlot] = FillCourse(
            lambda place: slots_from(*place), start, version=stager.homes_version + num_known()
        )
        self._dataset = dataset
        self._stager = stager
        self._slots_a_job = slots_a_job
        self.progress = SharedProgress()

    @property
    def is_exhausted(self) -> bool:
        """Whether all batches that are known were planned, with the present homes."""
        return self._course.is_over(self._version)

    @property
    def _version(self) -> int:
        return self._stager.homes_version + self._num_known()

    def next(self) -> list[tuple[int, FillRun]]:
        """Return reads for the next batches that nobody has begun, each with its job."""
        slot, number = self._stager.latest
        planned = None if slot is None else slot.cursor_after
        if self._course.has_moved(self._version, planned, (number + 1) * self._slots_a_job):
            self.progress = SharedProgress()
        several = self._course.next(_num_samples, for_others=self._stager.fills_for_others)
        if not several:
            self.progress.end()
            return []
        slots = [slot for _, slot in several]
        jobs = np.array([number for number, _ in several]) // self._slots_a_job
        ids = np.concatenate([slot.ids for slot in slots])
        job_of = np.repeat(jobs, [len(slot.ids) for slot in slots])
        out: list[tuple[int, FillRun]] = []
        under_way: list[Fill] = []
        for bound, where, local_ids in self._dataset.groups(ids):
            group = SampleGroup(bound=bound, where=where, local_ids=local_ids)
            reads, fills = self._stager.fills_ahead(
                group, job_of[where], slots[0].epoch, of_others=self._course.is_for_others
            )
            out += reads
            under_way += fills
        out.sort(key=lambda item: item[0])
        begun: list[FillRun | Fill] = [read for _, read in out]
        begun += under_way
        self.progress.began(begun, slots[-1].epoch, int(slots[-1].positions[-1]) + 1)
        for fill in under_way:
            fill.when_done(partial(_over, self.progress, fill))
        return out


def _num_samples(slot: BatchSlot) -> int:
    return len(slot.ids)


def _over(progress: SharedProgress, fill: Fill, error: BaseException | None) -> None:
    progress.done(fill)


def _locked(method: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """Return a method that holds the lock of its object while it runs."""

    @wraps(method)
    def call(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self.lock:
            return method(self, *args, **kwargs)

    return call


class SharedProgress(FillProgress):
    """How far a node has filled the units whose home it is; safe for threads."""

    def __init__(self) -> None:
        super().__init__()
        # Guards the progress: threads that fetch change it, and the server of the tiers reads it.
        self.lock = threading.Lock()

    began = _locked(FillProgress.began)
    done = _locked(FillProgress.done)
    end = _locked(FillProgress.end)
    stop = _locked(FillProgress.stop)
    progress_mark = _locked(FillProgress.progress_mark)

    @property
    def is_over(self) -> bool:
        """Whether filling has ended: units that are still missing will not come."""
        with self.lock:
            return super().is_over
