"""A page of results: charts and the table in one HTML file that needs no other file.

One point of a sweep is drawn as bars, several points as lines over nodes or over capacity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.report.charts import (
    ACCENT,
    MUTED,
    Axis,
    BarChart,
    Bars,
    Chart,
    Line,
    LineChart,
    Page,
    PageSection,
    PageTable,
    Prose,
    page_html,
)
from penstock.simulate.policies import POLICIES
from penstock.simulate.result import PolicyResult
from penstock.units import show_bytes

COLUMNS = (
    "policy", "nodes", "cache", "time", "×bound", "stall", "store", "×least", "local", "peers",
    "seen",
)  # fmt: skip

LEGEND = (
    "×bound: time over computing alone. stall: share of the time that is not computing. store: "
    "bytes read from the store; ×least: over the fewest that any cache of this capacity must read. "
    "local, peers: shares of all bytes moved. seen: samples used at least once."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlottedMeasure:
    """The number of a result that a chart shows."""

    axis: Axis
    """Name and unit of the number."""
    of: Callable[[PolicyResult], float]
    """Returns the number of a result."""
    least: Callable[[PolicyResult], float] | None = None
    """Returns the least possible number, for a line of its own; None: no such line."""


OVER_COMPUTING = PlottedMeasure(
    axis=Axis(name="time over computing alone", log=True), of=lambda r: r.time_ratio
)


def results_html(
    results: Sequence[PolicyResult], title: str, measure: PlottedMeasure = OVER_COMPUTING
) -> str:
    """Return the page."""
    rows = [row_of(r)[:4] if r.why_not else row_of(r) for r in results]
    ours = [number for number, r in enumerate(results) if r.policy == "ours"]
    table = PageTable(head=COLUMNS, rows=rows, strong=ours)
    charts = results_charts(results, measure)
    sections = [
        PageSection(title="Times", parts=charts),
        PageSection(title="Results", parts=[table, Prose(text=LEGEND, kind="dim")]),
    ]
    return page_html(Page(title=title, sections=sections))


def results_charts(
    results: Sequence[PolicyResult], measure: PlottedMeasure = OVER_COMPUTING
) -> list[Chart]:
    """Return bars of one point, or lines of a sweep: a chart for each of `panels_of`."""
    shown = [r for r in results if not r.why_not]
    if not shown:
        return []
    if len({(r.nodes, round(r.cache_share, 3)) for r in shown}) == 1:
        return [_bars(shown, measure)]
    by_nodes = len({r.nodes for r in shown}) > 1
    names = list(dict.fromkeys(r.policy for r in results if r.policy != "ours"))
    x = Axis(name="nodes", log=True) if by_nodes else Axis(name="cache over data set", unit="share")
    return [
        LineChart(
            title=panel or f"By {x.name}",
            reading="Lower is better; a policy has the same colour in all charts.",
            x=x,
            y=measure.axis,
            lines=_lines(part, measure, names, by_nodes=by_nodes),
        )
        for panel, part in panels_of(shown)
    ]


def panels_of(results: Sequence[PolicyResult]) -> list[tuple[str, list[PolicyResult]]]:
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


def row_of(result: PolicyResult) -> list[str]:
    """Return a result as words, one for each of `COLUMNS`.

    >>> row_of(PolicyResult(policy="ours", nodes=4, cache_share=0.5, why_not="no tier"))
    ['Penstock', '4', '50%', 'no tier', '', '', '', '', '', '', '']
    """
    first = [title_of(result.policy), str(result.nodes), f"{result.cache_share:.0%}"]
    if result.why_not:
        return [*first, result.why_not, *[""] * (len(COLUMNS) - 4)]
    moved = max(1.0, result.local_bytes + result.peer_bytes + result.store_bytes)
    return [
        *first,
        f"{result.time_s:,.0f} s" if result.time_s >= 100 else f"{result.time_s:.3g} s",
        f"{result.time_ratio:.2f}",
        f"{max(0.0, result.stall_share):.0%}",
        show_bytes(result.store_bytes),
        f"{result.byte_ratio:.2f}",
        f"{result.local_bytes / moved:.0%}",
        f"{result.peer_bytes / moved:.0%}",
        f"{result.visited_share:.0%}",
    ]


def _bars(results: Sequence[PolicyResult], measure: PlottedMeasure) -> BarChart:
    return BarChart(
        title=measure.axis.name,
        reading="Shorter is better.",
        category=Axis(name="policy"),
        categories=[title_of(r.policy) for r in results],
        value=measure.axis,
        bars=[Bars(name=measure.axis.name, values=[measure.of(r) for r in results])],
        is_horizontal=True,
        has_labels=True,
        highlighted=[number for number, r in enumerate(results) if r.policy == "ours"],
    )


def _lines(
    results: Sequence[PolicyResult],
    measure: PlottedMeasure,
    names: Sequence[str],
    *,
    by_nodes: bool,
) -> list[Line]:
    """Return the lines of one chart; a policy has the same colour in all of them."""
    points: dict[str, dict[float, float]] = {}
    least: dict[float, float] = {}
    for r in results:
        x = float(r.nodes) if by_nodes else r.cache_share
        points.setdefault(r.policy, {})[x] = measure.of(r)
        if measure.least is not None:
            least[x] = measure.least(r)
    out = [
        _line(title_of(name), some, names.index(name) if name in names else ACCENT)
        for name, some in points.items()
    ]
    return [*out, _line("the least possible", least, MUTED)] if least else out


def _line(name: str, points: dict[float, float], colour: int) -> Line:
    places = sorted(points)
    return Line(name=name, x=places, y=[points[x] for x in places], colour=colour)
