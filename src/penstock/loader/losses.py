"""Losses that the training loop reports, on their way to the scores.

`loader.observe(batch, losses)` takes them and returns at once. Losses on a GPU are copied while the
GPU goes on; those of other ranks arrive later. So the latest few steps wait in a queue. Its length
is a fixed number of steps, not a time, because all ranks must use the same losses for a window.
"""

from __future__ import annotations

import importlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from penstock.dataset.part import Ints
from penstock.engine.job import BatchSlot
from penstock.errors import StateError
from penstock.order.importance import ImportanceCourse, StepLosses
from penstock.order.importance.options import Floats
from penstock.order.importance.scores import check_score

NUM_QUEUED = 4
"""Steps whose losses may still be on their way when a window ends."""
_SLOTS_KEPT = 256
"""Batches that were delivered and not observed yet."""


class StepMark(NamedTuple):
    """Identifies a step; the marks of all ranks must be equal."""

    epoch: int
    step: int
    digest: int
    """Of the scores that the samples were drawn from."""

    @classmethod
    def of(cls, slot: BatchSlot) -> StepMark:
        """Return the mark of a batch."""
        return cls(slot.epoch, slot.step, slot.digest)


def check_marks(marks: Sequence[StepMark]) -> None:
    """Raise unless all ranks have reported the same batch, drawn from the same scores."""
    if len({mark[:2] for mark in marks}) > 1:
        named = ", ".join(f"rank {r}: {m.step} of epoch {m.epoch}" for r, m in enumerate(marks))
        raise StateError(
            f"ranks have reported losses of different batches ({named}); all ranks have to call "
            "observe for the same batches, in the same order"
        )
    if len({mark.digest for mark in marks}) > 1:
        named = ", ".join(f"rank {rank} {mark.digest:016x}" for rank, mark in enumerate(marks))
        raise StateError(
            f"ranks have drawn samples from different scores ({named}); all ranks have to call "
            "observe for the same batches and load the same state"
        )


class PendingLosses(Protocol):
    """The losses of a step; some may still be on their way."""

    def is_here(self) -> bool:
        """Return whether `result` would return at once."""
        ...

    def result(self) -> StepLosses:
        """Return the losses of the whole global batch."""
        ...


class LossExchange(Protocol):
    """Gathers the losses of all ranks, step by step."""

    def begin(self, ids: Ints, losses: Any, mark: StepMark) -> PendingLosses:
        """Send this rank's losses; the mark must be equal on all ranks."""
        ...


@dataclass(frozen=True, slots=True)
class LocalLosses:
    """Losses that are in this process already."""

    step: StepLosses

    def is_here(self) -> bool:
        """Return True."""
        return True

    def result(self) -> StepLosses:
        """Return the losses."""
        return self.step


class SingleRankExchange:
    """The exchange of a world of one rank."""

    def begin(self, ids: Ints, losses: Any, mark: StepMark) -> PendingLosses:
        """Return the losses; from a GPU they are copied in the background."""
        if hasattr(losses, "detach") and losses.device.type == "cuda":
            module = importlib.import_module("penstock.loader.torch.losses")
            pending: PendingLosses = module.DeviceLosses(ids, losses)
            return pending
        return LocalLosses(StepLosses(ids, as_floats(losses)))


def as_floats(losses: Any) -> Floats:
    """Return a copy of losses as an array."""
    if hasattr(losses, "detach"):
        losses = losses.detach().float().cpu().numpy()
    return np.array(losses, np.float32)


class ObservedLosses:
    """Matches the losses that the loop reports with the batches that it was given."""

    def __init__(
        self,
        course: ImportanceCourse,
        exchange: Callable[[], LossExchange],
    ) -> None:
        self.course = course
        self._make_exchange = exchange
        self.exchange: LossExchange | None = None
        """Made when the first losses come; None before, and after a change of the world."""
        self.forward: Callable[[list[StepLosses], bool], None] = lambda steps, closes: None
        """Passes losses of the window on to the engine, and whether the window is over."""
        self._slots: dict[tuple[int, int], BatchSlot] = {}
        self._queue: deque[PendingLosses] = deque()
        self.num_observed = 0
        # Held while the course changes and the engine is told, so that a thread that replaces a
        # dead engine finds each loss either in the course or among the losses still to be told.
        self.changing = threading.Lock()

    def restore(self, queued: list[StepLosses]) -> None:
        """Restore the queue of a saved state."""
        self._queue = deque(LocalLosses(step) for step in queued)

    def queued(self) -> list[StepLosses]:
        """Return the steps in the queue; waits for their losses."""
        return [pending.result() for pending in self._queue]

    # -- batches -----------------------------------------------------------------------------

    def delivered(self, slot: BatchSlot) -> None:
        """Record that a batch is delivered; the first batch of a window ends the one before."""
        order = self.course.order
        epoch, position = slot.cursor_after
        last = (epoch, position - 1) if position else (epoch - 1, order.num_samples - 1)
        window = order.window_at(*last)
        while self.course.window < window:
            self.take_all()
            with self.changing:
                self.course.close_window()
                self.forward([], True)
        self._slots[slot.epoch, slot.step] = slot
        if len(self._slots) > _SLOTS_KEPT:
            del self._slots[next(iter(self._slots))]

    # -- losses ------------------------------------------------------------------------------

    def observe(self, batch: Any, losses: Any) -> None:
        """Take the losses of a batch's samples."""
        if getattr(batch, "ids", None) is None or not hasattr(batch, "step"):
            raise StateError(
                f"this {type(batch).__name__} does not say where it came from: something has made "
                "a new batch of it, as Hugging Face's Trainer does "
                "(penstock.torch.WeightedLossMixin is for that); observe the batch that the loader "
                "gave, or what its `to` returned"
            )
        key = batch.epoch, batch.step
        slot = self._slots.get(key)
        if slot is None:
            raise StateError(
                f"batch {key[1]} of epoch {key[0]} was observed before, or is not one of the last "
                f"{_SLOTS_KEPT} batches of this iteration; call observe once for each batch, soon "
                "after its step"
            )
        device = getattr(getattr(batch.ids, "device", None), "type", "cpu")
        if device == "cpu" and not np.array_equal(np.asarray(batch.ids), slot.ids):
            raise StateError(
                f"batch {key[1]} of epoch {key[0]} has other samples than the one that this loader "
                "gave; observe belongs to the loader that the batch came from"
            )
        ids, losses = slot.ids, _checked(losses, len(slot.ids))
        del self._slots[key]  # Only now, so that a call that was refused can be repeated.
        if self.exchange is None:
            self.exchange = self._make_exchange()
        if slot.num_counted < len(ids):
            counted = np.flatnonzero(slot.mask)
            ids, losses = ids[counted], losses[counted]
        self._queue.append(self.exchange.begin(ids, losses, StepMark.of(slot)))
        self.num_observed += 1
        self._advance(lambda pending: pending.is_here())

    def take_all(self) -> None:
        """Hand over all steps but the latest `NUM_QUEUED`; waits for their losses."""
        self._advance(lambda pending: True)

    def _advance(self, may_take: Callable[[PendingLosses], bool]) -> None:
        """Hand over steps beyond the latest `NUM_QUEUED`, as long as `may_take` allows the next."""
        taken = []
        while len(self._queue) > NUM_QUEUED and may_take(self._queue[0]):
            taken.append(self._queue.popleft().result())
            check_score(taken[-1], self.course.order.options)
        if not taken:
            return
        with self.changing:
            for step in taken:
                self.course.observe(step)
            self.forward(taken, False)


def _checked(losses: Any, num_samples: int) -> Any:
    if not hasattr(losses, "shape"):
        losses = np.asarray(losses)
    shape = tuple(losses.shape)
    if shape != (num_samples,):
        raise StateError(
            f"observe needs one loss for each of the {num_samples} samples of the batch, got shape "
            f"{list(shape)}: compute the loss with reduction='none', and take the mean of each "
            "sample's losses if it has several"
        )
    return losses
