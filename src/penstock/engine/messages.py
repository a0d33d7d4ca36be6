"""What front and engine say to each other.

Two channels: on *control* the front asks and the engine answers. On *batches* the engine sends each
batch when it is made, and the front says now and then which it has taken, and which memory it does
not look at any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from penstock.dataset.part import Ints
from penstock.engine.engine import RunStart
from penstock.engine.job import BatchSlot, Mask
from penstock.engine.options import LoaderOptions
from penstock.engine.shared import Reference
from penstock.engine.stats import ClusterStats, EngineStats, MemoryStats
from penstock.engine.worker import WorkerJob
from penstock.order.importance import StepLosses
from penstock.order.importance.options import Floats


@dataclass(frozen=True, kw_only=True)
class EnginePayload:
    """What engine and workers are born with."""

    options: LoaderOptions
    worker_job: WorkerJob
    num_workers: int | None
    """How many workers there are; None: as many as measuring shows to be of use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginRun:
    """Begin an iteration; the one before is over."""

    number: int
    begin: RunStart
    only_asked: bool = False
    """Plan no batch before the front has asked for its bytes: only in stages, which come with a
    channel for these questions."""


class MadeBatches(NamedTuple):
    """Some batches, or the end of the iteration. A tuple: pickling one takes few microseconds."""

    run: int
    """The iteration that they belong to."""
    number: int = 0
    """Of the parcel, for its release."""
    slots: PackedSlots | None = None
    data: bytes | bytearray | None = None
    """The results of a job as a parcel; or, of a batch that a worker has joined, the batch."""
    references: list[Reference] | None = None
    """Where in shared memory the large arrays of the parcel lie."""
    is_joined: bool = False
    error: bytes | None = None
    fresh: Sequence[tuple[int, int]] = ()
    gone: Sequence[int] = ()
    counted: EngineStats | None = None
    decode_ns: tuple[int, int] = (0, 0)
    """From when to when they were made."""
    size_bytes: int = 0
    """Of all of them."""


class FrontNotice(NamedTuple):
    """What the front has done since it last said so."""

    run: int
    num_taken: int = 0
    is_waiting: bool = False
    wait_s: float = 0.0
    """Time that it has waited in this iteration."""
    released: Sequence[tuple[int, int]] = ()
    spoilt: Sequence[tuple[int, int]] = ()
    """Released here, but a forked child may look at it: not to be used again."""
    losses: Sequence[LossNotice] = ()
    """What was observed since, in order."""


class LossNotice(NamedTuple):
    """Losses of some steps, and whether their window is over."""

    steps: Sequence[StepLosses]
    closes_window: bool


class PackedSlots(NamedTuple):
    """Slots on their way: three arrays for all of them, not three for each."""

    numbers: list[tuple[int, int, int, int, int, int, int]]
    """Epoch, step, samples, samples that count, epoch and position afterwards, digest."""
    ids: Ints
    positions: Ints
    mask: Mask
    weights: Floats | None = None

    @classmethod
    def of(cls, slots: Sequence[BatchSlot]) -> PackedSlots:
        """Return slots as one message carries them."""
        return cls(
            [
                (s.epoch, s.step, len(s.ids), s.num_counted, *s.cursor_after, s.digest)
                for s in slots
            ],
            _joined([s.ids for s in slots]),
            _joined([s.positions for s in slots]),
            _joined([s.mask for s in slots]),
            None if slots[0].weights is None else _joined([s.weights for s in slots]),
        )

    def slots(self) -> list[BatchSlot]:
        """Return them as they were."""
        out, start = [], 0
        for epoch, step, num_samples, num_counted, *cursor_after, digest in self.numbers:
            stop = start + num_samples
            slot = BatchSlot(
                epoch=epoch,
                step=step,
                ids=self.ids[start:stop],
                positions=self.positions[start:stop],
                mask=self.mask[start:stop],
                num_counted=num_counted,
                cursor_after=(cursor_after[0], cursor_after[1]),
                digest=digest,
                weights=None if self.weights is None else self.weights[start:stop],
            )
            out.append(slot)
            start = stop
        return out


def _joined(arrays: list[Any]) -> Any:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """Something for the log of the training process."""

    name: str
    level: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineQuestion:
    """A question on control."""

    word: str
    value: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAnswer:
    """What the engine answers."""

    value: Any = None
    error: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """What the engine knows of itself."""

    seen: ClusterStats
    counted: EngineStats
    events: tuple[str, ...]
    memory: MemoryStats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingCall:
    """A call at the place where nodes meet, which only the training process can reach."""

    method: str
    arguments: tuple[Any, ...]
