"""The rows of a trace: one for each span, with the same columns for every kind.

A column that does not apply to a kind is 0, or -1 where 0 would be a value (`step`, `epoch`,
`offset`). Times are those of `time.perf_counter_ns`, which on Linux is one clock for all processes
of a machine.
"""

from __future__ import annotations

import struct
from enum import IntEnum, IntFlag

import numpy as np


class Kind(IntEnum):
    """What a span is. Numbers are part of the file format: never reuse one."""

    NEXT = 1
    """The training loop asks for a batch and gets it. `wait_ns`: no batch was ready. `count`:
    samples in the batch. `size_bytes`: bytes of the batch, where known."""
    LAUNCH = 2
    """The training loop's own work from one batch to the next call, as the host sees it: issuing
    kernels, or computing. `cpu_ns`, `wait_ns` (runnable, but without a core) and `lock_ns` (waiting
    for the interpreter's lock) are those of the training thread. `count`: steps that it covers."""
    COPY = 3
    """A batch is copied to the device, as the host sees it."""
    COMPUTE = 4
    """The device computes, where that is known (from torch.profiler or CUDA events). `count`: steps
    that it covers."""
    COMMUNICATE = 5
    """A collective, from its start to its end as this rank sees it. `object`: which one."""
    STEP = 6
    """A step as a step program or a trainer states it, where they do."""

    PLAN = 10
    """Finding out which samples a batch holds and where they lie. `count`: reads that it needs."""
    FETCH = 11
    """One attempt of a request to a store. `attempt` counts from 0; flags HEDGE, ERROR (no bytes
    then), FILL (no step where it is fetched ahead: a unit serves many). Samples of local files that
    were read in one go are one row: `count` says how many, `size_bytes` is of all of them, `object`
    and `offset` are of the first."""
    TIER_READ = 12
    """Samples of a batch are read from a tier of this node. `source`: which tier. `count`."""
    TIER_FILL = 13
    """Bytes are written into a tier. `count`: units that were written."""
    PEER_REQUEST = 14
    """A peer is asked for samples, until its answer is here. `source`: `peer:N`, N its node.
    `wait_ns`: the peer did not have them yet."""
    PEER_SERVE = 15
    """This node answers a peer. `source`: `peer:N`, the one that asked."""
    DECODE = 16
    """Samples are read where they lie, decoded and transformed, some of a batch in one go.
    `count`: samples. `cpu_ns`, `wait_ns` (runnable, but without a core)."""
    TRANSFORM = 17
    """The part of a DECODE span that the user's transform took, summed over its samples."""
    JOIN = 18
    """The pieces of a batch are put together: collated, padded, packed for the way. `count`:
    batches; several tiny ones are made at once, and `step` is that of the first."""
    HAND_OVER = 19
    """A finished batch waits to be taken: from made to taken, `size_bytes` of memory. `count`: as
    in JOIN."""
    INDEX = 20
    """A data set is opened: listing, reading or making its index."""

    READ = 30
    """A file or a connection is read, by anybody in the process. Flag NATIVE: below Python."""
    OPEN = 31
    """A file is opened; `size_bytes`: its size where known."""
    WRITE = 32
    """A file is written."""
    METADATA = 33
    """stat, listing and the like."""
    MAP = 34
    """A file is mapped into memory: what is read through the mapping is not seen."""

    BATCH = 40
    """A worker of a foreign loader makes one batch, from its indices to the finished batch."""
    SAMPLE = 41
    """A foreign data set makes one sample. `count` samples where several are folded into one."""
    COLLATE = 42
    """Samples of a foreign loader are collated."""
    PIN = 43
    """A batch is copied into page-locked memory."""

    CHECKPOINT = 50
    """The training process saves its state."""
    VALIDATE = 51
    """The training process reads another data set than the one that it trains on."""
    MARK = 52
    """Something happened: `object` says what."""


class Flag(IntFlag):
    """What else is to be said of a span. 64 was never written."""

    NONE = 0
    HEDGE = 1
    """A second request for bytes that were already asked for."""
    ERROR = 2
    """It failed."""
    FILL = 4
    """It was made to fill a tier ahead of use, not for a batch."""
    NATIVE = 8
    """Seen below Python, by the preloaded library or strace."""
    SOCKET = 16
    """A connection, not a file."""
    RESIDENT = 32
    """A batch of a differential run that was kept, not loaded."""


COLUMNS: tuple[tuple[str, str], ...] = (
    ("start_ns", "<i8"),
    ("duration_ns", "<i8"),
    ("cpu_ns", "<i8"),
    ("wait_ns", "<i8"),
    ("lock_ns", "<i8"),
    ("offset", "<i8"),
    ("size_bytes", "<i8"),
    ("step", "<i8"),
    ("count", "<i4"),
    ("epoch", "<i4"),
    ("object", "<u4"),
    ("source", "<u4"),
    ("kind", "<u2"),
    ("flags", "<u2"),
    ("attempt", "<u2"),
    ("spare", "<u2"),
)
"""Columns of a row as it is recorded; `object` and `source` are numbers of names."""

ROW = np.dtype(list(COLUMNS))
PACKED = struct.Struct("<8q2i2I4H")
assert PACKED.size == ROW.itemsize

SPAN = np.dtype([*COLUMNS[:-1], ("rank", "<u4"), ("process", "<u4"), ("thread", "<u4")])
"""A row after reading: names are numbers in `Trace.names`, times are on the clock of the run."""
