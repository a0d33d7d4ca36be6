"""The report of importance sampling: one HTML page that needs nothing else.

Each section is a function from a view to the parts of the section, or to none where there is
nothing to show. A new number is one more line in `_numbers`, or one more section.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.dataset.part import Ints
from penstock.engine.cache_hits import CacheHits
from penstock.engine.draw_summary import DrawSummary, WindowSummary
from penstock.order.importance import ImportanceOrder, ScoreTable, WindowDraws
from penstock.order.importance.order import EFFECTIVE_MIN
from penstock.order.importance.scores import BY_LOSS
from penstock.report.charts import (
    Axis,
    BarChart,
    Bars,
    Fold,
    Line,
    LineChart,
    Listing,
    Mark,
    Page,
    PageSection,
    PageTable,
    Part,
    Prose,
    Tiles,
    page_html,
)
from penstock.units import show_count

_BINS = 40
_SUSPECTS_SHOWN = 500
_TIMES = ((0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 64), (65, 255))
"""How often a sample was scored, in groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceView:
    """The data of the page."""

    order: ImportanceOrder
    table: ScoreTable
    draws: DrawSummary
    hits: CacheHits | None
    num_observed: int
    """Batches whose losses were reported."""
    hardest: Ints
    suspects: Ints
    next_draws: WindowDraws
    """The draws that a next window would have, with all scores that are known."""


def importance_html(view: ImportanceView) -> str:
    """Return the page."""
    order, options = view.order, view.order.options
    name = options.score if isinstance(options.score, str) else "a function"
    lead = (
        f"{show_count(order.num_ids)} samples in windows of "
        f"{show_count(order.num_samples // order.num_windows)} draws · score {name} · floor "
        f"{options.floor:g} · {show_count(view.num_observed)} batches observed"
    )
    sections: dict[str, list[Part]] = {
        "In short": [Tiles(tiles=list(_numbers(view)))],
        "Samples": _samples(view),
        "Windows": _windows(view.draws),
        "Coverage": _coverage(view),
        "Cache hits": _cache(view.hits),
        "Windows that were plain": _plain_windows(view.draws),
        "Hardest samples": _hardest(view),
        "Suspected label errors": _suspects(view.suspects),
    }
    shown = [PageSection(title=title, parts=parts) for title, parts in sections.items() if parts]
    return page_html(Page(title="Importance sampling", lead=lead, sections=shown))


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


# -- charts --------------------------------------------------------------------------------------


def _samples(view: ImportanceView) -> list[Part]:
    is_known = view.table.num_seen > 0
    if not is_known.any():
        return [Prose(text="No losses were observed yet.")]
    difficulty = view.table.difficulty(view.order.options)[is_known]
    if view.order.options.score in BY_LOSS:
        top = float(np.quantile(difficulty, 0.995)) or 1.0
        axis = "average loss"
        reading = (
            "Latest losses count most, and the last bin has everything above it as well. A long "
            "tail: a few samples have most of the loss, and are drawn very often."
        )
    else:
        top, axis = 1.0, "0 easiest – 1 hardest"
        reading = (
            "Hardness is the average place of a sample in its batch, by loss. A hump in the "
            "middle: losses hardly tell samples apart. Two ends: some samples stay easy, some stay "
            "hard."
        )
    hard = _histogram("How hard samples are", reading, difficulty, top, x=axis, marks=())
    return [hard, _chances(view.next_draws)]


def _chances(draws: WindowDraws) -> Part:
    title, chances = "How often samples would be drawn now", draws.chances
    if chances is None:
        return Prose(text=f"{title}: all alike, since {draws.reason}.")
    times = chances.points / np.maximum(1, chances.base)
    top = max(2.0, float(np.ceil(np.quantile(times, 0.995))))
    reading = (
        "A sample to the right of the dashed line is drawn more often than in a plain epoch and "
        "counts less in the loss, so that the gradient stays right on average. None lies below the "
        f"floor; the most is {times.max():.1f}."
    )
    axis, mark = "times as often as in a plain epoch", Mark(label="a plain epoch", x=1.0)
    return _histogram(title, reading, times, top, x=axis, marks=(mark,))


def _histogram(
    title: str,
    reading: str,
    values: npt.NDArray[np.float64],
    top: float,
    *,
    x: str,
    marks: Sequence[Mark],
) -> LineChart:
    counts, edges = np.histogram(np.minimum(values, top), _BINS, (0, top))
    line = Line(name="samples", x=edges, y=[*counts.tolist(), 0], style="filled step")
    return LineChart(
        title=title,
        reading=reading,
        x=Axis(name=x),
        y=Axis(name="samples"),
        lines=[line],
        marks=marks,
        is_half=True,
    )


def _windows(draws: DrawSummary) -> list[Part]:
    windows = draws.windows
    if not windows:
        return []
    numbers = [w.window for w in windows]
    plain = [(w.window - 0.5, w.window + 0.5) for w in windows if w.reason]
    effective = [w.effective_share for w in windows]
    distinct = [w.num_distinct / w.num_draws for w in windows]
    drift = [float("nan") if w.drift is None else w.drift for w in windows]
    shares = LineChart(
        title="What the draws of a window are worth",
        reading="Effective sample size (Σw)² / Σw², and distinct samples, as shares of the draws. "
        f"Shaded windows were plain. A window worth less than {EFFECTIVE_MIN:.0%} is plain.",
        x=Axis(name="window"),
        y=Axis(name="share of the draws", unit="share", low=0, high=1),
        lines=[
            Line(name="effective size", x=numbers, y=effective),
            Line(name="distinct samples", x=numbers, y=distinct),
        ],
        shaded=plain,
        is_half=True,
    )
    moved = LineChart(
        title="Drift of scores",
        reading="How far a sample had moved in its batch since it was scored before, on average. "
        "0: scores are as good as new. From 25 % on, its place is chance. It jumps where draws "
        "change from plain to importance: a sample then meets harder ones.",
        x=Axis(name="window that was drawn from them"),
        y=Axis(name="drift", unit="share", low=0),
        lines=[Line(name="drift", x=numbers, y=drift)],
        shaded=plain,
        is_half=True,
    )
    before = draws.num_windows - len(windows)
    older = f"{before} earlier windows are not shown."
    return [shares, moved, *([Prose(text=older, kind="dim")] if before else []), _reasons(windows)]


def _reasons(windows: Sequence[WindowSummary]) -> Fold:
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
    head = ("window", "epoch", "draws", "distinct", "effective size", "drift", "drawn")
    return Fold(summary="All windows", parts=[PageTable(head=head, rows=rows, left=(-1,))])


def _coverage(view: ImportanceView) -> list[Part]:
    return [*_by_epoch(view), _times_scored(view)]


def _by_epoch(view: ImportanceView) -> Iterator[BarChart]:
    num_ids, epochs, whole = view.order.num_ids, view.draws.epochs, view.order.num_samples
    if not epochs:
        return
    last = epochs[-1]
    if last.num_draws < whole:
        state = f"Of epoch {last.epoch}, {last.num_draws / whole:.0%} is drawn."
    else:
        state = "Drawn by importance, the easy ones are left out now and then."
    yield BarChart(
        title="Distinct samples by epoch",
        reading=f"A plain epoch draws every sample once. {state} Epoch {last.epoch} drew "
        f"{show_count(last.num_distinct)} of {show_count(num_ids)} samples in "
        f"{show_count(last.num_draws)} draws.",
        category=Axis(name="epoch"),
        categories=[str(e.epoch) for e in epochs],
        value=Axis(name="share of the samples", unit="share", high=1),
        bars=[Bars(name="distinct samples", values=[e.num_distinct / num_ids for e in epochs])],
        is_half=True,
    )


def _times_scored(view: ImportanceView) -> BarChart:
    times, num_ids = view.table.num_seen, view.order.num_ids
    groups = [(a, b) for a, b in _TIMES if a <= times.max()]
    shares = [float(((times >= a) & (times <= b)).sum()) / num_ids for a, b in groups]
    never, seldom = (times == 0).mean(), (times == 1).mean()
    return BarChart(
        title="How often samples were scored",
        reading=f"In the whole run. {never:.1%} of the samples were never scored, {seldom:.1%} "
        "once.",
        category=Axis(name="times"),
        categories=[str(a) if a == b else f"{a}–{b}" if b < 255 else f"{a}+" for a, b in groups],
        value=Axis(name="share of the samples", unit="share", high=1),
        bars=[Bars(name="samples", values=shares)],
        is_half=True,
    )


def _cache(hits: CacheHits | None) -> list[Part]:
    if hits is None:
        return []
    chart = BarChart(
        title="Cache hits by bytes",
        reading="The second bar is a cache of the same size that knows the whole order beforehand; "
        f"no other does better. {show_count(hits.num_evicted)} units were evicted.",
        category=Axis(name="cache"),
        categories=["this run", "the most possible (byte-MIN)"],
        value=Axis(name="share of the bytes that were used", unit="share", high=1),
        bars=[Bars(name="hits", values=[hits.share, hits.most_share])],
        is_horizontal=True,
        has_labels=True,
    )
    return [chart]


# -- lists ---------------------------------------------------------------------------------------


def _plain_windows(draws: DrawSummary) -> list[Part]:
    reasons: dict[str, list[int]] = {}
    for window in draws.windows:
        if window.reason:
            reasons.setdefault(window.reason, []).append(window.window)
    rows = [(str(len(numbers)), _ranges(numbers), reason) for reason, numbers in reasons.items()]
    head = ("windows", "which", "why")
    return [PageTable(head=head, rows=rows, left=(-1,))] if rows else []


def _ranges(numbers: Sequence[int]) -> str:
    """Return numbers with their runs joined.

    >>> _ranges([0, 1, 2, 7])
    '0–2, 7'
    """
    edges = [n for n in range(1, len(numbers)) if numbers[n] != numbers[n - 1] + 1]
    runs = [numbers[a:b] for a, b in zip([0, *edges], [*edges, len(numbers)], strict=True)]
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}–{r[-1]}" for r in runs)


def _hardest(view: ImportanceView) -> list[Part]:
    if not len(view.hardest):
        return []
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
    return [PageTable(head=("sample", by, "times scored", ""), rows=rows, left=(-1,))]


def _suspects(found: Ints) -> list[Part]:
    if not len(found):
        return [Prose(text="No sample stays hardest.")]
    shown = ", ".join(map(str, found[:_SUSPECTS_SHOWN].tolist()))
    more = len(found) - _SUSPECTS_SHOWN
    rest = f" … and {show_count(more)} more" if more > 0 else ""
    meaning = (
        "These were scored four times or more, and are among the hardest 2 % of all samples. Wrong "
        "labels and broken inputs look like that; so do rare, valid samples. `dataset[i]` shows "
        "one, `loader.importance.suspects()` has them all."
    )
    return [Prose(text=meaning), Listing(text=shown + rest, is_wrapped=True)]
