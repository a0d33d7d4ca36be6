"""Charts and pages: values in, one HTML file out.

A page is a `Page` of `PageSection`s; a section holds parts, which are prose, tables, tiles,
listings, folds and charts. `page_html(page)` returns the whole document. It has the plotting
library (Apache ECharts) and all data inside, makes no request, follows the reader's light or dark
theme, and can be read on a phone and printed.

There are five charts. Each has a `title` and a `reading`: one sentence on what to see in it.

- `LineChart`: lines over numbers, with confidence bands, steps, stacked areas, marks and shades;
  `histogram_line` and `ecdf_line` turn a sample of values into such a line.
- `BarChart`: one group of bars for each category, side by side or stacked, upright or lying.
- `ScatterChart`: up to a million points in all, in one group for each rank or kind.
- `HeatMap`: a matrix of numbers, for example ranks by steps.
- `LaneChart`: spans in lanes over time.

All of them refuse columns of different lengths. Units belong to an `Axis`: "s", "bytes", "bytes/s"
and "share" are printed with prefixes (`250 ms`, `1.5 GB`, `25%`), any other unit as it is. The
`colour` of a series is a number in the palette, or `ACCENT` or `MUTED`.

>>> chart = LineChart(
...     title="Scaling", reading="Time falls until the store is full.",
...     x=Axis(name="nodes", log=True), y=Axis(name="epoch time", unit="s"),
...     lines=[Line(name="predicted", x=[1, 2, 4], y=[8, 4, 3], low=[7, 3, 2], high=[9, 5, 5])],
... )
>>> page = Page(title="Run 7", sections=[PageSection(title="Scaling", parts=[chart])])
>>> page_html(page).startswith("<!doctype html>")
True

Nothing here reads a file but `page_html`, which reads the packaged library. This room knows no
trace, no result and no program: the rooms above it turn these into charts.
"""

from penstock.report.charts.axes import ACCENT, MUTED, Axis, Mark
from penstock.report.charts.bars import BarChart, Bars
from penstock.report.charts.heat_map import HeatMap
from penstock.report.charts.lanes import LaneChart, LaneSpans
from penstock.report.charts.lines import Line, LineChart, ecdf_line, histogram_line
from penstock.report.charts.page import (
    Chart,
    Fold,
    Listing,
    Page,
    PageSection,
    PageTable,
    Part,
    Prose,
    Tiles,
    page_html,
)
from penstock.report.charts.scatter import Points, ScatterChart

__all__ = [
    "ACCENT",
    "Axis",
    "BarChart",
    "Bars",
    "Chart",
    "Fold",
    "HeatMap",
    "LaneChart",
    "LaneSpans",
    "Line",
    "LineChart",
    "Listing",
    "MUTED",
    "Mark",
    "Page",
    "PageSection",
    "PageTable",
    "Part",
    "Points",
    "Prose",
    "ScatterChart",
    "Tiles",
    "ecdf_line",
    "histogram_line",
    "page_html",
]
