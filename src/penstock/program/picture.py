"""Pictures of lanes: what each lane does when, before and after a rewrite, one below the other.

SVG and HTML are written by hand and need nothing else; colours follow the reader's light or dark
theme, and mean nothing that the lanes and the names do not say.
All timelines of a picture have one scale: what is shorter is shorter on paper. `perfetto_json` has
the same in the form that Perfetto opens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from penstock.program.explain import Explanation
from penstock.program.plan import COMPUTE, COPY, DECODE, FETCH, IO
from penstock.program.timeline import Span, Timeline
from penstock.units import show_bytes, show_seconds

__all__ = ["Picture", "perfetto_json", "picture_html", "picture_svg"]

_WIDTH, _LEFT, _RIGHT = 920, 128, 24
_ROW, _GAP = 26, 7
_NAME_CHARS, _LANE_CHARS = 40, 17
"""What is longer is cut here, and whole where the mouse is."""
_BOLD, _PLAIN = 7.4, 6.3
"""How wide a letter is, at most and about."""
_NARROW = 0.35
"""Spans of one kind that stand together and are narrower than this many pixels become one."""
_KINDS = {
    "compute": ("computation", "#2f6f4f", "#5cb88a"),
    "call": ("the user's functions", "#4d7c0f", "#a3d14b"),
    "move": ("communication", "#0b6e99", "#4fb7e5"),
    "fused": ("communication with computation", "#7a4fbf", "#b795f2"),
    "load": ("input and output", "#b4451f", "#ff9a6b"),
    "fetch": ("fetching", "#9a3412", "#f9a26c"),
    "decode": ("decoding", "#8a6100", "#e0b94f"),
    "copy": ("copying to the device", "#a0246a", "#f08cc0"),
}
"""By kind of task: what it is called, its colour on light and on dark."""
_STYLE = (
    ".bg{fill:#fff}text{font:12px system-ui,sans-serif;fill:#1b1f24}.dim{fill:#57606a}"
    ".title{font-size:15px;font-weight:600}.name{font-weight:600}.grid{stroke:#d8dee4}"
    ".row{fill:#f3f5f7}.end{stroke:#c1121f;stroke-dasharray:5 3}.in{fill:#fff;font-size:10.5px}"
)
_DARK = (
    ".bg{fill:#0d1117}text{fill:#e6edf3}.dim{fill:#9198a1}.grid{stroke:#30363d}"
    ":root{--edge:#0d1117}.row{fill:#161b22}.end{stroke:#ff6b76}.in{fill:#0d1117}"
)
_PAGE = """
:root{color-scheme:light dark;--dim:#57606a;--back:#fff;--text:#1b1f24}
@media (prefers-color-scheme:dark){:root{--dim:#9198a1;--back:#0d1117;--text:#e6edf3}}
body{background:var(--back);color:var(--text);font:14px/1.5 system-ui,sans-serif;max-width:62rem;
margin:2rem auto;padding:0 1rem}svg{max-width:100%;height:auto}
pre{overflow-x:auto;font:12px/1.35 ui-monospace,monospace}summary{cursor:pointer;color:var(--dim)}
"""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One timeline with what it is called."""

    name: str
    timeline: Timeline

    @property
    def window_s(self) -> float:
        """How long the step is."""
        return self.timeline.step_s


def picture_svg(pictures: Sequence[Picture], title: str) -> str:
    """Return lanes of one or several timelines, one below the other, on one scale."""
    longest_s = max((p.window_s for p in pictures), default=0.0) or 1e-9
    scale = (_WIDTH - _LEFT - _RIGHT) / longest_s
    out = [_text(20, 28, title, "title")]
    y = 44.0
    for picture in pictures:
        out += _panel(picture, y, scale)
        y += _panel_height(picture)
    out += _axis(y, longest_s, scale)
    kinds = dict.fromkeys(_kind(s) for p in pictures for s in p.timeline.shown)
    legend, bottom = _legend(y + 34, list(kinds), any(map(_has_ahead, pictures)))
    return _document(out + legend, bottom + 26, title)


def _panel_height(picture: Picture) -> float:
    return 30.0 + len(picture.timeline.plan.lanes) * (_ROW + _GAP) + 14.0


def _panel(picture: Picture, top: float, scale: float) -> list[str]:
    timeline = picture.timeline
    start_s, end_s = timeline.window
    out = [_heading(picture, top + 16)]
    y = top + 28
    right = _LEFT + (end_s - start_s) * scale
    for lane in _sorted_lanes(timeline.plan.lanes):
        out.append(_text(_LEFT - 10, y + 17, lane, "dim", "end", most=_LANE_CHARS))
        out.append(
            f'<rect class="row" x="{_LEFT}" y="{y}" width="{_WIDTH - _LEFT - _RIGHT}" '
            f'height="{_ROW}" rx="3"/>'
        )
        spans = [s for s in timeline.shown if s.task.lane == lane]
        out += [_rect(run, y, start_s, end_s, scale) for run in _runs(spans, scale)]
        y += _ROW + _GAP
    out.append(
        f'<line class="end" x1="{right:.1f}" x2="{right:.1f}" y1="{top + 24}" y2="{y - _GAP + 3}"/>'
    )
    return out


def _heading(picture: Picture, y: float) -> str:
    """Return a name and its numbers, above the lanes or where a long name ends."""
    name = _cut(picture.name, _NAME_CHARS)
    place = f'x="{_LEFT}"' if 20 + _BOLD * len(name) < _LEFT else 'dx="14"'
    return (
        f'<text x="20" y="{y:.1f}">{_hint(picture.name, name)}<tspan class="name">{escape(name)}'
        f'</tspan><tspan class="dim" {place}>{escape(_says(picture.timeline))}</tspan></text>'
    )


def _cut(words: str, most: int) -> str:
    """Return words of so many letters at most; what is left out is in the middle.

    >>> _cut("net:data_parallel:gather", 11)
    'net:d…ather'
    """
    half = (most - 1) // 2
    return words if len(words) <= most else f"{words[:half]}…{words[-half:]}"


def _hint(words: str, shown: str) -> str:
    return "" if words == shown else f"<title>{escape(words)}</title>"


def _sorted_lanes(lanes: Sequence[str]) -> list[str]:
    """Return lanes from what computes to what is far away."""
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


def _has_ahead(picture: Picture) -> bool:
    return any(_is_ahead(span, picture.timeline) for span in picture.timeline.shown)


def _runs(spans: Sequence[Span], scale: float) -> Iterator[list[Span]]:
    """Yield spans, those too narrow to be told apart together."""
    run: list[Span] = []
    for span in sorted(spans, key=lambda s: s.start_s):
        is_narrow = span.seconds * scale < _NARROW
        joins = run and is_narrow and _kind(span) == _kind(run[-1])
        if joins and (span.start_s - run[-1].end_s) * scale < _NARROW:
            run.append(span)
            continue
        if run:
            yield run
        run = [span]
    if run:
        yield run


def _rect(run: list[Span], y: float, start_s: float, end_s: float, scale: float) -> str:
    span = run[0]
    left = _LEFT + (max(span.start_s, start_s) - start_s) * scale
    wide = max(0.6, (min(run[-1].end_s, end_s) - max(span.start_s, start_s)) * scale)
    # Neighbours of one kind are told apart by a thin edge and by turns of shade.
    shade = " odd" if (span.task.chunk or 0) % 2 else ""
    ahead = " ahead" if span.task.ahead else ""
    rect = (
        f'<rect class="k-{_kind(span)}{shade}{ahead}" x="{left:.2f}" y="{y}" width="{wide:.2f}" '
        f'height="{_ROW}" rx="{min(2.0, wide / 4):.1f}">'
        f"<title>{escape(_hover(run))}</title></rect>"
    )
    label = span.task.name if len(run) == 1 else ""
    if len(label) * _PLAIN + 8 > wide:
        return rect
    return rect + _text(left + 5, y + 17, label, "in")


def _hover(run: list[Span]) -> str:
    span = run[0]
    if len(run) > 1:
        return f"{len(run)} short tasks from {span.task.name} to {run[-1].task.name}"
    words = [span.task.name, show_seconds(span.seconds)]
    if span.task.sent_bytes:
        words.append(f"{show_bytes(span.task.sent_bytes)} sent")
    if span.task.ahead:
        words.append(f"{span.task.ahead} step ahead")
    if len(span.task.nodes) > 1:
        words.append(", ".join(span.task.nodes))
    return " · ".join(words)


def _axis(y: float, longest_s: float, scale: float) -> list[str]:
    step = _nice(longest_s / 8)
    out = []
    for number in range(int(longest_s / step + 1e-9) + 1):
        x = _LEFT + number * step * scale
        out.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 8}" y2="{y - 2}"/>')
        shown = show_seconds(number * step) if number else "0"
        out.append(_text(x, y + 12, shown, "dim", "middle"))
    return out


def _nice(value: float) -> float:
    """Return a round number that is not smaller.

    >>> [_nice(x) for x in (0.7, 1.2, 3.1, 60)]
    [1.0, 2.0, 5.0, 100.0]
    """
    power: float = 10.0 ** math.floor(math.log10(value))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= value * (1 - 1e-9))


def _legend(y: float, kinds: Sequence[str], has_ahead: bool) -> tuple[list[str], float]:
    """Return what colours mean, in as many lines as it needs, and where the last one is."""
    out, x = [], float(_LEFT)
    shown = [(f"k-{kind}", _KINDS[kind][0]) for kind in _KINDS if kind in kinds]
    if has_ahead:
        shown.append(("k-move ahead", "for the next step"))
    for css, words in shown:
        wide = 20 + _PLAIN * len(words)
        if x + wide > _WIDTH - _RIGHT and x > _LEFT:
            x, y = float(_LEFT), y + 18
        out.append(f'<rect class="{css}" x="{x}" y="{y - 10}" width="14" height="12" rx="2"/>')
        out.append(_text(x + 20, y, words, "dim"))
        x += 24 + wide
    return out, y


def _text(
    x: float, y: float, words: str, css: str = "", anchor: str = "start", *, most: int = 10_000
) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}"'
    kind = f' class="{css}"' if css else ""
    turned = f' text-anchor="{anchor}"' if anchor != "start" else ""
    shown = _cut(words, most)
    return f"<text {where}{kind}{turned}>{_hint(words, shown)}{escape(shown)}</text>"


def _document(parts: Sequence[str], height: float, title: str) -> str:
    light = "".join(f".k-{kind}{{fill:{look[1]}}}" for kind, look in _KINDS.items())
    dark = "".join(f".k-{kind}{{fill:{look[2]}}}" for kind, look in _KINDS.items())
    more = (
        "rect[class^=k-]{stroke:var(--edge,#fff);stroke-width:.4}.odd{fill-opacity:.78}"
        ".ahead{fill-opacity:.45;stroke-dasharray:3 2;stroke:currentColor;stroke-width:1}"
    )
    style = f"{_STYLE}{light}{more}@media(prefers-color-scheme:dark){{{_DARK}{dark}}}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" '
        f'width="{_WIDTH}" height="{height:.0f}" role="img" aria-label="{escape(title)}">'
        f'<style>{style}</style><rect class="bg" width="100%" height="100%"/>'
        + "\n".join(parts)
        + "</svg>\n"
    )


def picture_html(
    pictures: Sequence[Picture], title: str, explained: Sequence[Explanation] = ()
) -> str:
    """Return the picture and what is said of each timeline as one page that needs nothing else."""
    said = "".join(
        f"<details><summary>{escape(p.name)}, in words</summary>"
        f"<pre>{escape(str(e))}</pre></details>\n"
        for p, e in zip(pictures, explained, strict=False)
    )
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width">'
        f"<style>{_PAGE}</style>\n{picture_svg(pictures, title)}{said}</html>\n"
    )


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
