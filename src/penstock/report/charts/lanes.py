"""Spans in lanes: what each lane does when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.report.charts.axes import Axis, Mark
from penstock.report.charts.columns import Numbers, check_lengths, column_spec

_TIME_BITS = 32
"""A span's length is a difference of two places, and may be a millionth of the axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSpans:
    """Spans of one kind; a kind has a colour and a place in the legend."""

    name: str
    """What the legend says."""
    lanes: Sequence[int]
    """Number of the lane of each span."""
    starts: Numbers
    """Where spans begin."""
    ends: Numbers
    """Where they end."""
    labels: Sequence[str]
    """What stands in a span where it is wide enough."""
    notes: Sequence[str] = ()
    """More about each span, for the tooltip; none, or one for each."""
    is_faint: bool = False
    """Whether the spans are pale, as those that belong to another step are."""
    colour: int | None = None
    """Number in the palette; by default the number of the kind."""

    def __post_init__(self) -> None:
        check_lengths(
            f"spans {self.name!r}",
            lanes=self.lanes,
            starts=self.starts,
            ends=self.ends,
            labels=self.labels,
            notes=self.notes or None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneChart:
    """Lanes below each other over one axis, which can be zoomed."""

    title: str
    """What is drawn."""
    reading: str
    """One sentence: what to see here."""
    x: Axis
    """What places mean, mostly time."""
    lanes: Sequence[str]
    """Names, from the top down."""
    spans: Sequence[LaneSpans]
    """One entry for each kind."""
    marks: Sequence[Mark] = ()
    """Upright lines."""
    is_half: bool = False
    """Whether two such charts stand side by side where the page is wide."""

    def __post_init__(self) -> None:
        most = max((max(s.lanes, default=0) for s in self.spans), default=0)
        if most >= max(1, len(self.lanes)):
            raise ValueError(
                f"chart {self.title!r} has {len(self.lanes)} lanes and a span in lane {most}"
            )

    def spec(self) -> dict[str, Any]:
        """Return the chart as the page's script reads it."""
        return {
            "kind": "lanes",
            "x": self.x.spec(),
            "lanes": list(self.lanes),
            "spans": [
                {
                    "name": s.name,
                    "lanes": column_spec(s.lanes),
                    "starts": column_spec(s.starts, bits=_TIME_BITS),
                    "ends": column_spec(s.ends, bits=_TIME_BITS),
                    "labels": list(s.labels),
                    "notes": list(s.notes),
                    "is_faint": s.is_faint,
                    **({} if s.colour is None else {"colour": s.colour}),
                }
                for s in self.spans
            ],
            "marks": [mark.spec() for mark in self.marks],
        }

    def num_rows(self) -> int:
        """Return the rows of the chart's table."""
        return sum(len(s.starts) for s in self.spans)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the chart's numbers as a head and rows: a row for each span, by start."""
        spans = [
            (float(start), float(end), self.lanes[lane], label, s.name)
            for s in self.spans
            for lane, start, end, label in zip(s.lanes, s.starts, s.ends, s.labels, strict=True)
        ]
        rows = [
            [lane, label, kind, self.x.text(start), self.x.text(end)]
            for start, end, lane, label, kind in sorted(spans)
        ]
        return ["lane", "span", "kind", "from", "to"], rows
