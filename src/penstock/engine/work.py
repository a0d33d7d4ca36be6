"""Requests of the engine to a worker process, and the worker's reply.

A request names some samples of one batch, the place of their bytes, and the memory for their
values. The worker writes values of the expected shape straight into that memory. All other values
come back in a parcel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.dataset.part import Ints
from penstock.engine.decode import SampleUses
from penstock.engine.shared import Reference, SharedParcel

Read = tuple[str, int, int, float]
"""Source, bytes, requests and seconds, as `Counters.add_reads` takes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawBytes:
    """The bytes of some samples, one run of memory for each table."""

    references: list[Reference]
    lengths: list[Ints]


@dataclass(frozen=True, slots=True, kw_only=True)
class SomeSamples:
    """Samples of one part of the data set."""

    part: int
    local_ids: Ints
    places: list[int]
    """Where in the batch they belong."""
    uses: SampleUses
    source: RawBytes | SharedParcel | None
    """Their bytes, or their encoded fields; None: in local files, for the worker to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTarget:
    """An array of the batch that values of a field are written into."""

    reference: Reference
    shape: tuple[int, ...]
    kind: str
    special: Any


WorkFor = tuple[int, int, int]
"""Rank, step and epoch of the work, in runs that are traced; a plain tuple, because pickle need not
look up its class."""


class CopyTarget(NamedTuple):
    """The memory of a batch that samples are copied into."""

    memory: Reference
    places: Ints | None
    """With a width, the row of each sample (None: one after the other); else the start of each."""
    width: int
    """Bytes of a row; 0 where samples differ in length."""


class CopyRequest(NamedTuple):
    """Samples of local files to copy into a batch, as `SampleReader` does."""

    part: int
    table: int
    local_ids: Ints
    target: CopyTarget
    work_for: WorkFor | None = None
    fresh: Sequence[tuple[int, int]] = ()
    gone: Sequence[int] = ()
    released: Sequence[tuple[int, int]] = ()


class WorkRequest(NamedTuple):
    """Samples to make."""

    samples: list[SomeSamples]
    num_samples: int
    """Of the whole batch."""
    targets: Mapping[str, RowTarget]
    whole: bool
    """Whether this is a whole batch, to be joined by the worker."""
    work_for: WorkFor | None = None
    fresh: Sequence[tuple[int, int]] = ()
    """Segments that come with this message: numbers and sizes."""
    gone: Sequence[int] = ()
    """Segments to forget."""
    released: Sequence[tuple[int, int]] = ()
    """References of the worker's parcels that nobody looks at any more."""


class WorkReply(NamedTuple):
    """The outcome of a request."""

    parcel: SharedParcel | None = None
    """The fields of the samples (`dict[str, FieldPiece]`), or the whole batch."""
    number: int = 0
    """Number of the parcel, for its release."""
    error: bytes | None = None
    """The exception that ended it, pickled, with the traceback as its cause."""
    fresh: Sequence[tuple[int, int]] = ()
    gone: Sequence[int] = ()
    reads: Sequence[Read] = ()
    decode_s: float = 0.0
    size_bytes: int = 0
    """Bytes of a whole batch; 0 for a piece of one."""
