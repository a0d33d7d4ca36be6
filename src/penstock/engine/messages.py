"""What front and engine say to each other.

Two channels: on *control* the front asks and the engine answers. On *batches* the engine sends each
batch when it is made, and the front says now and then which it has taken, and which memory it does
not look at any more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from penstock.engine.engine import RunStart
from penstock.engine.job import Slot
from penstock.engine.options import LoaderOptions
from penstock.engine.shared import SharedParcel
from penstock.engine.stats import Counted, MemoryStats, Seen
from penstock.engine.worker import WorkerJob


@dataclass(frozen=True, kw_only=True)
class Payload:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeBatches:
    """Some batches, or the end of the iteration."""

    run: int
    """The iteration that they belong to."""
    number: int = 0
    """Of the parcel, for its release."""
    slots: list[Slot] = field(default_factory=list)
    parcel: SharedParcel | None = None
    """The fields of each batch, as a list; of a batch that a worker has joined, the batch."""
    is_joined: bool = False
    error: bytes | None = None
    fresh: list[tuple[int, int]] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    counted: Counted | None = None
    sent_bytes: int = 0
    """Bytes that are copied, since they cannot lie in shared memory or are not worth it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontNotice:
    """What the front has done since it last said so."""

    run: int
    num_taken: int = 0
    is_waiting: bool = False
    wait_s: float = 0.0
    """Time that it has waited in this iteration."""
    released: list[tuple[int, int]] = field(default_factory=list)
    spoilt: list[tuple[int, int]] = field(default_factory=list)
    """Released here, but a forked child may look at it: not to be used again."""


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
class EngineTold:
    """What the engine knows of itself."""

    seen: Seen
    counted: Counted
    events: tuple[str, ...]
    memory: MemoryStats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingCall:
    """A call at the place where nodes meet, which only the training process can reach."""

    method: str
    arguments: tuple[Any, ...]
