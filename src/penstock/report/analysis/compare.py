"""Two runs side by side: what differs in their settings, and what came of it.

A difference of throughput is called real when the 95 % intervals of the two do not touch.
The intervals come from blocks of successive steps: neighbouring steps depend on each other, so
single steps would make every difference look certain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.report.analysis.interference import settled_real
from penstock.report.analysis.values import CATEGORIES, Analysis
from penstock.report.charts import (
    Axis,
    BarChart,
    Bars,
    LineChart,
    Page,
    PageSection,
    PageTable,
    Part,
    Prose,
    Tiles,
)
from penstock.report.pages.time_charts import samples_line
from penstock.report.pages.words import LABELS, percent
from penstock.units import show_bytes, show_count, show_seconds

_BLOCKS = 20
_DRAWS = 400
_LEAST_SHARE = 0.002


@dataclass(frozen=True, kw_only=True)
class ComparedFigure:
    """One figure of both runs."""

    name: str
    first: float
    second: float
    unit: str
    """`s`, `B`, `share` or nothing."""

    def text(self, value: float) -> str:
        """Return a value for people."""
        match self.unit:
            case "s":
                return show_seconds(value)
            case "B":
                return show_bytes(value)
            case "share":
                return percent(value)
        return show_count(round(value))

    @property
    def change(self) -> str:
        """How the second differs: in points for shares, as a factor for all else."""
        if self.unit == "share":
            points = round(100 * (self.second - self.first), 1)
            return f"{points:+.1f} points" if points else "–"
        return f"× {self.second / self.first:.3g}" if self.first else "–"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs."""

    names: tuple[str, str]
    speedup: float
    """Throughput of the second by that of the first."""
    is_real: bool
    """Whether throughput differs by more than it varies inside of each run."""
    intervals: tuple[tuple[float, float], tuple[float, float]]
    """Of the samples a second of each."""
    figures: tuple[ComparedFigure, ...]
    settings: tuple[tuple[str, str, str], ...]
    """Parameters that differ: name, first, second."""
    sentence: str

    @property
    def as_json(self) -> dict[str, Any]:
        """The comparison for programs."""
        return {
            "runs": list(self.names),
            "speedup": self.speedup,
            "is_real": self.is_real,
            "samples_s_intervals": [list(one) for one in self.intervals],
            "figures": {f.name: [f.first, f.second] for f in self.figures},
            "settings": {name: [first, second] for name, first, second in self.settings},
            "sentence": self.sentence,
        }


def compare(first: Analysis, second: Analysis, names: tuple[str, str]) -> Comparison:
    """Return how two runs differ."""
    intervals = rate_interval(first), rate_interval(second)
    is_real = intervals[0][1] < intervals[1][0] or intervals[1][1] < intervals[0][0]
    speedup = second.samples_s / first.samples_s if first.samples_s else 0.0
    return Comparison(
        names=names,
        speedup=speedup,
        is_real=is_real,
        intervals=intervals,
        figures=_figures(first, second),
        settings=_settings(first, second),
        sentence=_sentence(first, second, names, speedup, is_real=is_real),
    )


def rate_interval(analysis: Analysis) -> tuple[float, float]:
    """Return the 95 % interval of the samples a second, from blocks of successive steps."""
    kept = settled_real(analysis.steps)
    seconds, samples = analysis.steps.wall_s[kept], analysis.steps.samples[kept]
    if len(seconds) < 2:
        return analysis.samples_s, analysis.samples_s
    num_blocks = min(_BLOCKS, len(seconds))
    sums = np.array(
        [[s.sum(), n.sum()] for s, n in zip(
            np.array_split(seconds, num_blocks), np.array_split(samples, num_blocks), strict=True
        )]
    )  # fmt: skip
    draws = np.random.default_rng(0).integers(0, num_blocks, (_DRAWS, num_blocks))
    rates = sums[draws, 1].sum(axis=1) / np.maximum(1e-12, sums[draws, 0].sum(axis=1))
    low, high = analysis.num_ranks * np.percentile(rates, [2.5, 97.5])
    return float(low), float(high)


def _figures(first: Analysis, second: Analysis) -> tuple[ComparedFigure, ...]:
    def figure(name: str, a: float, b: float, unit: str = "") -> ComparedFigure:
        return ComparedFigure(name=name, first=a, second=b, unit=unit)

    out = [
        figure("samples a second", first.samples_s, second.samples_s),
        figure("median step", first.step_s, second.step_s, "s"),
        figure("waiting for batches", first.wait, second.wait, "share"),
        figure("bytes read", first.completeness.read_bytes, second.completeness.read_bytes, "B"),
    ]
    for name in CATEGORIES:
        a, b = first.parts.get(name, 0.0), second.parts.get(name, 0.0)
        if max(a, b) >= _LEAST_SHARE:
            out.append(figure(LABELS[name], a, b, "share"))
    return tuple(out)


def _settings(first: Analysis, second: Analysis) -> tuple[tuple[str, str, str], ...]:
    shown = [{p.label: p.shown for p in a.parameters} for a in (first, second)]
    # What both traces only measured differs in each run, and follows from something else.
    stated = (p.label for a in (first, second) for p in a.parameters if p.origin != "trace")
    names = dict.fromkeys(stated)
    pairs = [(name, shown[0].get(name, "–"), shown[1].get(name, "–")) for name in names]
    return tuple(pair for pair in pairs if pair[1] != pair[2])


def _sentence(
    first: Analysis, second: Analysis, names: tuple[str, str], speedup: float, *, is_real: bool
) -> str:
    samples = first.value("num_samples"), second.value("num_samples")
    apart = ""
    if all(samples) and samples[0] != samples[1]:
        apart = f" Their data sets have {samples[0]:,} and {samples[1]:,} samples."
    if not is_real:
        return (
            f"{names[1]} and {names[0]} are equally fast, as far as these runs can tell "
            f"(throughput × {speedup:.2f}, inside of what their steps vary).{apart}"
        )
    faster = "faster" if speedup > 1 else "slower"
    causes = first.verdict.cause, second.verdict.cause
    limits = f"{causes[0]} limits the first, {causes[1]} the second"
    if causes[0] == causes[1]:
        limits = f"{causes[0]} limits both"
    return f"{names[1]} is {_times(speedup)} {faster} than {names[0]}; {limits}.{apart}"


def _times(speedup: float) -> str:
    ratio = speedup if speedup > 1 else 1 / max(speedup, 1e-9)
    return f"{ratio:.2f} times"


def compare_page(first: Analysis, second: Analysis, found: Comparison) -> Page:
    """Return the comparison as a page."""
    head = ["", *found.names, "Change"]
    figures = [[f.name, f.text(f.first), f.text(f.second), f.change] for f in found.figures]
    parts: list[Part] = [
        Prose(text=found.sentence, kind="verdict"),
        Tiles(
            tiles=[
                (f"× {found.speedup:.2f}", "throughput"),
                (percent(first.wait), f"waiting in {found.names[0]}"),
                (percent(second.wait), f"waiting in {found.names[1]}"),
            ]
        ),
        PageTable(head=head, rows=figures),
    ]
    settings = [list(row) for row in found.settings]
    changed: list[Part] = [PageTable(head=["Setting", *found.names], rows=settings, left=(0, 1, 2))]
    if not settings:
        changed = [Prose(text="No parameter that the traces hold differs.")]
    return Page(
        title=f"{found.names[0]} and {found.names[1]}",
        sections=[
            PageSection(title="What came of it", parts=parts),
            PageSection(title="Settings that differ", parts=changed),
            PageSection(title="Where a step's time goes", parts=_charts(first, second, found)),
            PageSection(
                title="Verdicts",
                parts=[
                    Prose(text=f"{name}: {a.verdict.sentence}")
                    for name, a in zip(found.names, (first, second), strict=True)
                ],
            ),
        ],
    )


def _charts(first: Analysis, second: Analysis, found: Comparison) -> list[Part]:
    runs = list(zip(found.names, (first, second), strict=True))
    shown = [c for c in CATEGORIES if max(a.parts.get(c, 0.0) for _, a in runs) >= _LEAST_SHARE]
    mean_s = [a.step_mean_s for _, a in runs]
    bars = BarChart(
        title="A step of each run",
        reading="The part that shrinks is what the change removed.",
        category=Axis(name="run"),
        categories=list(found.names),
        value=Axis(name="mean time of a step", unit="s"),
        bars=[
            Bars(
                name=LABELS[c],
                values=[a.parts.get(c, 0.0) * s for (_, a), s in zip(runs, mean_s, strict=True)],
                colour=number,
            )
            for number, c in enumerate(shown or ["compute"])
        ],
        is_stacked=True,
        is_horizontal=True,
    )
    over_time = LineChart(
        title="Samples a second",
        reading="Both runs from their first batch on.",
        x=Axis(name="time since the start", unit="s"),
        y=Axis(name="samples/s"),
        lines=[samples_line(a, name) for name, a in runs],
    )
    return [bars, over_time]
