"""Lines over numbers: courses, scaling curves with bands, stacked areas, distributions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from penstock.report.charts.axes import Axis, Mark
from penstock.report.charts.columns import Numbers, check_lengths, column_spec, floats_of

_BINS_MAX = 60
_ECDF_POINTS_MAX = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a chart."""

    name: str
    """What the legend says."""
    x: Numbers
    """Places, from left to right."""
    y: Numbers
    """Values; NaN interrupts the line."""
    low: Numbers | None = None
    """Lower edge of a band around the line, such as of a confidence interval."""
    high: Numbers | None = None
    """Upper edge of the band."""
    style: Literal["line", "step", "filled step", "points"] = "line"
    """"step" holds a value until the next place; "points" draws no line between them."""
    is_dashed: bool = False
    """Whether the line is dashed, as limits and predictions are."""
    colour: int | None = None
    """Number in the palette; by default the number of the line."""

    def __post_init__(self) -> None:
        check_lengths(f"line {self.name!r}", x=self.x, y=self.y, low=self.low, high=self.high)
        if (self.low is None) != (self.high is None):
            raise ValueError(f"line {self.name!r} has one edge of a band; give low and high")


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    """Lines over numbers; stacked, they become areas."""

    title: str
    """What is drawn."""
    reading: str
    """One sentence: what to see here."""
    x: Axis
    """What places mean."""
    y: Axis
    """What values mean."""
    lines: Sequence[Line]
    """At least one."""
    is_stacked: bool = False
    """Whether the areas of lines stand on each other; all lines then have the same places."""
    marks: Sequence[Mark] = ()
    """Dashed lines across the chart."""
    shaded: Sequence[tuple[float, float]] = ()
    """Ranges of x with a grey background."""
    is_half: bool = False
    """Whether two such charts stand side by side where the page is wide."""

    def __post_init__(self) -> None:
        if not self.lines:
            raise ValueError(f"chart {self.title!r} has no line")
        if self.is_stacked and any(len(li.x) != len(self.lines[0].x) for li in self.lines):
            raise ValueError(f"chart {self.title!r} stacks lines with different places")

    def spec(self) -> dict[str, Any]:
        """Return the chart as the page's script reads it."""
        return {
            "kind": "lines",
            "x": self.x.spec(),
            "y": self.y.spec(),
            "is_stacked": self.is_stacked,
            "lines": [self._line_spec(line) for line in self.lines],
            "marks": [mark.spec() for mark in self.marks],
            "shaded": [list(span) for span in self.shaded],
        }

    def _line_spec(self, line: Line) -> dict[str, Any]:
        columns = {"y": line.y, "low": line.low, "high": line.high}
        return {
            "name": line.name,
            "x": column_spec(line.x, log=self.x.log),
            **{
                key: column_spec(column, log=self.y.log)
                for key, column in columns.items()
                if column is not None
            },
            "style": line.style,
            "is_dashed": line.is_dashed,
            **({} if line.colour is None else {"colour": line.colour}),
        }

    def num_rows(self) -> int:
        """Return the rows of the chart's table."""
        return len({float(x) for line in self.lines for x in line.x})

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the chart's numbers as a head and rows: a row for each place."""
        cells: dict[float, dict[int, str]] = {}
        for number, line in enumerate(self.lines):
            for place, x in enumerate(line.x):
                text = self.y.text(float(line.y[place]))
                if line.low is not None and line.high is not None:
                    low, high = float(line.low[place]), float(line.high[place])
                    text += f" ({self.y.text(low)} to {self.y.text(high)})"
                cells.setdefault(float(x), {})[number] = text
        head = [self.x.name, *(line.name for line in self.lines)]
        rows = [
            [self.x.text(x), *(row.get(number, "") for number in range(len(self.lines)))]
            for x, row in sorted(cells.items())
        ]
        return head, rows


def histogram_line(name: str, values: Numbers, *, bins: int = 40, log: bool = False) -> Line:
    """Return how many values lie in each bin, as a filled step line.

    With `log`, bins have equal ratios, for an x axis that is logarithmic; values that are not
    positive are left out.

    >>> line = histogram_line("sizes", [1, 1, 10, 100, 1000], bins=3, log=True)
    >>> np.round(line.x), np.round(line.y)
    (array([   1.,   10.,  100., 1000.]), array([2., 1., 2., 0.]))
    """
    column = floats_of(values)
    column = column[np.isfinite(column) & ((column > 0) | (not log))]
    if not len(column):
        return Line(name=name, x=[], y=[], style="filled step")
    low, high = float(column.min()), float(column.max())
    if low == high:
        low, high = (low / 1.1, high * 1.1) if log else (low - 0.5, high + 0.5)
    bins = min(bins, _BINS_MAX)
    edges = np.geomspace(low, high, bins + 1) if log else np.linspace(low, high, bins + 1)
    counts, _ = np.histogram(np.clip(column, edges[0], edges[-1]), edges)
    return Line(name=name, x=edges, y=np.append(counts, 0.0), style="filled step")


def ecdf_line(name: str, values: Numbers, *, colour: int | None = None) -> Line:
    """Return the share of values that are at most x, thinned to a few hundred places.

    >>> line = ecdf_line("latency", [3.0, 1.0, 2.0, 2.0])
    >>> line.x, line.y
    (array([1., 2., 2., 3.]), array([0.25, 0.5 , 0.75, 1.  ]))
    """
    column = np.sort(floats_of(values))
    column = column[np.isfinite(column)]
    total = len(column)
    places = np.unique(np.linspace(0, total - 1, min(total, _ECDF_POINTS_MAX)).astype(int))
    shares = (places + 1) / max(1, total)
    return Line(name=name, x=column[places], y=shares, style="step", colour=colour)
