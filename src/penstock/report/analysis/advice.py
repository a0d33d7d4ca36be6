"""Advice: changes that help, ranked by what they are predicted to gain.

Each cause has a few changes that remove it. What a change gains comes from the calibrated model of
the run, where it fits; else from the attribution: without the share that it removes, the run takes
so much less, but no less than what the next limit leaves. Predictions of the second kind are
bounds, and say so by their confidence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.report.analysis.changes import SuggestedChange, changes_for
from penstock.report.analysis.interference import settled_real
from penstock.report.analysis.values import Advice, Analysis, Finding
from penstock.report.model import WhatIf, calibrate
from penstock.trace.reading import Trace

ADVICE_MAX = 6
GAIN_MIN = 0.05
"""Changes that gain less are not worth a reader's time: runs of one job differ by more."""
SHARE_MIN = 0.05
"""Causes that take less of the time get no advice."""
AGREED = 0.15
"""Two predictions of the throughput that differ by no more than this agree."""
STEPS_MIN = 8
"""Fewer steps than this show what happened to happen: no change follows from them."""
CONTENDED = 0.3
"""Where threads of the job wait this share of their time for cores that other processes use, the
next run will be another one: no gain is sure."""
FIT_MAX = 0.10
"""A model that misses its own run by more than this is not asked."""


@dataclass(frozen=True, kw_only=True)
class _Predictor:
    """Asks the model of the run, where there is one that fits."""

    ask: Callable[[Mapping[str, Any]], tuple[float, float, float] | None] = field(
        default=lambda what_if: None
    )
    note: str = ""


def advice_for(analysis: Analysis, trace: Trace) -> tuple[tuple[Advice, ...], tuple[str, ...]]:
    """Return the ranked advice, and notes about the predictions in it."""
    findings = analysis.verdict.findings
    wanted = [f for f in findings if f.share >= SHARE_MIN][:4]
    num_steps = int(settled_real(analysis.steps).sum())
    if num_steps < STEPS_MIN:
        note = (
            f"The verdict rests on {num_steps} {'step' if num_steps == 1 else 'steps'}, and no "
            f"advice follows from fewer than {STEPS_MIN}: trace a longer run."
        )
        return (), (note,)
    # Where nothing takes more than runs of the same job differ by, no change is worth its cost.
    if not wanted or analysis.verdict.cause in ("compute-bound", "healthy"):
        return (), ()
    predictor = _predictor(trace)
    found: dict[str, Advice] = {}
    for finding in wanted:
        for change in changes_for(finding, analysis):
            advice = _advice(change, finding, analysis, predictor)
            known = found.get(change.title)
            if advice.gain >= GAIN_MIN and (known is None or known.gain < advice.gain):
                found[change.title] = advice
    # What removes the verdict's cause comes first, in the order of its changes: the most direct one
    # leads. The rest is ordered by the gain that is most certain.
    cause = analysis.verdict.cause
    own = [a for a in found.values() if a.cause == cause]
    others = sorted((a for a in found.values() if a.cause != cause), key=lambda a: -a.gain_low)
    ranked = sorted(own, key=lambda a: not a.settings) + others
    numbered = tuple(replace(a, rank=i + 1) for i, a in enumerate(ranked[:ADVICE_MAX]))
    return numbered, (predictor.note,) if predictor.note else ()


def _advice(
    change: SuggestedChange, finding: Finding, analysis: Analysis, predictor: _Predictor
) -> Advice:
    known = change.gain or _bound(change, finding, analysis)
    asked = predictor.ask(change.what_if) if change.what_if else None
    (gain, low, high), confidence = _agreed(known, asked)
    if asked is None:
        confidence = "medium" if change.is_certain or change.gain else "low"
    if low <= 0 or analysis.system.contention >= CONTENDED:
        confidence = "low"  # A band that holds "no gain" is sure of nothing.
    return Advice(
        rank=0,
        title=change.title,
        cause=finding.cause,
        settings=change.settings,
        command=change.command,
        gain=gain,
        gain_low=low,
        gain_high=high,
        confidence=confidence,
        cost=change.cost,
        why=change.why or f"{finding.sentence[0].upper()}{finding.sentence[1:]}.",
    )


_Band = tuple[float, float, float]


def _agreed(known: _Band, asked: _Band | None) -> tuple[_Band, str]:
    """Return one prediction of two: from the trace's own figures, and from the model.

    Where they agree, the model is believed. Where they do not, the truth is likely between them.
    """
    if asked is None:
        return known, ""
    if abs(math.log((1 + asked[0]) / (1 + known[0]))) <= AGREED:
        return asked, "high"
    middle = math.sqrt((1 + max(0.0, asked[0])) * (1 + known[0])) - 1
    return (middle, min(asked[1], known[1], middle), max(asked[2], known[2], middle)), "low"


def _bound(
    change: SuggestedChange, finding: Finding, analysis: Analysis
) -> tuple[float, float, float]:
    """Return gain, low and high from shares of the time: without the share, so much less is left.

    What is left of the cause is `change.left` of its share. The other causes of waits work at the
    same time as this one: what they take may come to light when it is gone, so the lower bound
    keeps the runner-up's share.
    """

    def gain_of(share: float, left: float) -> float:
        removed = min(0.95, share * (1 - left))
        return 1 / (1 - removed) - 1

    others = [f.share for f in analysis.verdict.findings if f.cause != finding.cause]
    hidden = min(finding.low, max(others, default=0.0)) * 0.5
    low = gain_of(max(0.0, finding.low - hidden), change.left)
    return gain_of(finding.share, change.left), low, gain_of(finding.high, change.left)


def _predictor(trace: Trace) -> _Predictor:
    """Return what asks the calibrated model; one that never answers where it does not fit."""
    try:
        model = calibrate(trace)
        error = abs(float(model.self_check()))
    except (ValueError, ArithmeticError, LookupError) as problem:
        return _Predictor(note=f"No model of this run could be made ({problem}); gains are bounds.")
    if not math.isfinite(error) or error > FIT_MAX:
        return _Predictor(
            note=f"The model misses this run itself by {error:.0%}; gains are bounds from shares."
        )
    present = model.predict(WhatIf())

    def ask(what_if: Mapping[str, Any]) -> tuple[float, float, float] | None:
        try:
            told = model.predict(WhatIf(**what_if))
        except (ValueError, ArithmeticError, LookupError):
            return None
        base = present.samples_s
        if not base:
            return None
        return (
            told.samples_s / base - 1,
            told.samples_s_low / base - 1,
            told.samples_s_high / base - 1,
        )

    return _Predictor(ask=ask)
