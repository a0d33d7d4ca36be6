"""An analysis as text: for terminals, logs and CI."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

import numpy as np

from penstock.report.analysis.values import CATEGORIES, Advice, Analysis
from penstock.report.pages.words import cannot_see_text, evidence_text
from penstock.units import show_bytes, show_count, show_seconds

WIDTH = 80
BAR_WIDTH = 24
EPOCHS_MAX, RANKS_MAX = 10, 16
PART_MIN = 0.005
"""Parts of a step below this share are not worth a line."""


def verdict_text(analysis: Analysis, *, width: int = WIDTH) -> str:
    """Return the verdict, the first advice and the notes: what the end of a traced job shows."""
    lines = _wrapped(analysis.verdict.sentence, width)
    if analysis.advice:
        lines += _advice_lines(analysis.advice[0], width)
    for note in analysis.notes:
        lines += _wrapped(f"Note: {note}", width)
    return "\n".join(lines)


def report_text(analysis: Analysis, *, width: int = WIDTH) -> str:
    """Return the whole report."""
    blocks = [
        verdict_lines(analysis, width),
        completeness_lines(analysis, width),
        step_lines(analysis, width),
        advice_lines(analysis, width),
        parameter_lines(analysis, width),
        phase_lines(analysis, width),
        source_lines(analysis, width),
        pattern_lines(analysis, width),
        spread_lines(analysis, width),
        rank_lines(analysis, width),
        ["Scaling", *scaling_lines(analysis, width)],
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def verdict_lines(analysis: Analysis, width: int = WIDTH) -> list[str]:
    """Return the verdict with its evidence."""
    verdict = analysis.verdict
    lines = _wrapped(verdict.sentence, width)
    lines += _wrapped(
        f"share {verdict.share:.0%} ({verdict.low:.0%} to {verdict.high:.0%}); "
        f"{analysis.samples_s:,.0f} samples/s; a step takes {show_seconds(analysis.step_mean_s)} "
        f"on average, {show_seconds(analysis.step_s)} at the median",
        width,
        "  ",
    )
    for evidence in verdict.evidence:
        lines += _wrapped(f"- {': '.join(evidence_text(evidence))}", width, "  ", "    ")
    if verdict.runner_up is not None:
        lines += _wrapped(f"Next: {verdict.runner_up.sentence}.", width)
    for note in analysis.notes:
        lines += _wrapped(f"Note: {note}", width)
    return lines


def completeness_lines(analysis: Analysis, width: int = WIDTH) -> list[str]:
    """Return how much of the run the trace holds."""
    seen = analysis.completeness
    share = seen.traced_share
    traced = f"{show_bytes(seen.read_bytes)} in the trace"
    if share is not None:
        traced += f", {share:.1%} of what the kernel counted in processes that it sampled"
    lines = ["Completeness"]
    lines += _wrapped(
        f"{show_count(seen.num_spans)} spans; {show_count(seen.delivered_samples)} samples "
        f"delivered; {traced}; {sum(seen.dropped.values())} rows dropped; unexplained "
        f"{max(0.0, analysis.unexplained):.1%} of the time",
        width,
        "  ",
    )
    if seen.clock_error_s:
        lines += _wrapped(
            f"clocks: {seen.clock}, within {show_seconds(seen.clock_error_s)}", width, "  "
        )
    return lines + _wrapped(cannot_see_text(seen.cannot_see), width, "  ", "    ")


def step_lines(analysis: Analysis, width: int = WIDTH) -> list[str]:
    """Return where the time of a step goes."""
    rows = [(n, analysis.parts[n]) for n in CATEGORIES if analysis.parts[n] >= PART_MIN]
    lines = ["Where the time of a step goes"]
    bar = max(4, min(BAR_WIDTH, width - 46))
    for name, share in rows:
        steady = analysis.steady.get(name)
        later = f"  later epochs {steady:>5.1%}" if steady is not None and width >= 72 else ""
        filled = "#" * round(share * bar)
        lines.append(
            f"  {name:<15}{share:>6.1%} {show_seconds(share * analysis.step_mean_s):>9} "
            f"{filled:<{bar}}{later}".rstrip()
        )
    for name, share in analysis.fetch_by_source.items():
        if share >= PART_MIN:
            lines.append(f"    fetch from {name}: {share:.1%}")
    return lines


def advice_lines(analysis: Analysis, width: int = WIDTH) -> list[str]:
    """Return the ranked advice."""
    if not analysis.advice:
        return [
            "Advice",
            *_wrapped("Nothing that the loader could do is worth changing.", width, "  "),
        ]
    lines = ["Advice"]
    for advice in analysis.advice:
        lines += _advice_lines(advice, width)
    return lines


def _advice_lines(advice: Advice, width: int) -> list[str]:
    gain = (
        f"{advice.gain:+.0%} ({advice.gain_low:+.0%} to {advice.gain_high:+.0%}, "
        f"confidence {advice.confidence})"
    )
    lines = _wrapped(f"{advice.rank}. {advice.title}: {gain}", width, "", "   ")
    lines += _wrapped(advice.command, width, "   ", "     ")
    if advice.cost != "none":
        lines += _wrapped(f"costs: {advice.cost}", width, "   ", "     ")
    return lines


def parameter_lines(analysis: Analysis, width: int = WIDTH) -> list[str]:
    """Return the parameters of the three families."""
    lines = ["Parameters (* can be changed)"]
    for family in ("application", "dataset", "system"):
        found = [p for p in analysis.parameters if p.family == family]
        if found:
            lines.append(f"  {family}")
        for p in found:
            mark = "*" if p.is_changeable else " "
            text = f"{p.label:<26} {p.shown}" + (f" ({p.origin})" if width >= 72 else "")
            lines += _wrapped(f"{mark} {text}", width, "   ", " " * 10)
    return lines


def phase_lines(analysis: Analysis, width: int = WIDTH) -> list[str]:
    """Return the phases of the run."""
    rows = []
    for phase in analysis.phases:
        name = f"{phase.name} {phase.epoch}" if phase.name == "steady" else phase.name
        if phase.repeats > 1:
            name += f" x{phase.repeats}"
        read = sum(phase.bytes_by_source.values())
        rows.append(
            (
                name,
                show_seconds(phase.start_s),
                show_seconds(phase.busy_s),
                show_seconds(phase.wait_s),
                show_bytes(read),
                show_count(phase.num_requests),
            )
        )
    header = ("phase", "begins", "lasts", "waits", "read", "requests")
    return ["Phases", *_table(header, rows, width)]


def pattern_lines(analysis: Analysis, width: int = WIDTH) -> list[str]:
    """Return the pattern of each rank, and how ranks share."""
    rows = [
        (
            str(p.rank),
            p.label,
            f"{p.sequential:.0%}/{p.strided:.0%}/{p.random:.0%}",
            show_bytes(p.size_p50),
            f"{p.requests_per_sample:.2g}",
            f"{p.opens_per_sample:.2g}",
            f"{p.concurrency_mean:.2g}",
        )
        for p in analysis.patterns[:RANKS_MAX]
    ]
    header = ("rank", "pattern", "seq/strided/random", "size", "req/sample", "opens", "in flight")
    shared = analysis.sharing
    lines = ["Access pattern", *_table(header, rows, width)]
    text = f"{shared.num_objects} objects, {shared.shared_objects:.0%} read by several ranks"
    if shared.duplicate_bytes:
        text += f", {shared.duplicate_bytes:.0%} of bytes read by more than one rank in an epoch"
    if shared.amplification is not None:
        text += f"; {shared.amplification:.2f} bytes read for each byte of a sample"
    return [*lines, *_wrapped(text, width, "  ")]


def source_lines(analysis: Analysis, width: int = WIDTH) -> list[str]:
    """Return what each epoch read from where, and what a cache made of it."""
    names = list(dict.fromkeys(name for e in analysis.epochs for name in e.bytes_by_source))
    if not names:
        return []
    rows = [
        (
            str(epoch.epoch),
            f"{epoch.samples_s:,.0f}",
            *(show_bytes(epoch.bytes_by_source.get(name, 0)) for name in names),
        )
        for epoch in analysis.epochs[:EPOCHS_MAX]
    ]
    lines = ["Sources", *_table(("epoch", "samples/s", *names), rows, width)]
    if len(analysis.epochs) > EPOCHS_MAX:
        lines.append(f"  and {len(analysis.epochs) - EPOCHS_MAX} epochs more")
    bound = analysis.bound
    if bound is not None and bound.cache_bytes:
        lines += _wrapped(
            f"caches of {show_bytes(bound.cache_bytes)} for {show_bytes(bound.dataset_bytes)}: "
            f"{bound.hits:.0%} of later reads hit them, {bound.hits_possible:.0%} are possible, "
            f"{bound.hits_lru:.0%} with LRU; {bound.ratio:.2f} times the bytes of the bound",
            width,
            "  ",
        )
    return lines


def spread_lines(analysis: Analysis, width: int = WIDTH) -> list[str]:
    """Return how sizes and times are spread."""
    rows = []
    for found in analysis.distributions:
        show = show_bytes if found.unit == "B" else show_seconds
        figures = (found.p50, found.p90, found.p99, found.maximum)
        rows.append((found.name, *map(show, figures)))
    return ["Sizes and times", *_table(("", "median", "90 %", "99 %", "largest"), rows, width)]


def rank_lines(analysis: Analysis, width: int = WIDTH) -> list[str]:
    """Return who waits for batches, and who is waited for; nothing of a single rank."""
    steps = analysis.steps
    if analysis.num_ranks < 2:
        return []
    barrier_s = steps.parts["barrier"]
    rows = []
    for rank in np.unique(steps.rank).tolist():
        mine = steps.rank == rank
        waits = float(steps.wait_s[mine].sum() / max(1e-12, steps.wall_s[mine].sum()))
        caused_s = float(barrier_s[steps.waited_for == rank].sum())
        rows.append((waits, (str(rank), f"{waits:.0%}", show_seconds(caused_s))))
    rows.sort(key=lambda row: -row[0])
    header = ("rank", "waits for batches", "others waited for it")
    return ["Ranks", *_table(header, [row for _, row in rows[:RANKS_MAX]], width)]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], width: int) -> list[str]:
    """Return a table that leaves out columns from the right where it does not fit."""
    cells = [list(header), *map(list, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    shown = len(header)
    while shown > 2 and 2 + sum(widths[:shown]) + 2 * (shown - 1) > width:
        shown -= 1
    return [
        "  " + "  ".join(f"{c:<{w}}" for c, w in zip(row[:shown], widths, strict=False)).rstrip()
        for row in cells
    ]


def _wrapped(text: str, width: int, indent: str = "", rest: str | None = None) -> list[str]:
    return textwrap.wrap(
        text,
        max(20, width),
        initial_indent=indent,
        subsequent_indent=indent if rest is None else rest,
        break_long_words=False,
    )


def scaling_lines(analysis: Analysis, width: int = WIDTH) -> list[str]:
    """Return how demand grows with ranks, from what this run asked for."""
    read_s = analysis.read_rate()
    opens_s = sum(p.num_opens for p in analysis.patterns) / max(1e-9, analysis.wall_s)
    in_flight = sum(p.concurrency_mean for p in analysis.patterns)
    busy = max(0.05, 1 - analysis.wait)
    ranks = analysis.num_ranks
    rows = [
        (
            show_count(ranks * factor),
            f"{show_bytes(read_s * factor)}/s",
            f"{show_bytes(read_s * factor / busy)}/s",
            f"{opens_s * factor:,.0f}",
            f"{in_flight * factor:,.0f}",
        )
        for factor in (1, 2, 4, 8)
    ]
    header = ("ranks", "reads", "reads without waits", "opens/s", "requests in flight")
    lines = _table(header, rows, width)
    if analysis.sharing.duplicate_bytes > 0.1:
        lines += _wrapped(
            f"{analysis.sharing.duplicate_bytes:.0%} of bytes are read by more than one rank: what "
            "the whole job reads in an epoch grows with its ranks.",
            width,
            "  ",
        )
    return lines + _wrapped("Forecasts with bands: penstock predict RUN --nodes N", width, "  ")
