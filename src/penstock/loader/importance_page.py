"""The report of importance sampling: one HTML page that needs nothing else.

Each section is a function from a view to HTML, or to nothing where there is nothing to show. A new
number is one more line in `_tiles`, or one more section.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
import numpy.typing as npt

from penstock.dataset.part import Ints
from penstock.engine.cache_hits import CacheHits
from penstock.engine.draws_seen import DrawsSeen, WindowSeen
from penstock.loader.importance_plots import Line, bars_svg, lines_svg, round_ticks
from penstock.order.importance import ImportanceOrder, ScoreTable, WindowDraws
from penstock.order.importance.order import EFFECTIVE_MIN
from penstock.order.importance.scores import BY_LOSS
from penstock.units import show_count

_BINS = 40
_SUSPECTS_SHOWN = 500
_TIMES = ((0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 64), (65, 255))
"""How often a sample was scored, in groups."""
_DRIFT_TOPS = (0.1, 0.2, 0.4, 1.0)
_STYLE = """
:root{color-scheme:light dark;--back:#fff;--text:#1b1f24;--dim:#57606a;--line:#d8dee4;
--first:#c1121f;--second:#0b6e99;--bar:#0b6e99;--plain:#eef1f4;--card:#f6f8fa}
@media (prefers-color-scheme:dark){:root{--back:#0d1117;--text:#e6edf3;--dim:#9198a1;
--line:#30363d;--first:#ff6b76;--second:#4fb7e5;--bar:#4fb7e5;--plain:#1c222b;--card:#161b22}}
body{background:var(--back);color:var(--text);font:14px/1.5 system-ui,sans-serif;max-width:62rem;
margin:2rem auto;padding:0 1.2rem}
h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:2.2rem 0 .4rem}h3{font-size:.95rem;margin:0}
p{margin:.3rem 0}.dim,figcaption{color:var(--dim)}figcaption{font-size:.85rem}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.5rem,1fr));gap:.7rem;
margin:1.2rem 0}
.tile{background:var(--card);border:1px solid var(--line);border-radius:6px;padding:.6rem .8rem}
.tile b{display:block;font-size:1.35rem;font-weight:600}.tile span{color:var(--dim);
font-size:.85rem}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(24rem,100%),1fr));
gap:1.2rem 1.6rem}
figure{margin:0}svg{width:100%;height:auto;display:block}
svg text{font:11px system-ui,sans-serif;fill:var(--dim)}
.grid{stroke:var(--line)}.axis{stroke:var(--dim)}.bar{fill:var(--bar)}.plain{fill:var(--plain)}
.mark{stroke:var(--first);stroke-width:1.5;stroke-dasharray:4 3}
polyline{fill:none;stroke-width:2}polyline.first,line.first{stroke:var(--first)}
polyline.second,line.second{stroke:var(--second);stroke-dasharray:6 3}
circle.first{fill:var(--first)}circle.second{fill:var(--second)}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:.2rem .9rem .2rem 0;text-align:right;border-bottom:1px solid var(--line)}
th{color:var(--dim);font-weight:500}th.left,td.left{text-align:left}
.ids{font:12px/1.6 ui-monospace,monospace;background:var(--card);border:1px solid var(--line);
border-radius:6px;padding:.6rem .8rem;overflow-wrap:anywhere;max-height:12rem;overflow:auto}
.track{background:var(--plain);height:1rem;border-radius:3px;margin:.15rem 0 .6rem}
.track div{background:var(--bar);height:100%;border-radius:3px}summary{cursor:pointer}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceView:
    """What there is to show."""

    order: ImportanceOrder
    table: ScoreTable
    draws: DrawsSeen
    hits: CacheHits | None
    num_observed: int
    """Batches whose losses were reported."""
    hardest: Ints
    suspects: Ints
    next_draws: WindowDraws
    """What the next window would be, from all scores that are known."""


def page_html(view: ImportanceView) -> str:
    """Return the page."""
    title = "Importance sampling"
    order, options = view.order, view.order.options
    name = options.score if isinstance(options.score, str) else "a function"
    said = (
        f"{show_count(order.num_ids)} samples in windows of "
        f"{show_count(order.num_samples // order.num_windows)} draws · score {name} · floor "
        f"{options.floor:g} · {show_count(view.num_observed)} batches observed"
    )
    sections = (_tiles, _samples, _windows, _coverage, _cache, _plain_windows, _hardest, _suspects)
    body = "\n".join(section(view) for section in sections)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width">'
        f"<style>{_STYLE}</style>\n<h1>{title}</h1>\n"
        f'<p class="dim">{escape(said)}</p>\n{body}</html>\n'
    )


# -- numbers -------------------------------------------------------------------------------------


def _tiles(view: ImportanceView) -> str:
    tiles = "".join(
        f'<div class="tile"><b>{escape(number)}</b><span>{escape(said)}</span></div>'
        for number, said in _numbers(view)
    )
    return f'<div class="tiles">{tiles}</div>'


def _numbers(view: ImportanceView) -> Iterator[tuple[str, str]]:
    """Yield the numbers that a reader wants first, each with its meaning."""
    draws = view.draws
    yield f"{(view.table.num_seen > 0).mean():.0%}", "of the samples have a score"
    drawn = draws.num_windows - draws.num_plain
    yield f"{drawn} of {draws.num_windows}", "windows drawn by importance, the others plain"
    by_importance = [w for w in draws.windows if not w.reason]
    if by_importance:
        share = sum(w.effective_share for w in by_importance) / len(by_importance)
        yield f"{share:.0%}", "effective sample size of these draws"
    complete = [e for e in draws.epochs if e.num_draws == view.order.num_samples]
    if complete:
        share = complete[-1].num_distinct / view.order.num_ids
        yield f"{share:.0%}", f"of the samples drawn in epoch {complete[-1].epoch}"
    if view.hits is not None:
        most = view.hits.most_share
        yield f"{view.hits.share:.0%}", f"cache hits by bytes; {most:.0%} were possible"
    yield show_count(len(view.suspects)), "samples that stay hardest: look at their labels"


# -- plots ---------------------------------------------------------------------------------------


def _figure(title: str, svg: str, caption: str) -> str:
    return f"<figure><h3>{title}</h3>\n{svg}\n<figcaption>{caption}</figcaption></figure>"


def _samples(view: ImportanceView) -> str:
    is_known = view.table.num_seen > 0
    if not is_known.any():
        return "<h2>Samples</h2><p>No losses were observed yet.</p>"
    difficulty = view.table.difficulty(view.order.options)[is_known]
    if view.order.options.score in BY_LOSS:
        top = float(np.quantile(difficulty, 0.995)) or 1.0
        axis = "average loss"
        said = (
            "Latest losses count most, and the last bar has everything above it as well. A long "
            "tail: a few samples have most of the loss, and are drawn very often."
        )
    else:
        top, axis = 1.0, "0 easiest – 1 hardest"
        said = (
            "Hardness is the average place of a sample in its batch, by loss. A hump in the "
            "middle: losses hardly tell samples apart. Two ends: some samples stay easy, some stay "
            "hard."
        )
    hard = _figure("How hard samples are", _histogram(difficulty, top, axis), said)
    return f'<h2>Samples</h2><div class="pair">{hard}{_chances(view.next_draws)}</div>'


def _chances(draws: WindowDraws) -> str:
    title, chances = "How often samples would be drawn now", draws.chances
    if chances is None:
        return _figure(title, "", f"All alike: {escape(draws.reason)}.")
    times = chances.points / np.maximum(1, chances.base)
    top = max(2.0, float(np.ceil(np.quantile(times, 0.995))))
    return _figure(
        title,
        _histogram(times, top, "times as often as in a plain epoch", 1.0),
        "The dashed line is a plain epoch. A sample to its right is drawn more often than that and "
        "counts less in the loss, so that the gradient stays right on average. None lies below the "
        f"floor; the most is {times.max():.1f}.",
    )


def _histogram(
    values: npt.NDArray[np.float64], top: float, axis: str, mark: float | None = None
) -> str:
    ticks = round_ticks(top)
    top = ticks[-1]
    counts, edges = np.histogram(np.minimum(values, top), _BINS, (0, top))
    tips = [
        f"{a:.2f} to {b:.2f}: {show_count(int(count))} samples"
        for a, b, count in zip(edges, edges[1:], counts, strict=False)
    ]
    labels = [(tick / top * _BINS, f"{tick:g}") for tick in ticks]
    place = None if mark is None else mark / top * _BINS
    return bars_svg(counts.tolist(), labels, tips, axes=(axis, "samples"), mark=place)


def _windows(view: ImportanceView) -> str:
    windows = view.draws.windows
    if not windows:
        return ""
    numbers = [w.window for w in windows]
    is_plain = [bool(w.reason) for w in windows]
    effective = Line(name="effective size", values=[w.effective_share for w in windows])
    distinct = Line(
        name="distinct samples",
        values=[w.num_distinct / w.num_draws for w in windows],
        kind="second",
    )
    drift = Line(name="drift", values=[w.drift for w in windows])
    most = max((w.drift for w in windows if w.drift is not None), default=0.0)
    top = next(t for t in _DRIFT_TOPS if most <= t)
    shares = _figure(
        "What the draws of a window are worth",
        lines_svg(numbers, [effective, distinct], is_plain, axes=("window", "")),
        "Effective sample size (Σw)² / Σw², and distinct samples, as shares of the draws. Shaded "
        f"windows were plain. A window worth less than {EFFECTIVE_MIN:.0%} is plain.",
    )
    moved = _figure(
        "Drift of scores",
        lines_svg(
            numbers, [drift], is_plain, axes=("window that was drawn from them", ""), most=top
        ),
        "How far a sample had moved in its batch since it was scored before, on average. 0: scores "
        "are as good as new. From 25 % on, its place is chance. It jumps where draws change from "
        "plain to importance: a sample then meets harder ones.",
    )
    before = view.draws.num_windows - len(windows)
    older = f'<p class="dim">{before} earlier windows are not shown.</p>' if before else ""
    return f'<h2>Windows</h2><div class="pair">{shares}{moved}</div>{older}{_by_window(windows)}'


def _by_window(windows: Sequence[WindowSeen]) -> str:
    head = ("window", "epoch", "draws", "distinct", "effective size", "drift")
    rows = [
        (
            str(w.window),
            str(w.epoch),
            show_count(w.num_draws),
            f"{w.num_distinct / w.num_draws:.1%}",
            f"{w.effective_share:.1%}",
            "–" if w.drift is None else f"{w.drift:.1%}",
            w.reason or "by importance",
        )
        for w in windows
    ]
    return f"<details><summary>The numbers</summary>{_table((*head, 'drawn'), rows)}</details>"


def _coverage(view: ImportanceView) -> str:
    num_ids, epochs = view.order.num_ids, view.draws.epochs
    figures = []
    if epochs:
        whole = view.order.num_samples
        figures.append(
            _figure(
                "Distinct samples by epoch",
                bars_svg(
                    [e.num_distinct / num_ids for e in epochs],
                    _epoch_labels([e.epoch for e in epochs]),
                    [
                        f"epoch {e.epoch}: {show_count(e.num_distinct)} of {show_count(num_ids)} "
                        f"samples in {show_count(e.num_draws)} draws"
                        for e in epochs
                    ],
                    axes=("epoch", ""),
                    is_share=True,
                ),
                "A plain epoch draws every sample once. "
                + (
                    f"Of epoch {epochs[-1].epoch}, {epochs[-1].num_draws / whole:.0%} is drawn."
                    if epochs[-1].num_draws < whole
                    else "Drawn by importance, the easy ones are left out now and then."
                ),
            )
        )
    figures.append(_times_scored(view))
    return f'<h2>Coverage</h2><div class="pair">{"".join(figures)}</div>'


def _epoch_labels(epochs: Sequence[int]) -> list[tuple[float, str]]:
    every = -(-len(epochs) // 8)
    return [(n + 0.5, str(epochs[n])) for n in range(0, len(epochs), every)]


def _times_scored(view: ImportanceView) -> str:
    times, num_ids = view.table.num_seen, view.order.num_ids
    groups = [(a, b) for a, b in _TIMES if a <= times.max()]
    counts = [int(((times >= a) & (times <= b)).sum()) for a, b in groups]
    names = [str(a) if a == b else f"{a}–{b}" if b < 255 else f"{a}+" for a, b in groups]
    never, seldom = (times == 0).mean(), (times == 1).mean()
    return _figure(
        "How often samples were scored",
        bars_svg(
            [count / num_ids for count in counts],
            [(number + 0.5, name) for number, name in enumerate(names)],
            [
                f"{name} times: {show_count(c)} samples"
                for name, c in zip(names, counts, strict=True)
            ],
            axes=("times", ""),
            is_share=True,
        ),
        f"In the whole run. {never:.1%} of the samples were never scored, {seldom:.1%} once.",
    )


def _cache(view: ImportanceView) -> str:
    if view.hits is None:
        return ""
    hits = view.hits
    rows = (("this run", hits.share), ("the most possible (byte-MIN)", hits.most_share))
    tracks = "".join(
        f"<p>{name}: <b>{share:.1%}</b></p>"
        f'<div class="track"><div style="width:{share:.1%}"></div></div>'
        for name, share in rows
    )
    return (
        f"<h2>Cache hits</h2>{tracks}"
        '<p class="dim">Shares of the bytes that were used. The second is a cache of the same size '
        "that knows the whole order beforehand; no other does better. "
        f"{show_count(hits.num_evicted)} units were evicted.</p>"
    )


# -- lists ---------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; its last column is text."""

    def line(cells: Sequence[str], tag: str) -> str:
        *numbers, text = (escape(cell) for cell in cells)
        inside = "".join(f"<{tag}>{number}</{tag}>" for number in numbers)
        return f'<tr>{inside}<{tag} class="left">{text}</{tag}></tr>\n'

    return f"<table>\n{line(head, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"


def _plain_windows(view: ImportanceView) -> str:
    reasons: dict[str, list[int]] = {}
    for window in view.draws.windows:
        if window.reason:
            reasons.setdefault(window.reason, []).append(window.window)
    if not reasons:
        return ""
    rows = [(str(len(numbers)), _ranges(numbers), reason) for reason, numbers in reasons.items()]
    return f"<h2>Windows that were plain</h2>{_table(('windows', 'which', 'why'), rows)}"


def _ranges(numbers: Sequence[int]) -> str:
    """Return numbers with their runs joined.

    >>> _ranges([0, 1, 2, 7])
    '0–2, 7'
    """
    edges = [n for n in range(1, len(numbers)) if numbers[n] != numbers[n - 1] + 1]
    runs = [numbers[a:b] for a, b in zip([0, *edges], [*edges, len(numbers)], strict=True)]
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}–{r[-1]}" for r in runs)


def _hardest(view: ImportanceView) -> str:
    if not len(view.hardest):
        return ""
    table, options = view.table, view.order.options
    difficulty = table.difficulty(options)
    suspects = set(view.suspects.tolist())
    rows = [
        (
            str(i),
            f"{difficulty[i]:.3f}",
            show_count(int(table.num_seen[i])),
            "stays hardest" if i in suspects else "",
        )
        for i in view.hardest.tolist()
    ]
    by = "average loss" if options.score in BY_LOSS else "hardness"
    head = ("sample", by, "times scored", "")
    return f"<h2>Hardest samples</h2>{_table(head, rows)}"


def _suspects(view: ImportanceView) -> str:
    found = view.suspects
    said = (
        "These were scored four times or more, and are among the hardest 2 % of all samples. Wrong "
        "labels and broken inputs look like that; so do rare, valid samples. "
        "<code>dataset[i]</code> shows one, <code>loader.importance.suspects()</code> has them all."
    )
    if not len(found):
        return "<h2>Suspected label errors</h2><p>No sample stays hardest.</p>"
    shown = ", ".join(map(str, found[:_SUSPECTS_SHOWN].tolist()))
    more = len(found) - _SUSPECTS_SHOWN
    rest = f" … and {show_count(more)} more" if more > 0 else ""
    return f'<h2>Suspected label errors</h2><p>{said}</p><div class="ids">{shown}{rest}</div>'
