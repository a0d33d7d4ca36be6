"""A torch profile with the loader's work in it: engine, workers, fetches, on the same clock.

torch.profiler sees only the process that it runs in, with `penstock.next` and `penstock.copy` as
ranges. The work of other processes is in the trace of the run. Both have clocks that can be
matched: a profile counts microseconds from the time of day `baseTimeNanoseconds` on, and a trace
has the time of day at which its clock began.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import OptionError
from penstock.trace import Kind, Process, Trace, read_trace
from penstock.trace.chunks import Rows

_IN_PROFILE = [int(kind) for kind in (Kind.NEXT, Kind.LAUNCH, Kind.COPY, Kind.MARK)]
"""Spans that the profiler sees itself, or that are not the loader's."""
_TRACKS_FROM = 1_000_000_000
"""Above all thread ids, so that our tracks never mix with those of torch."""


def merge_profile(
    profile: str | Path, run: str | Path, out: str | Path | None = None, *, rank: int | None = None
) -> Path:
    """Add the loader's spans to what `prof.export_chrome_trace(profile)` has written.

    `run` is the folder of the loader's `trace=`. Spans of the profile's own rank are added, as far
    as they overlap the time that was profiled. The result goes to `out`, by default beside the
    profile as `….penstock.json`, and is returned; open it in Perfetto or chrome://tracing.
    """
    source = Path(profile)
    data = json.loads(_read(source))
    events: list[dict[str, Any]] = data.get("traceEvents", [])
    timed = [event for event in events if event.get("ph") == "X"]
    if not timed:
        raise OptionError(
            f"{source} has no events; write it with prof.export_chrome_trace after the profiler "
            "has stopped"
        )
    trace = read_trace(run)
    rank = _rank_of(timed, trace, source) if rank is None else rank
    # Older releases of torch count from 1970 on, without this key.
    base_ns = int(data.get("baseTimeNanoseconds", 0))
    # Subtracted as integers: of their 19 digits a float would lose the last ones.
    offset_ns = trace.start_ns - base_ns
    begin_us = min(event["ts"] for event in timed)
    end_us = max(event["ts"] + event.get("dur", 0) for event in timed)
    spans = trace.spans[(trace.spans["rank"] == rank) & ~np.isin(trace.spans["kind"], _IN_PROFILE)]
    starts_us = (spans["start_ns"] + offset_ns) / 1e3
    seen = (starts_us < end_us) & (starts_us + spans["duration_ns"] / 1e3 > begin_us)
    events += _events(trace, spans[seen], offset_ns)
    target = source.with_suffix(".penstock.json") if out is None else Path(out)
    text = json.dumps(data).encode()
    target.write_bytes(gzip.compress(text) if target.suffix == ".gz" else text)
    return target


def _read(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise OptionError(f"there is no profile {path}") from None
    return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data


def _rank_of(timed: list[dict[str, Any]], trace: Trace, source: Path) -> int:
    pids = {event["pid"] for event in timed}
    ranks = {process.rank for process in trace.processes if process.pid in pids}
    if len(ranks) != 1:
        raise OptionError(
            f"{source} is of processes {sorted(map(str, pids))}, and {len(ranks)} ranks of the "
            f"run in {trace.folder} have one of them; say which with rank="
        )
    return ranks.pop()


def _events(trace: Trace, spans: Rows, offset_ns: int) -> Iterator[dict[str, Any]]:
    """Yield the events of spans: tracks by process and thread, with no overlap on a track."""
    tracks = count(_TRACKS_FROM)
    for number in np.unique(spans["process"]).tolist():
        process = trace.processes[number]
        of_process = spans[spans["process"] == number]
        if process.role != "train":
            name = f"penstock {process.role}, rank {process.rank}"
            yield _about("process_name", process.pid, 0, name)
        for thread in np.unique(of_process["thread"]).tolist():
            of_thread = of_process[of_process["thread"] == thread]
            name = process.threads.get(thread, f"thread {thread}")
            for lane in _lanes(of_thread):
                track = next(tracks)
                yield _about("thread_name", process.pid, track, f"penstock: {name}")
                for span in of_thread[lane]:
                    yield _event(trace, process, span, track, offset_ns)


def _lanes(spans: Rows) -> list[list[int]]:
    """Return places of spans, sorted by start, in as few lanes without overlap as it takes."""
    lanes: list[list[int]] = []
    ends: list[int] = []
    starts_ns, durations_ns = spans["start_ns"].tolist(), spans["duration_ns"].tolist()
    for place, (start_ns, duration_ns) in enumerate(zip(starts_ns, durations_ns, strict=True)):
        lane = next((n for n, end_ns in enumerate(ends) if end_ns <= start_ns), len(lanes))
        if lane == len(lanes):
            lanes.append([])
            ends.append(0)
        lanes[lane].append(place)
        ends[lane] = start_ns + duration_ns
    return lanes


def _about(what: str, pid: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": track, "args": {"name": name}}


def _event(trace: Trace, process: Process, span: Any, track: int, offset_ns: int) -> dict[str, Any]:
    facts = {
        "object": trace.name_of(span["object"]),
        "source": trace.name_of(span["source"]),
        "offset": int(span["offset"]) if span["offset"] >= 0 else None,
        "bytes": int(span["size_bytes"]) or None,
        "samples": int(span["count"]) or None,
    }
    return {
        "ph": "X",
        "cat": "penstock",
        "name": f"penstock.{Kind(int(span['kind'])).name.lower()}",
        "pid": process.pid,
        "tid": track,
        "ts": (int(span["start_ns"]) + offset_ns) / 1e3,
        "dur": int(span["duration_ns"]) / 1e3,
        "args": {name: value for name, value in facts.items() if value},
    }
