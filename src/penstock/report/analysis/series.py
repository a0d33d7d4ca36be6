"""Quantities over time, and how they spread."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.report.analysis.loops import TrainingLoop
from penstock.report.analysis.sources import SourceNames
from penstock.report.analysis.sweep import JoinedIntervals
from penstock.report.analysis.values import Distribution, Floats, Ints, SourceTimeline, WaitMatrix
from penstock.trace.reading import Trace
from penstock.trace.schema import Kind

BINS = 200
"""Moments of a run that are told apart: a chart has no more columns that an eye can see."""
LEAD = 0.1
"""What is shown of the time before the loop, by the time of the loop."""
SPREAD_BINS = 48


def wait_matrix(loops: tuple[TrainingLoop, ...]) -> WaitMatrix:
    """Return which share of each moment each rank waited for batches."""
    begin = min(int(loop.ask_ns[0]) for loop in loops)
    end = max(int(loop.end_ns[-1]) for loop in loops)
    edges = np.linspace(begin, max(end, begin + BINS), BINS + 1).astype(np.int64)
    wait = [
        np.diff(JoinedIntervals(start_ns=loop.ask_ns, end_ns=loop.got_ns).place(edges))
        / np.diff(edges)
        for loop in loops
    ]
    return WaitMatrix(
        edges_s=edges / 1e9,
        ranks=tuple(loop.rank for loop in loops),
        wait=np.stack(wait),
        late=_late(loops, edges),
    )


def _late(loops: tuple[TrainingLoop, ...], edges: Ints) -> Floats:
    """Return how far each rank was behind the first one, in seconds, mean of each moment."""
    num = min(len(loop) for loop in loops)
    asks = np.stack([loop.ask_ns[:num] for loop in loops])
    behind = (asks - asks.min(axis=0)) / 1e9
    out = np.zeros((len(loops), len(edges) - 1))
    for i, (ask, late) in enumerate(zip(asks, behind, strict=True)):
        at = np.clip(np.searchsorted(edges, ask, side="right") - 1, 0, len(edges) - 2)
        count = np.bincount(at, minlength=len(edges) - 1)
        out[i] = np.bincount(at, late, len(edges) - 1) / np.maximum(1, count)
    return out


def source_timeline(
    reads: npt.NDArray[np.void], loops: tuple[TrainingLoop, ...], sources: SourceNames
) -> SourceTimeline:
    """Return bytes a second by source, requests in flight and samples a second."""
    ask = min(int(loop.ask_ns[0]) for loop in loops)
    end = max(int(loop.end_ns[-1]) for loop in loops)
    # A program may start for longer than its short run lasts: the run shall fill the picture.
    begin = max(min(0, ask), ask - round(LEAD * (end - ask)))
    ends = reads["start_ns"] + reads["duration_ns"]
    reads = reads[ends >= begin]
    ends = ends[ends >= begin]
    end = max(int(ends.max(initial=0)), end, begin + BINS)
    edges = np.linspace(begin, end, BINS + 1).astype(np.int64)
    width_s = float(np.diff(edges).mean()) / 1e9
    at = np.clip(np.searchsorted(edges, ends, side="left") - 1, 0, BINS - 1)
    of = sources.of(reads)
    bytes_s = {}
    for number, name in enumerate(sources.names):
        mine = of == number
        if mine.any():
            bytes_s[name] = np.bincount(at[mine], reads["size_bytes"][mine], BINS) / width_s
    samples = np.zeros(BINS)
    for loop in loops:
        real = ~loop.is_resident
        got = np.clip(np.searchsorted(edges, loop.got_ns[real], side="left") - 1, 0, BINS - 1)
        samples += np.bincount(got, loop.samples[real], BINS)
    return SourceTimeline(
        edges_s=edges / 1e9,
        bytes_s=bytes_s,
        in_flight=_in_flight(reads, ends, edges),
        samples_s=samples / width_s,
    )


def _in_flight(reads: npt.NDArray[np.void], ends: Ints, edges: Ints) -> Floats:
    """Return the mean number of requests in flight between edges.

    The time in flight before an edge is the sum over requests of how much of each lies before it:
    what began before, minus what of it is still to come.
    """
    starts, stops = np.sort(reads["start_ns"]), np.sort(ends)
    sum_starts = np.concatenate([[0], np.cumsum(starts, dtype=np.float64)])
    sum_stops = np.concatenate([[0], np.cumsum(stops, dtype=np.float64)])
    begun, over = np.searchsorted(starts, edges), np.searchsorted(stops, edges)
    before = (begun * edges - sum_starts[begun]) - (over * edges - sum_stops[over])
    mean: Floats = np.maximum(0.0, np.diff(before) / np.maximum(1, np.diff(edges)))
    return mean


def distributions_of(
    trace: Trace, reads: npt.NDArray[np.void], loops: tuple[TrainingLoop, ...], sources: SourceNames
) -> tuple[Distribution, ...]:
    """Return how sizes, latencies, waits and steps spread."""
    real = reads[reads["size_bytes"] > 0]
    found = [("request size", "B", real["size_bytes"].astype(float))]
    of = sources.of(real)
    for number, name in enumerate(sources.names):
        found.append((f"latency of {name}", "s", real["duration_ns"][of == number] / 1e9))
    opens = trace.of(Kind.OPEN)
    found.append(("open", "s", opens["duration_ns"] / 1e9))
    kept = [~loop.is_resident for loop in loops]
    waits = [(x.got_ns - x.ask_ns)[k] / 1e9 for x, k in zip(loops, kept, strict=True)]
    steps = [(x.end_ns - x.ask_ns)[k] / 1e9 for x, k in zip(loops, kept, strict=True)]
    found += [("wait", "s", np.concatenate(waits)), ("step", "s", np.concatenate(steps))]
    made = trace.of(Kind.BATCH, Kind.DECODE)
    per = made["duration_ns"] / 1e9 / np.maximum(1, made["count"])
    found.append(("making a sample", "s", per))
    return tuple(_distribution(*one) for one in found if len(one[2]))


def _distribution(name: str, unit: str, values: Floats) -> Distribution:
    least = 1.0 if unit == "B" else 1e-6
    shown = np.maximum(values, least)
    low, high = np.log10(shown.min()), np.log10(shown.max())
    # Rounding must not leave the least and the largest value outside: many may be the same.
    edges = np.logspace(low - 1e-9, max(high, low + 0.1) + 1e-9, SPREAD_BINS + 1)
    counts, _ = np.histogram(shown, edges)
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return Distribution(
        name=name,
        unit=unit,
        edges=edges,
        counts=counts.astype(np.int64),
        p50=float(p50),
        p90=float(p90),
        p99=float(p99),
        maximum=float(values.max()),
    )
