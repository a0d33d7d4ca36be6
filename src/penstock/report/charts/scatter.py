"""Points: up to a million in one chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.report.charts.axes import Axis
from penstock.report.charts.columns import Numbers, check_lengths, column_spec, floats_of

POINTS_MAX = 1_000_000
"""Points of a chart: they take about 3.5 MB of a page that may have 5 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """One group of points."""

    name: str
    """What the legend says."""
    x: Numbers
    """Places."""
    y: Numbers
    """Values."""
    colour: int | None = None
    """Number in the palette; by default the number of the group."""

    def __post_init__(self) -> None:
        check_lengths(f"points {self.name!r}", x=self.x, y=self.y)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScatterChart:
    """Points that can be zoomed in both directions.

    A chart with more than `points_max` points shows one of every few and says so.
    """

    title: str
    """What is drawn."""
    reading: str
    """One sentence: what to see here."""
    x: Axis
    """What places mean."""
    y: Axis
    """What values mean."""
    points: Sequence[Points]
    """At least one group."""
    points_max: int = POINTS_MAX
    """Points that are shown; a page with several such charts divides a million among them."""
    is_half: bool = False
    """Whether two such charts stand side by side where the page is wide."""

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError(f"chart {self.title!r} has no points")
        if not 1 <= self.points_max <= POINTS_MAX:
            raise ValueError(
                f"chart {self.title!r} shows {self.points_max:,} points; a page has room for 1 to "
                f"{POINTS_MAX:,}"
            )

    @property
    def every(self) -> int:
        """One of so many points is shown."""
        return -(-self.num_points // self.points_max) or 1

    @property
    def num_points(self) -> int:
        """Points of all groups."""
        return sum(len(group.x) for group in self.points)

    def spec(self) -> dict[str, Any]:
        """Return the chart as the page's script reads it."""
        return {
            "kind": "scatter",
            "x": self.x.spec(),
            "y": self.y.spec(),
            "points": [self._group_spec(group) for group in self.points],
        }

    def _group_spec(self, group: Points) -> dict[str, Any]:
        # Points are drawn in any order, and a sorted column is a fraction of the size.
        x = floats_of(group.x)
        kept = np.argsort(x, kind="stable")[:: self.every]
        return {
            "name": group.name,
            "x": column_spec(x[kept], log=self.x.log),
            "y": column_spec(floats_of(group.y)[kept], log=self.y.log),
            **({} if group.colour is None else {"colour": group.colour}),
        }

    def num_rows(self) -> int:
        """Return the rows of the chart's table."""
        return self.num_points

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the chart's numbers as a head and rows: a row for each point."""
        rows = [
            [group.name, self.x.text(float(x)), self.y.text(float(y))]
            for group in self.points
            for x, y in zip(group.x, group.y, strict=True)
        ]
        return ["", self.x.name, self.y.name], rows
