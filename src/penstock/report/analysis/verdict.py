"""The verdict: what limits a run, in one sentence."""

from __future__ import annotations

from penstock.report.analysis.causes import findings_of
from penstock.report.analysis.values import Analysis, Evidence, Finding, Verdict

LOSS_MIN = 0.10
"""A cause that takes less of the time than this is no bottleneck: runs of the same job differ by
about as much on a machine that is not theirs alone."""
GROUP_LOSS_MIN = 0.15
"""The same of several causes of one group: noise of each adds up."""

NAMED_MIN = 0.03
"""What limits a run next is named from this share on."""

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
    "loader-interference": "Interference",
    "between-epochs": "Between epochs",
    "unexplained": "Unexplained",
}
_GROUPS = {
    "straggler-rank": "other ranks",
    "communication-bound": "other ranks",
    "checkpoint-interference": "interruptions",
    "validation-interference": "interruptions",
    "between-epochs": "interruptions",
    "launch-bound": "the step itself",
    "unexplained": "unexplained",
}
_LOADING = "loading"
"""The group of all other causes: another loader, or another place for the data, removes them."""


def verdict_of(analysis: Analysis) -> Verdict:
    """Return what limits a run: the largest cause of the group that takes the most time."""
    found = _merged(findings_of(analysis))
    groups = _groups(found)
    if groups:
        # Decoding, handing over and interference may each be small, and together the reason.
        found.sort(key=lambda f: (-groups[_group(f)], -f.share))
    first = found[0] if found else None
    if first is None or (first.share < LOSS_MIN and groups[_group(first)] < GROUP_LOSS_MIN):
        return _bound_by_compute(analysis, found)
    others = sorted(found[1:], key=lambda f: -f.share)
    return Verdict(
        cause=first.cause,
        share=first.share,
        low=first.low,
        high=first.high,
        sentence=f"{_OPENINGS[first.cause]}: {_together(first, groups)}{first.sentence}.",
        evidence=first.evidence,
        runner_up=others[0] if others and others[0].share >= LOSS_MIN else None,
        findings=(first, *others),
    )


def _group(finding: Finding) -> str:
    return _GROUPS.get(finding.cause, _LOADING)


def _groups(found: list[Finding]) -> dict[str, float]:
    """Return what each group of causes takes of the time."""
    shares: dict[str, float] = {}
    for one in found:
        shares[_group(one)] = shares.get(_group(one), 0.0) + one.share
    return shares


def _together(first: Finding, groups: dict[str, float]) -> str:
    """Return what the group of a cause takes, where that is much more than the cause alone."""
    group, share = _group(first), groups[_group(first)]
    if group != _LOADING or first.share > 0.75 * share:
        return ""
    return f"{group} takes {share:.0%} of the time in several ways; the largest: "


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
    lost, following = analysis.wait, found[0] if found else None
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
        runner_up=following if following and following.share >= NAMED_MIN else None,
        findings=tuple(found),
    )
