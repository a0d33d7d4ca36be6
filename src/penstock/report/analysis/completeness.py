"""How much of a run its trace holds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.report.analysis.batches import same_processes
from penstock.report.analysis.load import counter_series, rise_of
from penstock.report.analysis.loops import TrainingLoop
from penstock.report.analysis.values import Completeness
from penstock.trace.reading import Trace
from penstock.trace.schema import Kind


def completeness_of(
    trace: Trace, reads: npt.NDArray[np.void], loops: tuple[TrainingLoop, ...]
) -> Completeness:
    """Return bytes delivered and bytes traced, rows that are missing, and what cannot be seen."""
    real = [~loop.is_resident for loop in loops]
    dropped: dict[str, int] = {}
    for process in trace.processes:
        for kind, count in process.dropped.items():
            dropped[kind.name] = dropped.get(kind.name, 0) + count
    span = min(int(x.ask_ns[0]) for x in loops), max(int(x.end_ns[-1]) for x in loops)
    # Importing modules reads as well: only the time of the training loop is compared.
    low, high = np.searchsorted(reads["start_ns"], span)
    files = reads[low:high]
    return Completeness(
        delivered_bytes=sum(int(x.size_bytes[r].sum()) for x, r in zip(loops, real, strict=True)),
        delivered_samples=sum(int(x.samples[r].sum()) for x, r in zip(loops, real, strict=True)),
        read_bytes=int(files["size_bytes"].sum()),
        **_compared(trace, reads),
        num_spans=len(trace.spans),
        dropped=dropped,
        num_damaged=trace.num_damaged,
        recorded_by=_recorded_by(trace),
        cannot_see=_cannot_see(trace),
        clock=trace.clocks.how,
        clock_error_s=max(
            (r.error_ns for found in trace.clocks.readings.values() for r in found), default=0
        )
        / 1e9,
    )


def _compared(trace: Trace, reads: npt.NDArray[np.void]) -> dict[str, int]:
    """Return what the kernel counted in processes that make batches, and the trace's part of it.

    Each process is compared from its second batch on: until then it imports modules, whose files
    are not recorded. A training process that only makes batches of a validation is left out for the
    same reason. Penstock's own rows need no such check, as they have its requests themselves.
    """
    same, batches = same_processes(trace), trace.of(Kind.BATCH)
    is_worker = np.array([p.role != "train" for p in trace.processes], bool)[batches["process"]]
    batches = batches[is_worker] if is_worker.any() else batches
    maker, reader = same[batches["process"]], same[reads["process"]]
    # Workers may begin anew in each epoch: a look at all reads for each of them would be too many.
    order = np.argsort(reader, kind="stable")
    of_process, starts = reader[order], reads["start_ns"][order]
    sizes = np.concatenate([[0], np.cumsum(reads["size_bytes"][order])])
    numbers = {(p.host, p.pid): int(same[p.number]) for p in trace.processes}
    counted = seen = 0
    for who, series in counter_series(trace).items():
        number = numbers.get(who, -1)
        begins = batches["start_ns"][maker == number]
        times = series.get("io.rchar", (np.zeros(0), np.zeros(0)))[0]
        times = times[times >= begins[1]] if len(begins) > 1 else times[:0]
        if len(times) < 2:
            continue
        span = float(times[0]), float(times[-1])
        first, last = np.searchsorted(of_process, [number, number + 1])
        low, high = first + np.searchsorted(starts[first:last], span)
        counted += int(rise_of(series, "io.rchar", span) or 0)
        seen += int(sizes[high] - sizes[low])
    return {"process_read_bytes": counted, "compared_bytes": seen}


def _recorded_by(trace: Trace) -> tuple[str, ...]:
    found = dict.fromkeys(
        how
        for process in trace.processes
        for how, used in (process.facts.get("tracing") or {}).items()
        if used is True
    )
    if len(trace.of(Kind.PLAN)):
        found["loader"] = None
    if any(process.role == "native" for process in trace.processes):
        found["preload"] = None
    return tuple(found)


def _cannot_see(trace: Trace) -> tuple[str, ...]:
    out: dict[str, None] = {}
    for process in trace.processes:
        for sentence in (process.facts.get("tracing") or {}).get("cannot_see") or ():
            out[str(sentence)] = None
    mapped = len(trace.of(Kind.MAP))
    if mapped:
        out[f"what is read through {mapped} mappings of files"] = None
    return tuple(out)
