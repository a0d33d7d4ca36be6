"""Pages: one HTML document with the plotting library, the data and the words inside.

Everything that a caller gives is text and is escaped; only `Prose` reads one mark, the backtick,
for code. A chart's data lies in a JSON block, where `<` is written as an escape so that no name can
end the block.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib import resources
from typing import Literal, TypeAlias

from penstock.report.charts.bars import BarChart
from penstock.report.charts.heat_map import HeatMap
from penstock.report.charts.lanes import LaneChart
from penstock.report.charts.lines import LineChart
from penstock.report.charts.scatter import ScatterChart

Chart: TypeAlias = LineChart | BarChart | ScatterChart | HeatMap | LaneChart

_TABLE_ROWS_MAX = 200
"""Rows of the table below a chart; a longer one would be larger than the chart's data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prose:
    """A paragraph; words between backticks are code."""

    text: str
    """What it says; a blank line begins a new paragraph."""
    kind: Literal["plain", "verdict", "dim"] = "plain"
    """"verdict" stands out, "dim" stands back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """A table of texts."""

    head: Sequence[str]
    """Names of the columns."""
    rows: Sequence[Sequence[str]]
    """A text for each column; a shorter row fills the rest of the line with its last text."""
    left: Sequence[int] = (0,)
    """Columns of words; all others are of numbers and end at the right. -1 is the last one."""
    strong: Sequence[int] = ()
    """Rows that stand out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Large numbers in a row, each with its meaning."""

    tiles: Sequence[tuple[str, str]]
    """A number and its meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Text in columns of equal letters: a program, a command, a list of ids."""

    text: str
    """As it is, with its line ends."""
    is_wrapped: bool = False
    """Whether long lines are broken; else they can be scrolled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Parts that are shown when the reader asks for them; they are always printed."""

    summary: str
    """What the reader clicks."""
    parts: Sequence[Prose | PageTable | Tiles | Listing]
    """What appears; charts need a width when they are drawn, so there are none here."""


Part: TypeAlias = Prose | PageTable | Tiles | Listing | Fold | Chart


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSection:
    """A heading with what stands below it; the contents of the page link to it."""

    title: str
    """The heading."""
    parts: Sequence[Part]
    """From the top down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A document."""

    title: str
    """The heading of the page, and its name in the browser."""
    sections: Sequence[PageSection]
    """From the top down."""
    lead: str = ""
    """A sentence below the title."""


def page_html(page: Page) -> str:
    """Return a page as one document that needs nothing else."""
    charts: list[Chart] = []
    body = "\n".join(_section(s, number, charts) for number, s in enumerate(page.sections))
    specs = "\n".join(_spec(chart, number) for number, chart in enumerate(charts))
    # A page without charts has only the script of its theme.
    library = f"<script>{_web('echarts.min.js')}</script>\n" if charts else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(page.title)}</title>"
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<style>{_web('page.css')}</style></head>\n<body>\n"
        '<button id="theme" type="button" hidden></button>\n'
        f"<header><h1>{escape(page.title)}</h1>{_lead(page.lead)}</header>\n"
        f"{_contents(page.sections)}<main>\n{body}\n</main>\n"
        f"{specs}\n{library}<script>{_web('charts.js')}</script>\n</body></html>\n"
    )


@cache
def _web(name: str) -> str:
    return (resources.files("penstock.report.charts") / "web" / name).read_text(encoding="utf-8")


def _lead(text: str) -> str:
    return f'<p class="dim">{_inline(text)}</p>' if text else ""


def _contents(sections: Sequence[PageSection]) -> str:
    if len(sections) < 3:
        return ""
    links = "".join(f'<a href="#s{n}">{escape(s.title)}</a>' for n, s in enumerate(sections))
    return f'<nav aria-label="Contents">{links}</nav>\n'


def _section(section: PageSection, number: int, charts: list[Chart]) -> str:
    parts = "\n".join(_part(part, charts) for part in section.parts)
    return (
        f'<section id="s{number}"><h2>{escape(section.title)}</h2>\n'
        f'<div class="parts">\n{parts}\n</div></section>'
    )


def _part(part: Part, charts: list[Chart]) -> str:
    match part:
        case Prose():
            paragraphs = re.split(r"\n\s*\n", part.text.strip())
            return "".join(f'<p class="{part.kind}">{_inline(text)}</p>' for text in paragraphs)
        case PageTable():
            return _table(part)
        case Tiles():
            tiles = "".join(
                f'<div class="tile"><b>{escape(number)}</b><span>{escape(said)}</span></div>'
                for number, said in part.tiles
            )
            return f'<div class="tiles">{tiles}</div>'
        case Listing():
            kind = ' class="wrapped"' if part.is_wrapped else ""
            return f"<pre{kind}>{escape(part.text)}</pre>"
        case Fold():
            inside = "\n".join(_part(one, charts) for one in part.parts)
            return f"<details><summary>{escape(part.summary)}</summary>{inside}</details>"
        case _:
            charts.append(part)
            return _figure(part, len(charts) - 1)


def _inline(text: str) -> str:
    """Return text with code between backticks marked.

    >>> _inline("use `a<b>` & go")
    'use <code>a&lt;b&gt;</code> &amp; go'
    """
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _table(table: PageTable) -> str:
    count = len(table.head)
    words = {column % count for column in table.left} if count else set()

    def line(cells: Sequence[str], tag: str, kind: str = "") -> str:
        out = []
        for number, cell in enumerate(cells):
            fills = number == len(cells) - 1 and len(cells) < count
            css = ' class="left"' if number in words or fills else ""
            span = f' colspan="{count - number}"' if fills else ""
            out.append(f"<{tag}{css}{span}>{_inline(cell)}</{tag}>")
        return f"<tr{kind}>{''.join(out)}</tr>\n"

    rows = "".join(
        line(row, "td", ' class="strong"' if number in table.strong else "")
        for number, row in enumerate(table.rows)
    )
    head = line(table.head, "th")
    return f'<div class="scroll"><table><thead>{head}</thead>\n<tbody>{rows}</tbody></table></div>'


def _figure(chart: Chart, number: int) -> str:
    kind = ' class="half"' if chart.is_half else ""
    more = _inline(chart.reading)
    if isinstance(chart, ScatterChart) and chart.every > 1:
        more += f" One of every {chart.every} points is shown, of {chart.num_points:,}."
    return (
        f'<figure{kind}><h3>{escape(chart.title)}</h3><p class="reading">{more}</p>'
        f'<div class="legend"></div><div class="chart" id="chart{number}" role="img" '
        f'aria-label="{escape(f"{chart.title}. {chart.reading}")}">'
        "<noscript>This chart is drawn by JavaScript, which is off.</noscript></div>"
        f"{_numbers(chart)}</figure>"
    )


def _numbers(chart: Chart) -> str:
    """Return a small chart's data as a table, for readers who do not see or run the chart."""
    if chart.num_rows() > _TABLE_ROWS_MAX:
        return ""
    head, rows = chart.table()
    left = (0, 1, 2) if isinstance(chart, LaneChart) else (0,)
    table = _table(PageTable(head=head, rows=rows, left=left))
    return f'<details class="numbers"><summary>The numbers</summary>{table}</details>'


def _spec(chart: Chart, number: int) -> str:
    text = json.dumps(chart.spec(), separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    # Inside of a script element only "<" can end it or begin a comment.
    inside = text.replace("<", "\\u003c")
    return f'<script type="application/json" data-chart="{number}">{inside}</script>'
