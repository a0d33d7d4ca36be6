"""A trace for other tools: Chrome's JSON, which Perfetto shows, and tables of Arrow and Parquet.

In Perfetto every process of a rank is a group of its own, named by rank and role; its threads are
rows of spans. An arrow leads from the moment when a batch was made to the `next` that took it.
Counters are drawn as curves.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from penstock.errors import OptionError
from penstock.trace.chunks import Rows
from penstock.trace.reading import Process, Trace
from penstock.trace.schema import SPAN, Flag, Kind

_KINDS = {int(kind): kind.name.lower() for kind in Kind}
_SHOWN = ("cpu_ns", "wait_ns", "lock_ns", "size_bytes", "count", "attempt")
"""Columns that are shown where they are not 0."""
_PLACES = ("step", "epoch", "offset")
"""Columns that are shown where they are not -1."""
_CUMULATIVE = ("cpu.", "io.", "faults.", "node.disk_", "node.net_")
"""Counters that only grow: what is of interest is their rate."""


def spans_between(trace: Trace, steps: tuple[int, int]) -> Rows:
    """Return the spans of a trace from the `next` of one step to that of another.

    Steps are counted over epochs, on each rank, from the first that was recorded.
    """
    first, stop = steps
    begins: list[int] = []
    ends: list[int] = []
    for rank in trace.ranks:
        asked = trace.of(Kind.NEXT, rank=rank)
        if first < len(asked):
            begins.append(int(asked["start_ns"][first]))
            last = min(stop, len(asked)) - 1
            ends.append(int(asked["start_ns"][last] + asked["duration_ns"][last]))
    if not begins or stop <= first:
        count = max((len(trace.of(Kind.NEXT, rank=rank)) for rank in trace.ranks), default=0)
        raise OptionError(
            f"{trace.folder} has no steps {first}:{stop}; it has {count} on a rank, counted from 0"
        )
    spans = trace.spans
    ended = spans["start_ns"] + spans["duration_ns"] >= min(begins)
    found: Rows = spans[(spans["start_ns"] < max(ends)) & ended]
    return found


# -- Perfetto --------------------------------------------------------------------------------


def write_perfetto(trace: Trace, path: Path, steps: tuple[int, int] | None = None) -> int:
    """Write a trace for Perfetto and Chrome, compressed if the name ends in .gz; return events."""
    spans = trace.spans if steps is None else spans_between(trace, steps)
    opened: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8") as out:
        return _write_events(out, _events(trace, spans))


def _write_events(out: IO[str], events: Iterator[dict[str, Any]]) -> int:
    """Write events one by one: a long run has more than fit into memory as objects."""
    out.write('{"displayTimeUnit":"ms","traceEvents":[')
    count = 0
    for event in events:
        out.write(",\n" if count else "\n")
        out.write(json.dumps(event, separators=(",", ":")))
        count += 1
    out.write("\n]}\n")
    return count


def _events(trace: Trace, spans: Rows) -> Iterator[dict[str, Any]]:
    for process in trace.processes:
        yield from _names(process)
    for row in spans:
        yield _span(trace, row)
    yield from _arrows(spans)
    low = int(spans["start_ns"].min()) if len(spans) else 0
    high = int((spans["start_ns"] + spans["duration_ns"]).max()) if len(spans) else 0
    for process in trace.processes:
        yield from _curves(process, low, high)


def _names(process: Process) -> Iterator[dict[str, Any]]:
    named = {"name": f"rank {process.rank} {process.role} ({process.host}, {process.pid})"}
    # Processes of a rank beside each other, the training process first.
    order = {"sort_index": process.rank * 1000 + (0 if process.role == "train" else process.number)}
    yield _meta("process_name", process.number, named)
    yield _meta("process_sort_index", process.number, order)
    for thread, name in process.threads.items():
        yield _meta("thread_name", process.number, {"name": name}, thread)


def _meta(name: str, process: int, args: dict[str, Any], thread: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": args}


def _span(trace: Trace, row: Any) -> dict[str, Any]:
    name = _KINDS.get(int(row["kind"]), "unknown")
    args: dict[str, Any] = {c: int(row[c]) for c in _SHOWN if row[c] not in (0, -1)}
    args |= {c: int(row[c]) for c in _PLACES if row[c] != -1}
    for column in ("object", "source"):
        if row[column]:
            args[column] = trace.name_of(int(row[column]))
    if row["flags"]:
        args["flags"] = [f.name.lower() for f in Flag if f and f & int(row["flags"]) and f.name]
    return {
        "ph": "X",
        "name": name,
        "cat": name,
        "pid": int(row["process"]),
        "tid": int(row["thread"]),
        "ts": int(row["start_ns"]) / 1e3,
        "dur": int(row["duration_ns"]) / 1e3,
        "args": args,
    }


def _arrows(spans: Rows) -> Iterator[dict[str, Any]]:
    """Yield the two ends of an arrow for each batch: from its end to the `next` that took it."""
    taken = {
        (int(row["rank"]), int(row["epoch"]), int(row["step"])): row
        for row in spans[(spans["kind"] == Kind.NEXT) & (spans["flags"] & Flag.RESIDENT == 0)]
    }
    number = 0
    for row in spans[spans["kind"] == Kind.JOIN]:
        end = taken.get((int(row["rank"]), int(row["epoch"]), int(row["step"])))
        if end is None:
            continue
        number += 1
        made_ns = int(row["start_ns"] + row["duration_ns"])
        # An arrow ends inside of the span that it points to.
        taken_ns = max(made_ns, int(end["start_ns"] + end["duration_ns"]) - 1)
        yield _arrow("s", number, row, made_ns)
        yield {**_arrow("f", number, end, taken_ns), "bp": "e"}


def _arrow(phase: str, number: int, row: Any, at_ns: int) -> dict[str, Any]:
    return {
        "ph": phase,
        "id": number,
        "name": "batch",
        "cat": "batch",
        "pid": int(row["process"]),
        "tid": int(row["thread"]),
        "ts": at_ns / 1e3,
    }


def _curves(process: Process, low_ns: int, high_ns: int) -> Iterator[dict[str, Any]]:
    before: dict[str, tuple[int, float]] = {}
    for at_ns, values in process.counters:
        for name, value in values.items():
            shown, label = value, name
            if name.startswith(_CUMULATIVE):
                last = before.get(name)
                before[name] = at_ns, value
                if last is None or at_ns <= last[0]:
                    continue
                shown = (value - last[1]) / ((at_ns - last[0]) / 1e9)
                label = f"{name}/s"
            if low_ns <= at_ns <= high_ns:
                yield {
                    "ph": "C",
                    "name": label,
                    "pid": process.number,
                    "ts": at_ns / 1e3,
                    "args": {"value": shown},
                }


# -- tables ----------------------------------------------------------------------------------


def arrow_table(trace: Trace, steps: tuple[int, int] | None = None) -> Any:
    """Return a row for each span as an Arrow table; names are dictionary columns."""
    pyarrow = _pyarrow()
    spans = trace.spans if steps is None else spans_between(trace, steps)
    columns: dict[str, Any] = {}
    kinds = np.array([_KINDS.get(number, f"kind {number}") for number in range(256)])
    roles = [process.role for process in trace.processes]
    for name in SPAN.names or ():
        numbers = spans[name]
        if name == "kind":
            columns[name] = _dictionary(pyarrow, np.minimum(numbers, 255), kinds.tolist())
        elif name in ("object", "source"):
            columns[name] = _dictionary(pyarrow, numbers, list(trace.names))
        else:
            columns[name] = pyarrow.array(np.ascontiguousarray(numbers))
    columns["role"] = _dictionary(pyarrow, spans["process"], roles)
    about = {"penstock.start_ns": str(trace.start_ns), "penstock.clocks": trace.clocks.how}
    return pyarrow.table(columns).replace_schema_metadata(about)


def _dictionary(pyarrow: Any, numbers: Any, texts: list[str]) -> Any:
    """Return texts by their numbers; only those that occur are in the dictionary."""
    used, places = np.unique(numbers, return_inverse=True)
    chosen = pyarrow.array([texts[number] for number in used.tolist()], pyarrow.string())
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array(places.astype(np.int32)), chosen)


def counters_table(trace: Trace) -> Any:
    """Return a row for each counter of each process, as an Arrow table."""
    rows = [
        (process.rank, process.number, process.role, at_ns, name, value)
        for process in trace.processes
        for at_ns, values in process.counters
        for name, value in values.items()
    ]
    names = ("rank", "process", "role", "at_ns", "counter", "value")
    columns = list(zip(*rows, strict=True)) if rows else [() for _ in names]
    return _pyarrow().table(dict(zip(names, map(list, columns), strict=True)))


def write_arrow(trace: Trace, path: Path, steps: tuple[int, int] | None = None) -> int:
    """Write the spans as an Arrow file (Feather 2); return how many there are."""
    feather = _pyarrow("feather")
    table = arrow_table(trace, steps)
    feather.write_feather(table, path, compression="zstd")
    return int(table.num_rows)


def write_parquet(trace: Trace, folder: Path, steps: tuple[int, int] | None = None) -> int:
    """Write spans.parquet, counters.parquet and facts.json; return how many spans there are."""
    parquet = _pyarrow("parquet")
    table = arrow_table(trace, steps)
    folder.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, folder / "spans.parquet", compression="zstd")
    parquet.write_table(counters_table(trace), folder / "counters.parquet", compression="zstd")
    facts = {str(rank): trace.facts(rank) for rank in trace.ranks}
    (folder / "facts.json").write_text(json.dumps(facts, indent=1, default=str))
    return int(table.num_rows)


def _pyarrow(module: str = "") -> Any:
    try:
        import pyarrow

        if not module:
            return pyarrow
        return __import__(f"pyarrow.{module}", fromlist=[module])
    except ImportError:
        raise OptionError(
            "tables are written with pyarrow, which is not installed; install it with "
            "pip install 'penstock[parquet]'"
        ) from None
