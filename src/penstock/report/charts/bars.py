"""Bars: one group for each category."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.report.charts.axes import Axis, Mark
from penstock.report.charts.columns import Numbers, check_lengths, column_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """One bar in each category."""

    name: str
    """What the legend says."""
    values: Numbers
    """A number for each category; NaN draws nothing."""
    colour: int | None = None
    """Number in the palette; by default the number of the series."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BarChart:
    """Groups of bars."""

    title: str
    """What is drawn."""
    reading: str
    """One sentence: what to see here."""
    category: Axis
    """What categories are; only its name is used."""
    categories: Sequence[str]
    """Their names."""
    value: Axis
    """What lengths mean."""
    bars: Sequence[Bars]
    """At least one."""
    is_stacked: bool = False
    """Whether bars of a category stand on each other; else they stand side by side."""
    is_horizontal: bool = False
    """Whether bars lie: better for long names."""
    has_labels: bool = False
    """Whether each bar has its number at its end."""
    highlighted: Sequence[int] = ()
    """Numbers of the categories that stand out in colour."""
    marks: Sequence[Mark] = ()
    """Dashed lines at values (`y`), across all bars."""
    is_half: bool = False
    """Whether two such charts stand side by side where the page is wide."""

    def __post_init__(self) -> None:
        if not self.bars:
            raise ValueError(f"chart {self.title!r} has no bars")
        if any(mark.y is None for mark in self.marks):
            raise ValueError(f"chart {self.title!r}: marks of bars are at values, give y")
        for bars in self.bars:
            where = f"chart {self.title!r}, bars {bars.name!r}"
            check_lengths(where, categories=self.categories, values=bars.values)

    def spec(self) -> dict[str, Any]:
        """Return the chart as the page's script reads it."""
        return {
            "kind": "bars",
            "category": self.category.spec(),
            "categories": list(self.categories),
            "value": self.value.spec(),
            "bars": [
                {"name": b.name, "values": column_spec(b.values, log=self.value.log)}
                | ({} if b.colour is None else {"colour": b.colour})
                for b in self.bars
            ],
            "is_stacked": self.is_stacked,
            "is_horizontal": self.is_horizontal,
            "has_labels": self.has_labels,
            "highlighted": list(self.highlighted),
            "marks": [mark.spec() for mark in self.marks],
        }

    def num_rows(self) -> int:
        """Return the rows of the chart's table."""
        return len(self.categories)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the chart's numbers as a head and rows: a row for each category."""
        head = [self.category.name, *(b.name for b in self.bars)]
        columns = [[self.value.text(float(v)) for v in b.values] for b in self.bars]
        return head, [list(row) for row in zip(self.categories, *columns, strict=True)]
