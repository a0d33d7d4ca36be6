"""The verdict: what limits a run, in one sentence."""

from __future__ import annotations

from penstock.report.causes import findings_of
from penstock.report.values import Analysis, Evidence, Finding, Verdict

LOSS_MIN = 0.10
"""A cause that takes less of the time than this is no bottleneck: runs of the same job differ by
about as much on a machine that is not theirs alone."""

_OPENINGS = {
    "slow-store": "Input-bound",
    "slow-disk": "Input-bound",
    "tiny-files": "Input-bound",
    "cold-page-cache": "Input-bound",
    "cache-too-small": "Input-bound",
    "skewed-shards": "Input-bound",
    "too-few-workers": "Input-bound",
    "heavy-decode": "Input-bound",
    "prefetch-too-short": "Input-bound",
    "slow-hand-over": "Input-bound",
    "slow-copy": "Copy-bound",
    "straggler-rank": "Straggler",
    "communication-bound": "Communication-bound",
    "checkpoint-interference": "Checkpoints",
    "validation-interference": "Validation",
    "interpreter-lock": "Interpreter lock",
    "oversubscribed-cores": "Oversubscribed cores",
    "launch-bound": "Launch-bound",
    "duplicate-reads": "Duplicate reads",
}


def verdict_of(analysis: Analysis) -> Verdict:
    """Return what limits a run: the cause that takes the largest share of the time."""
    found = _merged(findings_of(analysis))
    losses = [f for f in found if f.share >= LOSS_MIN]
    if not losses:
        return _bound_by_compute(analysis, found)
    first = losses[0]
    return Verdict(
        cause=first.cause,
        share=first.share,
        low=first.low,
        high=first.high,
        sentence=f"{_OPENINGS[first.cause]}: {first.sentence}.",
        evidence=first.evidence,
        runner_up=losses[1] if len(losses) > 1 else None,
        findings=tuple(found),
    )


def _merged(found: list[Finding]) -> list[Finding]:
    """Return findings with one of each cause: shares of the same cause add up."""
    out: dict[str, Finding] = {}
    for one in found:
        first = out.setdefault(one.cause, one)
        if first is not one:
            out[one.cause] = Finding(
                cause=first.cause,
                share=first.share + one.share,
                low=first.low + one.low,
                high=min(1.0, first.high + one.high),
                sentence=first.sentence,
                evidence=first.evidence + one.evidence,
            )
    return sorted(out.values(), key=lambda f: -f.share)


def _bound_by_compute(analysis: Analysis, found: list[Finding]) -> Verdict:
    share = analysis.parts.get("compute", 0.0) + analysis.parts.get("launch", 0.0)
    lost = analysis.wait
    device = "the device" if str(analysis.value("device", "cpu")).startswith("cuda") else "the step"
    sentence = (
        f"Compute-bound: {share:.0%} of the time {device} computes, and {lost:.1%} goes to waiting "
        "for batches; the loader is fast enough."
    )
    return Verdict(
        cause="compute-bound",
        share=share,
        low=max(0.0, share - LOSS_MIN),
        high=min(1.0, share + LOSS_MIN),
        sentence=sentence,
        evidence=(Evidence(sentence="share of the time spent waiting for batches", value=lost),),
        runner_up=found[0] if found else None,
        findings=tuple(found),
    )
