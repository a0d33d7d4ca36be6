"""The access pattern as a picture: where in the data set each read lies, against time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.report.analysis.values import Analysis, Floats, Ints, SlowObject
from penstock.report.charts import Axis, PageSection, PageTable, Part, Points, ScatterChart
from penstock.report.pages.words import percent
from penstock.trace import Kind, Trace
from penstock.trace.chunks import Rows
from penstock.units import show_bytes, show_count, show_seconds

READS = (Kind.FETCH, Kind.TIER_READ, Kind.PEER_REQUEST, Kind.READ)
_SLOW_MIN = 1.5
"""Objects whose reads take this many times as long as others' are named."""
_SLOW_SHARE = 0.01
"""… if this share of the run is spent in them."""
_SLOW_MAX = 10
_RANKS_MAX = 16
"""Groups of points with a colour of their own; further ranks share the last one."""


def access_section(analysis: Analysis, trace: Trace) -> PageSection | None:
    """Return where ranks read, and in which pattern."""
    parts: list[Part] = []
    chart = access_chart(trace, since_s=float(analysis.timeline.edges_s[0]))
    if chart is not None:
        parts.append(chart)
    if analysis.patterns:
        parts.append(_patterns(analysis))
    slow = [
        one
        for one in analysis.sharing.slowest[:_SLOW_MAX]
        if one.slowdown >= _SLOW_MIN and one.busy_s >= _SLOW_SHARE * analysis.wall_s
    ]
    if slow:
        parts.append(_slowest(slow))
    return PageSection(title="Access pattern", parts=parts) if parts else None


def access_chart(trace: Trace, *, since_s: float = 0.0) -> ScatterChart | None:
    """Return every read since a time as a point: when, and where in the data set."""
    reads = trace.of(*READS)
    reads = reads[(reads["size_bytes"] > 0) & (reads["start_ns"] >= since_s * 1e9)]
    known = reads["offset"] >= 0
    hidden = "" if known.all() else f" {percent(1 - known.mean())} of reads name no place."
    reads = reads[known]
    if not len(reads):
        return None
    places = positions(reads, trace.names)
    times = reads["start_ns"] / 1e9
    ranks = np.unique(reads["rank"])
    groups = []
    for number, rank in enumerate(ranks[:_RANKS_MAX].tolist()):
        is_last = number == _RANKS_MAX - 1 and len(ranks) > _RANKS_MAX
        chosen = reads["rank"] >= rank if is_last else reads["rank"] == rank
        name = f"ranks {rank} and up" if is_last else f"rank {rank}"
        groups.append(Points(name=name, x=times[chosen], y=places[chosen]))
    return ScatterChart(
        title="Where reads lie",
        reading=(
            "All files or objects lie one above the other. A cloud is a global shuffle, a band a "
            f"shuffle inside of shards, a line a sequential read. Drag to zoom.{hidden}"
        ),
        x=Axis(name="time since the start", unit="s"),
        y=Axis(name="position in the data set", unit="bytes"),
        points=groups,
    )


def positions(reads: Rows, names: Sequence[str]) -> Floats:
    """Return where reads lie if all objects were one after the other, in the order of names.

    Numbers of objects are given when they are first read: by them every first epoch would look
    sequential.
    """
    objects, places = np.unique(reads["object"], return_inverse=True)
    ends: Ints = np.zeros(len(objects), np.int64)
    np.maximum.at(ends, places, reads["offset"] + reads["size_bytes"])
    order = sorted(range(len(objects)), key=lambda at: names[int(objects[at])])
    starts: Ints = np.zeros(len(objects), np.int64)
    starts[order[1:]] = np.cumsum(ends[order])[:-1]
    found: Floats = (starts[places] + reads["offset"]).astype(np.float64)
    return found


def _patterns(analysis: Analysis) -> PageTable:
    rows = [
        [
            str(p.rank),
            p.label,
            f"{100 * p.sequential:.0f} / {100 * p.strided:.0f} / {100 * p.random:.0f} %",
            show_count(p.num_requests),
            show_bytes(p.size_p50),
            f"{p.requests_per_sample:.2g}",
            f"{p.opens_per_sample:.2g}",
            f"{p.concurrency_mean:.1f}",
            percent(p.reuse),
        ]
        for p in analysis.patterns[:64]
    ]
    head = [
        "Rank", "Pattern", "Sequential / strided / random", "Requests", "Median size",
        "Per sample", "Opens", "In flight", "Read before",
    ]  # fmt: skip
    return PageTable(head=head, rows=rows, left=(0, 1))


def _slowest(found: list[SlowObject]) -> PageTable:
    rows = [
        [slow.name, show_count(slow.num_requests), show_bytes(slow.read_bytes),
         show_seconds(slow.busy_s), f"{slow.slowdown:.1f}"]
        for slow in found
    ]  # fmt: skip
    head = [
        "Slow files or objects",
        "Requests",
        "Bytes",
        "Time in requests",
        "Times slower than others",
    ]
    return PageTable(head=head, rows=rows)
