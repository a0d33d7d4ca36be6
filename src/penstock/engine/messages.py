"""The messages between front and engine, on two channels.

The *front* is the loader in the training process. On *control* it asks and the engine answers;
while the engine meets the other nodes it asks in turn (`MeetingCall`), because only the training
process can reach torch's store. On *batches* the engine sends each batch when it is made, and its
log lines; the front tells from time to time which batches it has taken, and which memory nobody
looks at any more.
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
    """What engine and workers start with."""

    options: LoaderOptions
    worker_job: WorkerJob
    num_workers: int | None
    """The number of workers; None: as many as measuring shows to be of use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginRun:
    """Begin an iteration; the one before is over."""

    number: int
    begin: RunStart
    only_asked: bool = False
    """Plan no batch before the front has asked for its bytes; only for iterations in stages, whose
    questions have a channel of their own."""


class MadeBatches(NamedTuple):
    """Some batches, or the end of the iteration; a tuple, because tuples are pickled fastest."""

    run: int
    """The iteration that the batches belong to."""
    number: int = 0
    """Number of the parcel, for its release."""
    slots: PackedSlots | None = None
    data: bytes | bytearray | None = None
    """The pickled part of the parcel: the results of a job, or a batch that a worker joined."""
    references: list[Reference] | None = None
    """Where in shared memory the large arrays of the parcel lie."""
    is_joined: bool = False
    """Whether the parcel is one batch that a worker joined, not a list of the job's batches."""
    error: bytes | None = None
    fresh: Sequence[tuple[int, int]] = ()
    """Number and size of each segment that the front has not mapped yet; their files come along."""
    gone: Sequence[int] = ()
    """Numbers of segments that the engine has freed: the front unmaps them."""
    counted: EngineStats | None = None
    decode_ns: tuple[int, int] = (0, 0)
    """From when to when the batches were made."""
    size_bytes: int = 0
    """Bytes of all of them."""


class FrontNotice(NamedTuple):
    """Batches taken, memory released and losses observed since the last notice."""

    run: int
    num_taken: int = 0
    is_waiting: bool = False
    wait_s: float = 0.0
    """Time that it has waited in this iteration."""
    released: Sequence[tuple[int, int]] = ()
    spoilt: Sequence[tuple[int, int]] = ()
    """References that a forked child may still look at: their memory must not be used again."""
    losses: Sequence[LossNotice] = ()
    """The losses that were observed since, in order."""


class LossNotice(NamedTuple):
    """Losses of some steps, and whether their window is over."""

    steps: Sequence[StepLosses]
    closes_window: bool


class PackedSlots(NamedTuple):
    """Slots in one message: three arrays for all of them, not three for each."""

    numbers: list[tuple[int, int, int, int, int, int, int]]
    """Epoch, step, samples, samples that count, epoch and position afterwards, digest."""
    ids: Ints
    positions: Ints
    mask: Mask
    weights: Floats | None = None

    @classmethod
    def of(cls, slots: Sequence[BatchSlot]) -> PackedSlots:
        """Return slots in the shape of a message."""
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
        """Return the slots."""
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
    """A line for the log of the training process."""

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
    """The answer of the engine, or its error."""

    value: Any = None
    error: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """The state and the counts of the engine."""

    seen: ClusterStats
    counted: EngineStats
    events: tuple[str, ...]
    memory: MemoryStats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingCall:
    """A call of the rendezvous of the nodes, which only the training process can reach."""

    method: str
    arguments: tuple[Any, ...]
