"""Plots of the importance report, as SVG inside of a page: bars, and lines by window.

Written by hand, no package. Colours are variables of the page, which follows the reader's light or
dark theme; lines also differ in their dashes. Each mark has its numbers as a tooltip.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 440, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 428, 26, 184
_LABELS_MAX = 8
"""Labels below an axis; with more they would touch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a plot."""

    name: str
    values: Sequence[float | None]
    """None where there is nothing to draw."""
    kind: str = "first"
    """Its class: "first" or "second"."""


def bars_svg(
    values: Sequence[float],
    labels: Sequence[tuple[float, str]],
    tips: Sequence[str],
    *,
    axes: tuple[str, str],
    is_share: bool = False,
    mark: float | None = None,
) -> str:
    """Return bars side by side.

    Labels stand at places that are counted in bars: 0 is the left edge of the first, 0.5 its
    middle. `mark` is a place for an upright line.
    """
    wide = (_RIGHT - _LEFT) / len(values)
    ticks = [0, 0.25, 0.5, 0.75, 1.0] if is_share else round_ticks(max(*values, 4))
    out = list(_frame(ticks, axes, is_share=is_share))
    gap = min(6.0, wide * 0.15)
    for number, (value, tip) in enumerate(zip(values, tips, strict=True)):
        y = _y(value, ticks[-1])
        if value > 0:
            y = min(y, _BOTTOM - 1.0)  # A bar that is not empty can be seen.
        x = _LEFT + number * wide
        out.append(
            f'<rect class="bar" x="{x + gap / 2:.1f}" y="{y:.1f}" width="{wide - gap:.1f}" '
            f'height="{_BOTTOM - y:.1f}">{_tip(tip)}</rect>'
        )
    for place, text in labels:
        out.append(_text(_LEFT + place * wide, _BOTTOM + 17, text, "middle"))
    if mark is not None:
        x = _LEFT + mark * wide
        out.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_BOTTOM}"/>')
    return _document(out)


def lines_svg(
    windows: Sequence[int],
    lines: Sequence[Line],
    is_plain: Sequence[bool],
    *,
    axes: tuple[str, str],
    most: float = 1.0,
) -> str:
    """Return lines over windows; those that were plain are shaded."""
    count = len(windows)
    step = (_RIGHT - _LEFT) / count
    out = []
    for number, shaded in enumerate(is_plain):
        if shaded:
            x = _LEFT + number * step
            out.append(
                f'<rect class="plain" x="{x:.1f}" y="{_TOP}" width="{step + 0.2:.1f}" '
                f'height="{_BOTTOM - _TOP}"/>'
            )
    out += _frame([0, most / 4, most / 2, 3 * most / 4, most], axes, is_share=True)
    every = math.ceil(count / _LABELS_MAX)
    for number in range(0, count, every):
        x = _LEFT + (number + 0.5) * step
        out.append(_text(x, _BOTTOM + 17, str(windows[number]), "middle"))
    for number, line in enumerate(lines):
        out += _drawn(line, windows, step, most)
        if len(lines) > 1:
            out += _legend(line, number)
    return _document(out)


def _drawn(line: Line, windows: Sequence[int], step: float, most: float) -> Iterator[str]:
    """Yield a line that is interrupted where values are missing, and its points."""
    run: list[str] = []
    dots: list[str] = []
    for number, value in enumerate([*line.values, None]):
        if value is not None:
            x, y = _LEFT + (number + 0.5) * step, _y(value, most)
            run.append(f"{x:.1f},{y:.1f}")
            tip = _tip(f"window {windows[number]}: {line.name} {value:.1%}")
            dots.append(
                f'<circle class="{line.kind}" cx="{x:.1f}" cy="{y:.1f}" r="3">{tip}</circle>'
            )
        elif run:
            yield f'<polyline class="{line.kind}" points="{" ".join(run)}"/>'
            run = []
    yield from dots


def _legend(line: Line, number: int) -> list[str]:
    x = _LEFT + 8 + number * 180
    return [
        f'<line class="{line.kind}" x1="{x}" x2="{x + 24}" y1="10" y2="10"/>',
        f'<circle class="{line.kind}" cx="{x + 12}" cy="10" r="3"/>',
        _text(x + 30, 14, line.name),
    ]


def _frame(ticks: Sequence[float], axes: tuple[str, str], *, is_share: bool) -> Iterator[str]:
    for tick in ticks:
        y = _y(tick, ticks[-1])
        kind = "axis" if tick == 0 else "grid"
        yield f'<line class="{kind}" x1="{_LEFT}" x2="{_RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield _text(_LEFT - 7, y + 4, _tick_text(tick, is_share=is_share), "end")
    yield _text((_LEFT + _RIGHT) / 2, _HEIGHT - 8, axes[0], "middle")
    if axes[1]:
        middle = (_TOP + _BOTTOM) / 2
        turned = f'transform="translate(11 {middle:.0f}) rotate(-90)"'
        yield f'<text text-anchor="middle" {turned}>{escape(axes[1])}</text>'


def _tick_text(tick: float, *, is_share: bool) -> str:
    """Return a number that fits beside an axis.

    >>> _tick_text(0.125, is_share=True), _tick_text(20_000, is_share=False)
    ('12.5%', '20k')
    """
    if is_share:
        return f"{100 * tick:.3g}%"
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if tick >= size:
            return f"{tick / size:.3g}{unit}"
    return f"{tick:g}"


def round_ticks(most: float) -> list[float]:
    """Return up to five round numbers, from 0 to at least the largest value.

    >>> round_ticks(37), round_ticks(1.3)
    ([0, 10, 20, 30, 40], [0.0, 0.5, 1.0, 1.5])
    """
    size = 10.0 ** math.floor(math.log10(most / 4))
    step = next(f * size for f in (1, 2, 5, 10) if f * size >= most / 4 * 0.999)
    step = int(step) if step >= 1 else step
    return [number * step for number in range(math.ceil(most / step * 0.999) + 1)]


def _y(value: float, most: float) -> float:
    return _BOTTOM - (_BOTTOM - _TOP) * min(1.0, value / most)


def _tip(text: str) -> str:
    return f"<title>{escape(text)}</title>"


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _document(parts: Sequence[str]) -> str:
    inside = "\n".join(parts)
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">\n{inside}\n</svg>'
