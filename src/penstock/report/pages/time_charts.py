"""Charts over time: where steps spend it, which rank waits, which source delivers."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from penstock.report.analysis.values import CATEGORIES, Analysis, Floats, StepTable
from penstock.report.charts import (
    Axis,
    BarChart,
    Bars,
    HeatMap,
    Line,
    LineChart,
    Mark,
    PageSection,
    PageTable,
    Part,
    Prose,
)
from penstock.report.pages.words import LABELS, percent
from penstock.units import show_seconds

_BINS_MAX = 300
"""Places of a chart over steps: more could not be told apart on a screen."""
_RANKS_MAX = 256
"""Rows of the heat map; of more ranks, those that wait longest are shown."""
_STEPS_MIN = 8
"""Steps in a bin of samples a second: with one or two a bin, the line would show mere chance."""
_LEAST_SHARE = 0.002
"""Categories below this share of the time are left out of charts."""


def time_section(analysis: Analysis) -> PageSection:
    """Return where the time of steps goes: in all, by epoch, and step by step."""
    shown = _shown(analysis.parts)
    parts: list[Part] = [_whole(analysis, shown)]
    if len(analysis.epochs) > 1:
        parts.append(_by_epoch(analysis, shown))
    if len(analysis.steps) > 1:
        parts.append(_by_step(analysis.steps, shown))
    return PageSection(title="Where a step's time goes", parts=parts)


def _shown(parts: Mapping[str, float]) -> list[str]:
    shown = [name for name in CATEGORIES if parts.get(name, 0.0) >= _LEAST_SHARE]
    return shown or ["compute"]


def _whole(analysis: Analysis, shown: list[str]) -> Part:
    rows = [
        [
            LABELS[name],
            percent(analysis.parts.get(name, 0.0)),
            show_seconds(analysis.parts.get(name, 0.0) * analysis.step_mean_s),
            percent(analysis.steady.get(name, 0.0)) if analysis.steady else "–",
        ]
        for name in shown
    ]
    head = ["Part of a step", "Share of the time", "Mean of a step", "After the first epoch"]
    return PageTable(head=head, rows=rows)


def _by_epoch(analysis: Analysis, shown: list[str]) -> BarChart:
    steps = [max(1, epoch.num_steps / max(1, analysis.num_ranks)) for epoch in analysis.epochs]
    return BarChart(
        title="A step in each epoch",
        reading="A tall first bar is the cost of a cold start; later bars show the steady state.",
        category=Axis(name="epoch"),
        categories=[str(epoch.epoch) for epoch in analysis.epochs],
        value=Axis(name="mean time of a step", unit="s"),
        bars=[
            Bars(
                name=LABELS[name],
                values=[
                    epoch.parts.get(name, 0.0) / num_steps
                    for epoch, num_steps in zip(analysis.epochs, steps, strict=True)
                ],
                colour=number,
            )
            for number, name in enumerate(shown)
        ],
        is_stacked=True,
    )


def _by_step(steps: StepTable, shown: list[str]) -> LineChart:
    num_bins = int(min(_BINS_MAX, steps.step.max() + 1))
    bins = (steps.step * num_bins // (steps.step.max() + 1)).astype(np.int64)
    counts = np.maximum(1, np.bincount(bins, minlength=num_bins))
    first = np.arange(num_bins) * (steps.step.max() + 1) // num_bins

    def mean(values: Floats) -> Floats:
        found: Floats = np.bincount(bins, weights=values, minlength=num_bins) / counts
        return found

    return LineChart(
        title="Step by step",
        reading=(
            "Time of a step, mean over ranks, from its call for a batch to the next call. A step "
            "that stands out in one colour says what delayed it."
        ),
        x=Axis(name="step"),
        y=Axis(name="time of a step", unit="s"),
        lines=[
            Line(
                name=LABELS[name],
                x=first,
                y=mean(steps.parts[name]),
                colour=number,
            )
            for number, name in enumerate(shown)
            if name in steps.parts
        ],
        is_stacked=True,
    )


def ranks_section(analysis: Analysis) -> PageSection | None:
    """Return which rank waits when, and who is waited for."""
    waits = analysis.waits
    if len(waits.ranks) < 2 or waits.wait.size == 0:
        return None
    order = np.argsort(-waits.wait.mean(axis=1), kind="stable")[:_RANKS_MAX]
    chosen = np.sort(order)
    middles = (waits.edges_s[:-1] + waits.edges_s[1:]) / 2
    parts: list[Part] = [
        HeatMap(
            title="Waiting for batches, by rank",
            reading=(
                "A row that stands out is a rank whose own loader is late, a column "
                "a moment when all of them were."
            ),
            column=Axis(name="time since the start"),
            columns=[show_seconds(at_s) for at_s in middles.tolist()],
            row=Axis(name="rank"),
            rows=[str(waits.ranks[number]) for number in chosen.tolist()],
            value=Axis(name="share of the time waiting", unit="share", low=0.0, high=1.0),
            values=waits.wait[chosen],
        )
    ]
    waited_for = _waited_for(analysis)
    if waited_for:
        head = ["Rank", "Others waited for it", "Of the steps"]
        parts.append(PageTable(head=head, rows=waited_for))
    else:
        parts.append(Prose(text="No rank was waited for more often than others.", kind="dim"))
    return PageSection(title="Ranks", parts=parts)


def _waited_for(analysis: Analysis) -> list[list[str]]:
    steps = analysis.steps
    late = steps.waited_for[steps.waited_for >= 0]
    rows = []
    barrier_s = steps.parts.get("barrier", np.zeros(len(steps)))
    for rank in np.unique(late).tolist():
        is_it = steps.waited_for == rank
        share = len(np.unique(steps.step[is_it])) / max(1, analysis.num_steps)
        rows.append([str(rank), show_seconds(float(barrier_s[is_it].sum())), percent(share)])
    return rows[:20]


def sources_section(analysis: Analysis) -> PageSection | None:
    """Return which source delivered how many bytes when."""
    timeline = analysis.timeline
    named = {name: rate for name, rate in timeline.bytes_s.items() if rate.sum() > 0}
    if not named:
        return None
    places = timeline.edges_s[:-1]
    time = Axis(name="time since the start", unit="s")
    starts = [Mark(label=f"epoch {e.epoch}", x=e.start_s) for e in analysis.epochs[1:20]]
    parts: list[Part] = [
        LineChart(
            title="Bytes a second by source",
            reading="Later epochs should come from tiers and peers, not from the store.",
            x=time,
            y=Axis(name="rate", unit="bytes/s"),
            lines=[Line(name=name, x=places, y=rate) for name, rate in named.items()],
            is_stacked=True,
            marks=starts,
        ),
        LineChart(
            title="Requests in flight",
            reading="A level line is a limit: of connections, of workers or of look-ahead.",
            x=time,
            y=Axis(name="requests"),
            lines=[Line(name="in flight", x=places, y=timeline.in_flight)],
            is_half=True,
        ),
        LineChart(
            title="Samples a second",
            reading="What training loops got. Drops show checkpoints, validation and stalls.",
            x=time,
            y=Axis(name="samples/s"),
            lines=[samples_line(analysis, "samples")],
            is_half=True,
        ),
    ]
    return PageSection(title="Sources", parts=parts)


def samples_line(analysis: Analysis, name: str) -> Line:
    """Return samples a second as a line, over bins in which several batches end."""
    timeline = analysis.timeline
    rates, places = timeline.samples_s, timeline.edges_s[:-1]
    steps = max(1, analysis.num_steps)  # Ranks end theirs at the same time, where they meet.
    width = max(1, min(len(rates) // 2, math.ceil(_STEPS_MIN * len(rates) / steps)))
    starts = np.arange(0, len(rates), width)
    counts = np.diff(np.append(starts, len(rates)))
    return Line(name=name, x=places[starts], y=np.add.reduceat(rates, starts) / counts)
