"""A page of results: the chart and the table in one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from penstock.simulate.chart import chart_svg, title_of
from penstock.simulate.result import Result
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

_STYLE = """
:root{color-scheme:light dark;--line:#d8dee4;--dim:#57606a;--back:#fff;--text:#1b1f24}
@media (prefers-color-scheme:dark){:root{--line:#30363d;--dim:#9198a1;--back:#0d1117;
--text:#e6edf3}}
body{background:var(--back);color:var(--text);font:14px/1.5 system-ui,sans-serif;max-width:60rem;
margin:2rem auto;padding:0 1rem}svg{max-width:100%;height:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .6rem;text-align:right;border-bottom:1px solid var(--line)}
th:first-child,td:first-child{text-align:left}th{color:var(--dim);font-weight:500}
tr.ours td{font-weight:600}.dim{color:var(--dim)}
"""


def row_of(result: Result) -> list[str]:
    """Return a result as words, one for each of `COLUMNS`.

    >>> row_of(Result(policy="ours", nodes=4, cache_share=0.5, why_not="no tier"))
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


def page_html(results: Sequence[Result], title: str) -> str:
    """Return the page."""
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width">'
        f"<style>{_STYLE}</style>\n<h1>{escape(title)}</h1>\n{chart_svg(results, title)}"
        f"<table>\n<tr>{head}</tr>\n{''.join(map(_row, results))}</table>\n"
        f'<p class="dim">{escape(LEGEND)}</p></html>\n'
    )


def _row(result: Result) -> str:
    cells = row_of(result)
    if result.why_not:
        rest = f'<td colspan="{len(COLUMNS) - 3}" class="dim">{escape(result.why_not)}</td>'
        return "<tr>" + "".join(f"<td>{escape(c)}</td>" for c in cells[:3]) + rest + "</tr>\n"
    kind = ' class="ours"' if result.policy == "ours" else ""
    return f"<tr{kind}>" + "".join(f"<td>{escape(c)}</td>" for c in cells) + "</tr>\n"
