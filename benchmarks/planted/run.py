"""Score verdicts and advice: run each case, trace it, follow its first advice, compare.

Runs of the planted job, of the clean one and of the one that follows the advice take turns; rates
are medians. The trace is another run, so what tracing costs is in no rate.
"""

import contextlib
import json
import statistics
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.planted.data import Sets
from benchmarks.planted.kinds import Case
from benchmarks.planted.remedies import followed
from benchmarks.planted.site import throughput
from penstock.report.analysis.analyze import analyze
from penstock.trace.reading import read_trace

NEAR = 0.25
"""A prediction is right within this share."""
COST_MIN = 0.2
SAME_AS = {"healthy": {"healthy", "compute-bound"}}
"""A job without a bottleneck is bound by its compute: both words are right."""


@dataclass(kw_only=True)
class Row:
    """What became of one case."""

    kind: str
    parameters: dict[str, Any]
    cost: float = 0.0
    """Measured: the share of the throughput that the planted bottleneck takes."""
    samples_s: float = 0.0
    traced_samples_s: float = 0.0
    verdict: str = ""
    runner_up: str = ""
    share: float = 0.0
    sentence: str = ""
    evidence: dict[str, float]
    parts: dict[str, float]
    advice: str = ""
    settings: dict[str, Any]
    predicted: float | None = None
    real: float | None = None
    """Gain of following the advice; None: there is none, or it cannot be followed here."""
    problem: str = ""

    @property
    def is_right(self) -> bool:
        return self.verdict in SAME_AS.get(self.kind, {self.kind})

    @property
    def is_in_two(self) -> bool:
        return self.is_right or self.runner_up == self.kind

    @property
    def is_planted(self) -> bool:
        """Whether the bottleneck really cost something; others say nothing about verdicts."""
        return self.kind == "healthy" or self.cost >= COST_MIN or not self.samples_s

    @property
    def is_near(self) -> bool | None:
        """Whether throughput after the change is within a quarter of what was predicted."""
        if self.predicted is None or self.real is None:
            return None
        return abs((1 + self.predicted) / (1 + self.real) - 1) <= NEAR

    @property
    def is_gain_near(self) -> bool | None:
        """The same of the gain itself, which is stricter."""
        if self.predicted is None or self.real is None:
            return None
        return abs(self.predicted - self.real) <= NEAR * abs(self.real)


def scored(case: Case, sets: Sets, *, rounds: int, keep: Path | None = None) -> Row:
    """Run one case in all its forms."""
    row = Row(kind=case.kind, parameters=dict(case.parameters), evidence={}, parts={}, settings={})
    row.problem = case.planted.can_run
    if row.problem:
        return row
    try:
        with _folder(keep) as trace:
            row.traced_samples_s = throughput(case.planted, trace=trace)
            analysis = analyze(read_trace(trace))
        _judge(row, analysis)
        if rounds:
            _measure(row, case, sets, rounds)
    except Exception as error:  # One case that fails must not take the others with it.
        row.problem = f"{type(error).__name__}: {error}"
    return row


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="planted-trace-") as scratch:
        yield keep or Path(scratch) / "run"


def _judge(row: Row, analysis: Any) -> None:
    verdict = analysis.verdict
    row.verdict, row.share, row.sentence = verdict.cause, verdict.share, verdict.sentence
    row.runner_up = verdict.runner_up.cause if verdict.runner_up else ""
    row.evidence = {e.sentence: e.value for e in verdict.evidence}
    row.parts = {name: share for name, share in analysis.parts.items() if share >= 0.005}
    if analysis.advice:
        first = analysis.advice[0]
        row.advice, row.settings, row.predicted = first.title, dict(first.settings), first.gain


def _measure(row: Row, case: Case, sets: Sets, rounds: int) -> None:
    sites = {"planted": case.planted, "clean": case.clean}
    advised = followed(case.planted, row.settings, sets)
    if advised is not None:
        sites["advised"] = advised
    # In turns, so that a machine that gets slower meanwhile gets slower for all of them.
    rates: dict[str, list[float]] = {name: [] for name in sites}
    for _ in range(rounds):
        for name, site in sites.items():
            rates[name].append(throughput(site))
    middle = {name: statistics.median(found) for name, found in rates.items()}
    row.samples_s = middle["planted"]
    row.cost = 1 - middle["planted"] / middle["clean"]
    if advised is not None:
        row.real = middle["advised"] / middle["planted"] - 1


def table(rows: Iterable[Row]) -> str:
    """Return the rows as a table in Markdown."""
    lines = [
        "| planted | parameters | costs | verdict | right | advice | predicted | real | near |",
        "|---|---|---:|---|---|---|---:|---:|---|",
    ]
    for row in rows:
        drawn = ", ".join(f"{name} {_short(value)}" for name, value in row.parameters.items())
        if row.problem:
            lines.append(
                f"| {row.kind} | {drawn} | | {row.problem.splitlines()[0][:80]} | | | | | |"
            )
            continue
        right = "yes" if row.is_right else "second" if row.is_in_two else "no"
        settings = ", ".join(f"{name}={_short(value)}" for name, value in row.settings.items())
        near = {True: "yes", False: "no", None: "–"}[row.is_near]
        cells = [row.kind, drawn, f"{row.cost:.0%}", f"{row.verdict} {row.share:.0%}", right]
        cells += [settings, _gain(row.predicted), _gain(row.real), near]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def totals(rows: list[Row]) -> str:
    """Return the counts that matter, in a few lines."""
    ran = [row for row in rows if not row.problem]
    real = [row for row in ran if row.is_planted]
    followed_rows = [row for row in real if row.is_near is not None]
    return "\n".join(
        [
            f"{len(rows)} cases, {len(ran)} ran, {len(real)} of them cost what they should (20 %)",
            f"verdict right: {sum(r.is_right for r in real)} of {len(real)}; "
            f"in the first two: {sum(r.is_in_two for r in real)}",
            f"first advice: {len(followed_rows)} could be followed, "
            f"{sum(bool(r.is_near) for r in followed_rows)} gave the predicted throughput within "
            f"25 %, {sum(bool(r.is_gain_near) for r in followed_rows)} the predicted gain; "
            f"{sum((r.real or 0) > 0 for r in followed_rows)} helped",
        ]
    )


def as_json(rows: list[Row]) -> str:
    out = [
        {
            **asdict(row),
            "is_right": row.is_right,
            "is_in_two": row.is_in_two,
            "is_planted": row.is_planted,
            "is_near": row.is_near,
            "is_gain_near": row.is_gain_near,
        }
        for row in rows
    ]
    return json.dumps(out, indent=1)


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _gain(value: float | None) -> str:
    return "–" if value is None else f"{value:+.0%}"
