"""A batch in the making: its samples, their places, and the work that is left.

One thread plans a job. Several threads work on it, a *piece* at a time; the one that does the last
piece finishes it. The consumer takes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.dataset.bound import BoundPart
from penstock.dataset.part import Extents, Ints
from penstock.flow.routes import Route
from penstock.order.importance.options import Floats

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSlot:
    """One batch of the stream, of which only the samples are known."""

    epoch: int
    step: int
    ids: Ints
    positions: Ints
    """Places in the epoch; where a batch is filled up, they run on beyond its end."""
    mask: Mask
    num_counted: int
    """Samples whose mask is True."""
    cursor_after: tuple[int, int]
    """Epoch and position of the whole world after this batch."""
    weights: Floats | None = None
    """Factor of each sample's loss, where samples are drawn by importance."""
    digest: int = 0
    """Digest of the scores that the samples were drawn from."""


@dataclass(frozen=True, kw_only=True)
class SampleGroup:
    """The samples of a batch that lie in one part."""

    bound: BoundPart
    where: Ints
    """Their places in the batch."""
    local_ids: Ints
    """Their numbers in the part."""
    places: Any = None
    """Their places in tiers, once `LocalTiers.places` has looked them up."""

    @cached_property
    def extents(self) -> tuple[Extents, ...]:
        """The extents of the samples, one for each table."""
        return tuple(t.extents(self.local_ids) for t in self.bound.part.tables)

    def part(self, chosen: Ints) -> SampleGroup:
        """Return some of these samples as a group of their own."""
        return SampleGroup(
            bound=self.bound, where=self.where[chosen], local_ids=self.local_ids[chosen]
        )

    def at(self, local_ids: Ints) -> SampleGroup:
        """Return other samples of the same part as a group, in no batch."""
        flat = local_ids.reshape(-1)
        return SampleGroup(bound=self.bound, where=np.zeros(len(flat), np.int64), local_ids=flat)

    @property
    def size_bytes(self) -> int:
        """Bytes of these samples in the store; an upper bound for samples in blocks."""
        return sum(int(e.length.sum()) for e in self.extents)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPiece:
    """Samples of one group that one thread works on at a time."""

    group: int
    start: int
    stop: int


@dataclass(slots=True, kw_only=True)
class BatchJob:
    """A batch in the making."""

    slots: list[BatchSlot]
    """The batches that this job makes; several where they are tiny."""
    groups: list[SampleGroup]
    num_samples: int
    number: int = 0
    """Its place in the run, from 0."""
    routes: list[Route] = field(default_factory=list)
    """The route of each group's bytes."""
    state: Any = None
    """State of the maker between planning and finishing."""
    staged: dict[int, Any] = field(default_factory=dict)
    """The `GroupStage` of each group; local files that are read directly have none."""
    pieces_left: int = 0
    results: list[Mapping[str, Any] | Any] = field(default_factory=list)
    """A result for each slot once finished; or one, of fields with the rows of all slots."""
    error: BaseException | None = None
    is_fetched: bool = False
    """Whether all reads that it waits for are done."""
    is_done: bool = False
    planned_ns: int = 0
    """When its reads were wanted (perf_counter_ns)."""
    fetched_ns: int = 0
    """When the last of its reads was done."""
    begun_ns: int = 0
    """When the first thread began to work on it."""
    done_ns: int = 0
    """When its batches were made."""
    size_bytes: int = 0
    """Memory of the job, as far as it is known."""
    stored_bytes: int = 0
    """Memory for its batches, as planned."""
    staged_bytes: int = 0
    """Bytes that are read ahead for it alone, until its batches are made."""

    @property
    def fetch_ns(self) -> tuple[int, int]:
        """From when to when its bytes came; an empty span if it had no reads."""
        return self.planned_ns, self.fetched_ns

    @property
    def decode_ns(self) -> tuple[int, int]:
        """From when to when it was made."""
        return self.begun_ns or self.fetched_ns, self.done_ns


class BatchMaker(Protocol):
    """One way to turn bytes into batches."""

    decodes_here: bool
    """Whether `work` itself does the work; else worker processes do and record it."""
    waits_here: bool
    """Whether `work` mostly waits for worker processes."""

    def plan(self, job: BatchJob) -> list[GroupPiece]:
        """Prepare a job and return the pieces it falls into."""
        ...

    def work(self, job: BatchJob, piece: GroupPiece) -> None:
        """Work on a piece; several threads may work on one job at once."""
        ...

    def finish(self, job: BatchJob) -> list[Any]:
        """Return the results of the job, when all pieces are done."""
        ...


def batches_of(slots: Sequence[BatchSlot], results: Sequence[Any]) -> list[tuple[BatchSlot, Any]]:
    """Return each slot with its fields; fields with the rows of all slots are cut."""
    if len(results) == len(slots):
        return list(zip(slots, results, strict=True))
    [whole] = results
    out, start = [], 0
    for slot in slots:
        stop = start + len(slot.ids)
        out.append((slot, {name: rows[start:stop] for name, rows in whole.items()}))
        start = stop
    return out


def cut(groups: list[SampleGroup], samples_a_piece: int) -> list[GroupPiece]:
    """Return pieces of at most that many samples."""
    return [
        GroupPiece(group=g, start=start, stop=min(start + samples_a_piece, len(group.where)))
        for g, group in enumerate(groups)
        for start in range(0, len(group.where), samples_a_piece)
    ]
