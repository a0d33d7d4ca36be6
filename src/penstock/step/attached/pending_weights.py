"""Weights that a gather may still have to bring: a read of one waits for it first.

After a step, parameters have another class (`away`) until their weights are known to be
there. Modules wait before they run, so a training loop never meets that class. What else reads a
parameter from Python, wherever it was kept, waits through it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from penstock.step.attached.flow import BucketFlow, FlowBucket
from penstock.step.attached.released_params import Absence

__all__ = ["PendingWeights"]


class PendingWeights:
    """The weights of all attached parameters, by number, between a step and their first use."""

    def __init__(self, params: Sequence[torch.Tensor], flow: BucketFlow) -> None:
        self._flow = flow
        self._absence = Absence(params, self.wait)
        self._are_pending = False

    def begin(self, numbers: Collection[int]) -> None:
        """Let reads of these wait: a step has begun to gather them."""
        self._are_pending = True
        self._absence.begin(numbers)

    def wait(self) -> None:
        """Return when all weights are there; on a GPU, the current stream waits."""
        self._flow.wait(self._flow.buckets)
        if self._are_pending:
            self._are_pending = False
            self._absence.end()

    def waiter(self, numbers: Collection[int]) -> Callable[[], None]:
        """Return what waits for the weights of some parameters."""
        wanted = {bucket for number in numbers for bucket in self._flow.of_param[number]}
        buckets = [bucket for bucket in self._flow.buckets if bucket in wanted]
        return partial(self._wait, buckets, sorted(numbers))

    def _wait(self, buckets: Sequence[FlowBucket], numbers: Sequence[int]) -> None:
        self._flow.wait(buckets)
        if self._are_pending:
            self._absence.end(numbers)

    @contextmanager
    def unread(self) -> Iterator[None]:
        """Let parameters be handled in this block as fast as ever: nobody reads them here."""
        absent = self._absence.absent() if self._are_pending else []
        self._absence.end(absent)
        try:
            yield
        finally:
            self._absence.begin(absent)
