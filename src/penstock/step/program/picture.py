"""Pictures of lanes: the tasks of each lane in time, before and after a rewrite.

All timelines of a page have one scale, so lengths can be compared. `perfetto_json` writes the same
as a trace that Perfetto opens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.report.charts import (
    Axis,
    Fold,
    LaneChart,
    LaneSpans,
    Listing,
    Mark,
    Page,
    PageSection,
    page_html,
)
from penstock.step.program.explain import Explanation
from penstock.step.program.plan import COMPUTE, COPY, DECODE, FETCH, IO
from penstock.step.program.timeline import Span, Timeline
from penstock.units import show_bytes, show_seconds

__all__ = ["Picture", "perfetto_json", "picture_chart", "picture_html"]

_KINDS = {
    "compute": "computation",
    "call": "the user's functions",
    "move": "communication",
    "fused": "communication with computation",
    "load": "input and output",
    "fetch": "fetching",
    "decode": "decoding",
    "copy": "copying to the device",
}
"""By kind of task: its name in the legend; its place is the number of its colour."""
_ROOM = 1.02
"""Width of the chart in longest steps: the mark at the end of a step is inside."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A timeline and its name."""

    name: str
    timeline: Timeline

    @property
    def window_s(self) -> float:
        """How long the step is."""
        return self.timeline.step_s


def picture_html(
    pictures: Sequence[Picture], title: str, explained: Sequence[Explanation] = ()
) -> str:
    """Return a page with the lanes of each timeline, and the explanations in words below them."""
    longest_s = max((p.window_s for p in pictures), default=0.0) or 1e-9
    charts = [picture_chart(picture, _ROOM * longest_s) for picture in pictures]
    words = [
        Fold(summary=f"{picture.name}, in words", parts=[Listing(text=str(explanation))])
        for picture, explanation in zip(pictures, explained, strict=False)
    ]
    section = PageSection(title="Lanes", parts=[*charts, *words])
    return page_html(Page(title=title, sections=[section]))


def picture_chart(picture: Picture, longest_s: float) -> LaneChart:
    """Return the lanes of a timeline on an axis of so many seconds."""
    timeline = picture.timeline
    lanes = _sorted_lanes(timeline.plan.lanes)
    kinds: dict[tuple[str, bool], list[Span]] = {}
    for span in timeline.shown:
        kinds.setdefault((_kind(span), _is_ahead(span, timeline)), []).append(span)
    order = list(_KINDS)
    return LaneChart(
        title=picture.name,
        reading=_says(timeline),
        x=Axis(name="time", unit="s", low=0.0, high=longest_s),
        lanes=lanes,
        spans=[
            _spans(kind, kinds[kind], timeline, lanes)
            for kind in sorted(kinds, key=lambda kind: (order.index(kind[0]), kind[1]))
        ],
        marks=[Mark(label="end of the step", x=timeline.step_s)],
    )


def _spans(
    kind: tuple[str, bool], spans: Sequence[Span], timeline: Timeline, lanes: Sequence[str]
) -> LaneSpans:
    start_s, end_s = timeline.window
    name, is_ahead = kind
    return LaneSpans(
        name=_KINDS[name] + (" for the next step" if is_ahead else ""),
        lanes=[lanes.index(span.task.lane) for span in spans],
        starts=[max(span.start_s, start_s) - start_s for span in spans],
        ends=[min(span.end_s, end_s) - start_s for span in spans],
        labels=[span.task.name for span in spans],
        notes=[_note(span) for span in spans],
        is_faint=is_ahead,
        colour=list(_KINDS).index(name),
    )


def _note(span: Span) -> str:
    """Return the rest of a task's tooltip, after its name and its time."""
    words = []
    if span.task.sent_bytes:
        words.append(f"{show_bytes(span.task.sent_bytes)} sent")
    if span.task.ahead:
        words.append(f"{span.task.ahead} step ahead")
    if len(span.task.nodes) > 1:
        words.append(", ".join(span.task.nodes))
    return " · ".join(words)


def _sorted_lanes(lanes: Sequence[str]) -> list[str]:
    """Return lanes in order: computation, network, device, storage."""
    last = ("", COPY, DECODE, FETCH, IO)
    places = {lane: last.index(lane) if lane in last else 0 for lane in lanes}
    return sorted(lanes, key=lambda lane: (lane != COMPUTE, places[lane], lane))


def _says(timeline: Timeline) -> str:
    words = [f"{show_seconds(timeline.step_s)} a step"]
    sent_bytes = sum(timeline.plan.sent_bytes().values())
    if sent_bytes:
        words.append(f"{show_bytes(sent_bytes)} sent by a rank")
    if timeline.communication_s:
        words.append(f"{show_seconds(timeline.exposed_s)} of communication waited for")
    if timeline.load_lanes:
        words.append(f"{show_seconds(timeline.alone_s(*timeline.load_lanes))} of loads")
    return " · ".join(words)


def _kind(span: Span) -> str:
    alike = {"store": "load", "bucket": "move", "ring": "fused"}
    return alike.get(span.task.kind, span.task.kind)


def _is_ahead(span: Span, timeline: Timeline) -> bool:
    """Whether a task belongs to a step that is not the one shown."""
    return span.task.ahead > 0 and span.step > len(timeline.ends_s) - 1


def perfetto_json(pictures: Sequence[Picture]) -> str:
    """Return the timelines as a Chrome trace: a process for each, a thread for each lane."""
    events: list[dict[str, Any]] = []
    for pid, picture in enumerate(pictures):
        events.append(_named("process_name", pid, 0, picture.name))
        lanes = _sorted_lanes(picture.timeline.plan.lanes)
        events += [_named("thread_name", pid, tid, lane) for tid, lane in enumerate(lanes)]
        for span in picture.timeline.spans:
            facts = {"step": span.step, "nodes": list(span.task.nodes)}
            facts |= {"sent_bytes": span.task.sent_bytes} if span.task.sent_bytes else {}
            events.append(
                {
                    "name": span.task.name,
                    "cat": span.task.kind,
                    "ph": "X",
                    "pid": pid,
                    "tid": lanes.index(span.task.lane),
                    "ts": span.start_s * 1e6,
                    "dur": span.seconds * 1e6,
                    "args": facts,
                }
            )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
