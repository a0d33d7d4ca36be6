"""A trace read back: the rows of all processes of a run, with one table of names and one clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.trace.chunks import Rows
from penstock.trace.clocks import OF_NO_RANK, ClockFacts, clock_facts
from penstock.trace.following import FollowedProcess, TraceFollower
from penstock.trace.schema import SPAN, Kind

_LOOKS = 8
"""How often a file is read on whose process compresses rows meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process that recorded."""

    number: int
    """Its number in the trace: the column `process`."""
    rank: int
    role: str
    """`train`, `engine`, `worker`, `launch`, `node`, or `native` for what was seen below Python."""
    pid: int
    parent: int
    """The process that started it."""
    host: str
    facts: dict[str, Any]
    """What it recorded about itself and its rank."""
    counters: tuple[tuple[int, dict[str, float]], ...]
    """Counters with their times, on the clock of the run."""
    dropped: dict[Kind, int]
    """Rows that were left out because the file had reached its size."""
    threads: dict[int, str]
    """Names of its threads."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """All that was recorded of a run."""

    folder: Path
    spans: Rows
    """One row a span (`schema.SPAN`), sorted by start; 0 is the first thing that happened."""
    names: tuple[str, ...]
    """What `object` and `source` mean."""
    processes: tuple[Process, ...]
    start_ns: int
    """When it began, in nanoseconds since 1970."""
    clocks: ClockFacts
    """How the clocks of machines were compared."""
    num_damaged: int = 0
    """Rows that were recorded and are missing: the disk was full, or a file is damaged."""
    _by_kind: dict[int, Rows] = field(default_factory=dict, repr=False)

    def of(self, *kinds: Kind, rank: int | None = None) -> Rows:
        """Return the spans of some kinds, of one rank or of all."""
        found = self._of_kinds(kinds)
        return found if rank is None else found[found["rank"] == rank]

    def _of_kinds(self, kinds: tuple[Kind, ...]) -> Rows:
        if len(kinds) == 1:
            kind = int(kinds[0])
            if kind not in self._by_kind:
                self._by_kind[kind] = self.spans[self.spans["kind"] == kind]
            return self._by_kind[kind]
        return self.spans[np.isin(self.spans["kind"], [int(kind) for kind in kinds])]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that recorded."""
        return tuple(sorted({p.rank for p in self.processes if p.role not in OF_NO_RANK}))

    def name_of(self, number: int) -> str:
        """Return what a number in `object` or `source` means."""
        return self.names[number]

    def names_of(self, numbers: npt.NDArray[np.uint32]) -> list[str]:
        """Return what numbers in `object` or `source` mean."""
        return [self.names[number] for number in numbers.tolist()]

    def facts(self, rank: int | None = None) -> dict[str, Any]:
        """Return the facts of a rank, or of all processes together; the training process's win."""
        out: dict[str, Any] = {}
        for process in sorted(self.processes, key=lambda p: p.role == "train"):
            if rank is None or process.rank == rank:
                out |= process.facts
        return out


def read_trace(folder: str | Path) -> Trace:
    """Return what was recorded in a folder, as far as it has got: a run may still be going on."""
    path = Path(folder)
    files = [_whole(process) for process in TraceFollower(path).look()]
    counters = _counters_by_owner(files)
    clocks = clock_facts([(f.head, f.facts) for f in files])
    names: dict[str, int] = {"": 0}
    parts: list[Rows] = []
    for number, file in enumerate(files):
        parts += [
            _spans(rows, file, number=number, thread=thread, clocks=clocks, names=names)
            for thread, rows in file.rows
        ]
    spans = np.concatenate(parts) if parts else np.zeros(0, SPAN)
    spans = spans[np.argsort(spans["start_ns"], kind="stable")]
    begin_ns = int(spans["start_ns"][0]) if len(spans) else min(f.head["perf_ns"] for f in files)
    spans["start_ns"] -= begin_ns
    first = files[0].head
    return Trace(
        folder=path,
        spans=spans,
        names=tuple(names),
        processes=tuple(_process(f, n, counters[n], clocks, begin_ns) for n, f in enumerate(files)),
        start_ns=first["time_ns"] + begin_ns - first["perf_ns"] - clocks.offset_ns(first["boot"]),
        clocks=clocks,
        num_damaged=sum(file.num_missing for file in files),
    )


def _whole(process: FollowedProcess) -> FollowedProcess:
    """Look again while rows of a thread wait for others that it has compressed meanwhile."""
    rows, counters = process.rows, process.counters
    for _ in range(_LOOKS):
        if not process.waiting:
            break
        process.look()
        rows, counters = rows + process.rows, counters + process.counters
    # A thread that compresses faster than we read: what it has in its own file is too new for us.
    process.rows, process.counters = rows, counters
    return process


def _counters_by_owner(
    files: list[FollowedProcess],
) -> list[list[tuple[int, dict[str, float]]]]:
    """Return the counters of each process: another one may have read them."""
    owners = {(f.head["boot"], f.head["pid"]): n for n, f in enumerate(files)}
    found: list[list[tuple[int, dict[str, float]]]] = [[] for _ in files]
    for number, file in enumerate(files):
        for pid, at_ns, values in file.counters:
            is_own = pid == file.head["pid"]
            owner = number if is_own else owners.get((file.head["boot"], pid))
            if owner is not None:  # Else it has not recorded anything, and is not in the trace.
                found[owner].append((at_ns, values))
    return [sorted(counters, key=lambda row: row[0]) for counters in found]


def _spans(
    rows: Rows,
    file: FollowedProcess,
    *,
    number: int,
    thread: int,
    clocks: ClockFacts,
    names: dict[str, int],
) -> Rows:
    """Return rows of a process as spans of the run."""
    out = np.zeros(len(rows), SPAN)
    for column in rows.dtype.names or ():
        if column in (SPAN.names or ()):
            out[column] = rows[column]
    out["start_ns"] += clocks.offset_ns(file.head["boot"], rows["start_ns"])
    out["rank"], out["process"], out["thread"] = file.head["rank"], number, thread
    for column in ("object", "source"):
        out[column] = _renamed(rows[column], file.names, names)
    return out


def _renamed(
    numbers: npt.NDArray[np.uint32], own: dict[int, str], names: dict[str, int]
) -> npt.NDArray[np.uint32]:
    distinct, places = np.unique(numbers, return_inverse=True)
    # A name may be missing where its chunk was damaged.
    texts: Iterable[str] = (own.get(n, f"(name {n} is lost)") for n in distinct.tolist())
    table = np.array([names.setdefault(text, len(names)) for text in texts], np.uint32)
    return table[places]


def _process(
    file: FollowedProcess,
    number: int,
    counters: list[tuple[int, dict[str, float]]],
    clocks: ClockFacts,
    begin_ns: int,
) -> Process:
    about = file.head
    offset_ns = clocks.offset_ns(about["boot"]) - begin_ns
    return Process(
        number=number,
        rank=about["rank"],
        role=about["role"],
        # What strace saw is recorded by the launcher, for the process that it was seen of.
        pid=file.facts.get("pid_traced", about["pid"]),
        parent=about["parent"],
        host=about["host"],
        facts=file.facts,
        counters=tuple((at_ns + offset_ns, values) for at_ns, values in counters),
        dropped=file.dropped,
        threads=file.threads,
    )
