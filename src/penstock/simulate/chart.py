"""Charts of results as SVG: bars for one point, lines for a sweep. Written by hand, no package.

Colours are classes and follow the reader's light or dark theme; every series also has a dash and a
mark of its own, so a chart can be read without colours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from penstock.simulate.policies import POLICIES
from penstock.simulate.result import Result

_WIDTH = 820
_LEFT, _RIGHT = 66, 210
_PANEL = 320
_OURS = ("#c1121f", "#ff6b76")
_COLOURS = (
    ("#0b6e99", "#4fb7e5"), ("#8a6d00", "#e6c229"), ("#7a4fbf", "#b795f2"), ("#b4451f", "#ff9a6b"),
    ("#9b2c6e", "#e87fbd"), ("#4d7c0f", "#a3d14b"), ("#5b6470", "#aab4c0"), ("#1d4ed8", "#7aa2ff"),
)  # fmt: skip
"""For light and for dark."""
_DASHES = ("", "7 3", "2 3", "9 3 2 3")
_TICKS = (1, 1.2, 1.5, 2, 3, 4, 5, 7, 10, 15, 20, 30, 50, 70, 100, 200, 500, 1000, 10_000)
_FAR_TICKS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 10_000)
"""For values below 1, or over more than two powers of ten."""
_STYLE = (
    ".bg{fill:#fff}text{font:12px system-ui,sans-serif;fill:#1b1f24}.dim{fill:#57606a}"
    ".title{font-size:15px;font-weight:600}.grid{stroke:#d8dee4}.axis{stroke:#57606a}"
)
_DARK = (
    ".bg{fill:#0d1117}text{fill:#e6edf3}.dim{fill:#9198a1}.grid{stroke:#30363d}"
    ".axis{stroke:#9198a1}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """What is drawn of a result."""

    axis: str
    """In words, for the axis."""
    of: Callable[[Result], float]
    least: Callable[[Result], float] | None = None
    """What no policy can go below, for a line of its own."""


OVER_COMPUTING = Measure(axis="time over computing alone", of=lambda r: r.time_ratio)
LATER_EPOCH = Measure(
    axis="seconds of an epoch after the first",
    of=lambda r: r.epoch_s[-1],
    least=lambda r: r.least_later_s,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line: a policy."""

    name: str
    colour: int
    """Number of its class; 0 is Penstock's own."""
    points: tuple[tuple[float, float], ...]


def chart_svg(results: Sequence[Result], title: str, measure: Measure = OVER_COMPUTING) -> str:
    """Return a chart of times: bars, or lines where something was swept."""
    shown = [r for r in results if not r.why_not]
    groups = panels_of(shown)
    if len({(r.nodes, round(r.cache_share, 3)) for r in shown}) <= 1:
        return _bars(shown, title, measure)
    by_nodes = len({r.nodes for r in shown}) > 1
    names = list(dict.fromkeys(r.policy for r in results if r.policy != "ours"))
    panels = [(name, _series(part, measure, names, by_nodes=by_nodes)) for name, part in groups]
    axes = ("nodes" if by_nodes else "cache over data set", measure.axis)
    return _lines(panels, title, axes)


def panels_of(results: Sequence[Result]) -> list[tuple[str, list[Result]]]:
    """Return results apart by capacity where both nodes and capacity were swept, else together."""
    nodes = {r.nodes for r in results}
    shares = sorted({round(r.cache_share, 3) for r in results})
    points = {(r.nodes, round(r.cache_share, 3)) for r in results}
    if len(nodes) == 1 or len(shares) == 1 or len(points) < len(nodes) * len(shares):
        return [("", list(results))]
    return [
        (
            f"cache {share:.0%} of the data set",
            [r for r in results if round(r.cache_share, 3) == share],
        )
        for share in shares
    ]


def title_of(policy: str) -> str:
    """Return a policy's name for people."""
    return POLICIES[policy].title if policy in POLICIES else policy


def _series(
    results: Sequence[Result], measure: Measure, names: Sequence[str], *, by_nodes: bool
) -> list[Series]:
    """Return the lines of one panel; a policy has the same colour in all of them."""
    points: dict[str, list[tuple[float, float]]] = {}
    least: dict[float, float] = {}
    for r in results:
        x = float(r.nodes) if by_nodes else r.cache_share
        points.setdefault(r.policy, []).append((x, measure.of(r)))
        if measure.least is not None:
            least[x] = measure.least(r)
    out = [
        Series(
            name=title_of(name),
            colour=1 + names.index(name) if name in names else 0,
            points=tuple(sorted(some)),
        )
        for name, some in points.items()
    ]
    if least:
        line = tuple(sorted(least.items()))
        out.append(Series(name="the least possible", colour=1 + len(names), points=line))
    return out


# -- bars ----------------------------------------------------------------------------------------


def _bars(results: Sequence[Result], title: str, measure: Measure) -> str:
    """Return a bar for each policy, from 1."""
    most = max((measure.of(r) for r in results), default=1.0)
    room = _WIDTH - _LEFT - 250
    scale = room / math.log(max(most, 1.5))
    height = 70 + 24 * len(results)
    out = [_text(20, 26, title, "title"), _text(20, 46, f"{measure.axis} (log scale)", "dim")]
    for number, r in enumerate(results):
        y = 62 + 24 * number
        ratio = measure.of(r)
        wide = max(2.0, math.log(max(ratio, 1.0)) * scale)
        kind = "c0" if r.policy == "ours" else "c1"
        out.append(_text(178, y + 13, title_of(r.policy), anchor="end"))
        out.append(f'<rect class="f{kind}" x="186" y="{y}" width="{wide:.1f}" height="17" rx="2"/>')
        out.append(_text(192 + wide, y + 13, f"{ratio:.2f}"))
    return _document(out, height, title)


# -- lines ---------------------------------------------------------------------------------------


def _lines(panels: Sequence[tuple[str, list[Series]]], title: str, axes: tuple[str, str]) -> str:
    values = [y for _, some in panels for one in some for _, y in one.points]
    ticks = _ticks_between(min(values), max(values))
    out = [_text(20, 26, title, "title")]
    for number, (name, some) in enumerate(panels):
        out += _panel(some, name, axes, ticks, top=44 + number * (_PANEL + 70))
    return _document(out, 44 + len(panels) * (_PANEL + 70), title)


def _panel(
    some: list[Series], name: str, axes: tuple[str, str], ticks: list[float], top: float
) -> list[str]:
    """Return one pair of axes with its lines and its legend."""
    xs = sorted({x for one in some for x, _ in one.points})
    right, bottom = _WIDTH - _RIGHT, top + 22 + _PANEL
    x_of = _scale(xs[0], xs[-1], _LEFT, right, log=xs[0] > 0 and xs[-1] >= 8 * xs[0])
    y_of = _scale(ticks[0], ticks[-1], bottom, top + 22, log=True)
    out = [_text(_LEFT, top + 10, name, "dim")] if name else []
    for tick in ticks:
        y = y_of(tick)
        out.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(_text(_LEFT - 8, y + 4, f"{tick:g}", "dim", "end"))
    out += [_text(x_of(x), bottom + 18, f"{x:g}", "dim", "middle") for x in xs]
    out.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    out.append(_text((_LEFT + right) / 2, bottom + 36, axes[0], "dim", "middle"))
    middle = (top + 22 + bottom) / 2
    turned = f"translate(18 {middle:.0f}) rotate(-90)"
    out.append(f'<text class="dim" text-anchor="middle" transform="{turned}">{axes[1]}</text>')
    for number, one in enumerate(some):
        out += _line(one, x_of, y_of)
        y = top + 30 + 18 * number
        out.append(_sample(one, right + 18, y))
        out.append(_text(right + 52, y + 4, one.name))
    return out


def _line(one: Series, x_of: Callable[[float], float], y_of: Callable[[float], float]) -> list[str]:
    places = [(x_of(x), y_of(y)) for x, y in one.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    marks = [_mark(one, x, y) for x, y in places]
    return [f'<polyline class="s{_kind(one)}" points="{path}"{_dash(one)}/>', *marks]


def _sample(one: Series, x: float, y: float) -> str:
    line = f'<line class="s{_kind(one)}" x1="{x}" x2="{x + 28}" y1="{y}" y2="{y}"{_dash(one)}/>'
    return line + _mark(one, x + 14, y)


def _mark(one: Series, x: float, y: float) -> str:
    shape = one.colour % 3
    kind = f'class="f{_kind(one)}"'
    if shape == 0:
        return f'<circle {kind} cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>'
    if shape == 1:
        return f'<rect {kind} x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6"/>'
    return f'<path {kind} d="M{x:.1f} {y - 4.5:.1f}l4.5 8h-9z"/>'


def _kind(one: Series) -> str:
    return f"c{0 if one.colour == 0 else 1 + (one.colour - 1) % len(_COLOURS)}"


def _dash(one: Series) -> str:
    dash = _DASHES[(one.colour // len(_COLOURS) + one.colour) % len(_DASHES)] if one.colour else ""
    return f' stroke-dasharray="{dash}"' if dash else ""


def _scale(
    low: float, high: float, start: float, stop: float, *, log: bool
) -> Callable[[float], float]:
    """Return the function from values to places."""
    f = math.log if log else float
    span = f(high) - f(low)
    return lambda value: start + (stop - start) * ((f(value) - f(low)) / span if span else 0.5)


def _ticks_between(low: float, high: float) -> list[float]:
    """Return round numbers that enclose all values, not too many.

    >>> _ticks_between(1.0, 3.4)
    [1, 1.2, 1.5, 2, 3, 4]
    >>> _ticks_between(0.32, 80.0)
    [0.3, 1, 3, 10, 30, 100]
    """
    ticks = _FAR_TICKS if low < 0.999 or high > 100 * low else _TICKS
    first = max((i for i, t in enumerate(ticks) if t <= low * 1.001), default=0)
    last = min((i for i, t in enumerate(ticks) if t >= high * 0.999), default=len(ticks) - 1)
    return [float(t) if t % 1 else int(t) for t in ticks[first : max(last, first + 1) + 1]]


# -- the document --------------------------------------------------------------------------------


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "") -> str:
    attributes = f' class="{kind}"' if kind else ""
    attributes += f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{escape(text)}</text>'


def _document(parts: list[str], height: float, title: str) -> str:
    pairs = [_OURS, *_COLOURS]
    light = "".join(_colour_rule(n, pair[0]) for n, pair in enumerate(pairs))
    dark = "".join(_colour_rule(n, pair[1]) for n, pair in enumerate(pairs))
    style = f"{_STYLE}{light}@media (prefers-color-scheme:dark){{{_DARK}{dark}}}"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" '
        f'width="{_WIDTH}" height="{height:.0f}" role="img">'
    )
    back = f'<rect class="bg" width="{_WIDTH}" height="{height:.0f}"/>'
    lines = [head, f"<title>{escape(title)}</title>", f"<style>{style}</style>", back, *parts]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _colour_rule(number: int, colour: str) -> str:
    wide = 3 if number == 0 else 1.8
    return (
        f".fc{number}{{fill:{colour}}}.sc{number}{{stroke:{colour};stroke-width:{wide};fill:none}}"
    )
