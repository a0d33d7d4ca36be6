"""A trace read back: the rows of all processes of a run, with one table of names and one clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.errors import OptionError
from penstock.trace.chunks import VERSION, Rows, placed_chunks, rows_of
from penstock.trace.clocks import OF_NO_RANK, ClockFacts, clock_facts
from penstock.trace.native import read_native_head
from penstock.trace.schema import SPAN, Kind
from penstock.trace.segments import read_segment

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


@dataclass(kw_only=True)
class _ProcessFile:
    """The file of one process while it is read."""

    about: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=lambda: {0: ""})
    counters: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    counters_of: list[tuple[int, int, dict[str, float]]] = field(default_factory=list)
    """Counters of other processes, with their numbers."""
    dropped: dict[Kind, int] = field(default_factory=dict)
    parts: list[tuple[int, Rows]] = field(default_factory=list)
    """Rows with the thread that they are of."""
    threads: dict[int, str] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    """Of each segment, the number behind its last row that was read."""
    num_missing: int = 0
    """Rows that should have been there."""
    offset: int = 0
    """Where the part of the file begins that was not read."""


def read_trace(folder: str | Path) -> Trace:
    """Return what was recorded in a folder, as far as it has got: a run may still be going on."""
    path = Path(folder)
    paths = sorted([*path.glob("*.trace"), *path.glob("*.native")])
    files = [read for p in paths if (read := _read_file(p)) is not None]
    if not files:
        raise OptionError(
            f"{path} holds no trace; record one with penstock.Loader(..., trace={str(path)!r}) or "
            f"penstock trace --out {path} -- python train.py"
        )
    _hand_out_counters(files)
    clocks = clock_facts([(f.about, f.facts) for f in files])
    names: dict[str, int] = {"": 0}
    parts: list[Rows] = []
    for number, file in enumerate(files):
        parts += [
            _spans(rows, file, number=number, thread=thread, clocks=clocks, names=names)
            for thread, rows in file.parts
        ]
    spans = np.concatenate(parts) if parts else np.zeros(0, SPAN)
    spans = spans[np.argsort(spans["start_ns"], kind="stable")]
    begin_ns = int(spans["start_ns"][0]) if len(spans) else min(f.about["perf_ns"] for f in files)
    spans["start_ns"] -= begin_ns
    first = files[0].about
    return Trace(
        folder=path,
        spans=spans,
        names=tuple(names),
        processes=tuple(_process(f, n, clocks, begin_ns) for n, f in enumerate(files)),
        start_ns=first["time_ns"] + begin_ns - first["perf_ns"] - clocks.offset_ns(first["boot"]),
        clocks=clocks,
        num_damaged=sum(file.num_missing for file in files),
    )


def _read_file(path: Path) -> _ProcessFile | None:
    if path.suffix == ".native":
        if path.with_suffix(".trace").exists():
            return None  # It was packed, and whoever did it was killed before clearing up.
        file = _read_native(path)
    else:
        file = _read_chunks(path, None)
    if file is None or file.about.get("is_packed"):
        return file
    waiting = dict.fromkeys(sorted(path.parent.glob(f"{path.stem}.*.rows")), 0)
    for _ in range(_LOOKS):
        waiting = {p: n for p, before in waiting.items() if (n := _read_segment(file, p, before))}
        if not waiting:
            break
        # A thread has compressed rows since we read the file: they stand at its end now.
        file = _read_chunks(path, file)
        assert file is not None
    # A thread that compresses faster than we read: what it has in its own file is too new for us.
    return file


def _read_native(path: Path) -> _ProcessFile | None:
    found = read_native_head(path)
    if found is None:
        return None
    about, names, dropped = found
    return _ProcessFile(about=about, names=names, dropped=dropped)


def _read_chunks(path: Path, file: _ProcessFile | None) -> _ProcessFile | None:
    """Return what a file says; of one that was read before, with what is new."""
    begin = 0 if file is None else file.offset
    with path.open("rb") as opened:
        opened.seek(begin)
        data = opened.read()
    for header, body, stop in placed_chunks(data):
        if header["type"] == "process":
            if header["version"] != VERSION:
                raise OptionError(
                    f"{path} is a trace of version {header['version']}, this release reads version "
                    f"{VERSION}; read it with the release that wrote it"
                )
            file = _ProcessFile(about=header)
        elif file is not None:
            _READERS[header["type"]](file, header, body)
        if file is not None:
            file.offset = begin + stop
    return file


def _hand_out_counters(files: list[_ProcessFile]) -> None:
    """Give counters to the processes that they are of: another one may have read them."""
    owners = {(f.about["boot"], f.about["pid"]): f for f in files}
    for file in files:
        for pid, at_ns, values in file.counters_of:
            owner = owners.get((file.about["boot"], pid))
            if owner is not None:  # Else it has not recorded anything, and is not in the trace.
                owner.counters.append((at_ns, values))
    for file in files:
        file.counters.sort(key=lambda row: row[0])


def _add_rows(file: _ProcessFile, header: dict[str, Any], body: bytes) -> None:
    rows, first = rows_of(header, body), header["first"]
    num_seen = file.seen.get(header["segment"], 0)
    file.num_missing += max(0, first - num_seen)
    rows = rows[max(0, num_seen - first) :]
    if len(rows):
        file.parts.append((header["thread"], rows))
    stop = header.get("stop", first + header["num_rows"])
    file.seen[header["segment"]] = max(num_seen, stop)


def _add_thread(file: _ProcessFile, header: dict[str, Any], body: bytes) -> None:
    file.threads[header["thread"]] = header["name"]


def _add_facts(file: _ProcessFile, header: dict[str, Any], body: bytes) -> None:
    file.facts |= msgspec.msgpack.decode(body)


def _add_name(file: _ProcessFile, header: dict[str, Any], body: bytes) -> None:
    file.names[header["number"]] = body.decode()


def _add_counters(file: _ProcessFile, header: dict[str, Any], body: bytes) -> None:
    at_ns, values, pid = header["at_ns"], msgspec.msgpack.decode(body), header.get("pid")
    if pid in (None, file.about["pid"]):
        file.counters.append((at_ns, values))
    else:
        file.counters_of.append((pid, at_ns, values))


def _add_dropped(file: _ProcessFile, header: dict[str, Any], body: bytes) -> None:
    file.dropped = {Kind(int(kind)): count for kind, count in header["rows"].items()}
    if "stop" in header:
        segment, first, stop = header["segment"], header["first"], header["stop"]
        num_seen = file.seen.get(segment, 0)
        file.num_missing += max(0, first - num_seen)
        file.seen[segment] = stop


_READERS: dict[str, Callable[[_ProcessFile, dict[str, Any], bytes], None]] = {
    "rows": _add_rows,
    "thread": _add_thread,
    "facts": _add_facts,
    "name": _add_name,
    "counters": _add_counters,
    "dropped": _add_dropped,
}


def _read_segment(file: _ProcessFile, path: Path, first_before: int) -> int:
    """Add the rows of a thread that are not in a chunk, and return 0.

    If rows before them are not known yet, add nothing and return the number of its first row. They
    are missing if that is `first_before`, the answer of the look before: the file of the process
    was read since.
    """
    found = read_segment(path, file.seen)
    if found is None:
        return 0
    num_missing = found.first - file.seen.get(found.number, 0)
    if num_missing > 0:
        if found.first != first_before:
            return found.first
        file.num_missing += num_missing
    if len(found.rows):
        file.parts.append((found.thread, found.rows))
        if found.number >= 0:
            file.seen[found.number] = found.start + len(found.rows)
    return 0


def _spans(
    rows: Rows,
    file: _ProcessFile,
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
    out["start_ns"] += clocks.offset_ns(file.about["boot"], rows["start_ns"])
    out["rank"], out["process"], out["thread"] = file.about["rank"], number, thread
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


def _process(file: _ProcessFile, number: int, clocks: ClockFacts, begin_ns: int) -> Process:
    about = file.about
    offset_ns = clocks.offset_ns(about["boot"]) - begin_ns
    return Process(
        number=number,
        rank=about["rank"],
        role=about["role"],
        pid=about["pid"],
        parent=about["parent"],
        host=about["host"],
        facts=file.facts,
        counters=tuple((at_ns + offset_ns, values) for at_ns, values in file.counters),
        dropped=file.dropped,
        threads=file.threads,
    )
