"""How much of a run its trace holds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

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
        process_read_bytes=_process_read_bytes(trace, span),
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


def _process_read_bytes(trace: Trace, span: tuple[int, int]) -> int:
    """Return what the kernel counted, of all processes of the job."""
    rises = [rise_of(s, "io.rchar", span) for s in counter_series(trace).values()]
    return int(sum(rise for rise in rises if rise is not None))


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
