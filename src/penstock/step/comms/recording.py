"""Collectives in the trace of a run, from when they begin to when they are done.

Lanes of the host know both times. For a GPU the host knows only when it has launched something:
torch.profiler has the device's times, and nothing is recorded here.
"""

from __future__ import annotations

import time

from penstock.trace.recorder import recorder_here
from penstock.trace.schema import Kind

__all__ = ["begun_ns", "record_collective", "record_step"]


def begun_ns() -> int:
    """Return the time, for `record_collective`; 0 if nothing is recorded."""
    return 0 if recorder_here() is None else time.perf_counter_ns()


def record_collective(name: str, since_ns: int) -> None:
    """Record a collective that ends now."""
    recorder = recorder_here() if since_ns else None
    if recorder is not None:
        recorder.span(
            Kind.COMMUNICATE, since_ns, time.perf_counter_ns(), object_id=recorder.name(name)
        )


def record_step(since_ns: int) -> int:
    """Record a step that ends now, if its beginning is known; return the time."""
    recorder = recorder_here()
    if recorder is None:
        return 0
    now_ns = time.perf_counter_ns()
    if since_ns:
        recorder.span(Kind.STEP, since_ns, now_ns)
    return now_ns
