"""The report of a run as a page: an analysis in, a `Page` of charts, tables and sentences out.

Sections stand in the order of a reader's questions: what limits the run, what to change, where the
time goes, which rank, which source, which access pattern, how it scales, what it needs, and how all
of this is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.report.analysis.values import Analysis, Distribution
from penstock.report.charts import Listing, Page, PageSection, PageTable, Part, Prose, Tiles
from penstock.report.pages.access_charts import access_section
from penstock.report.pages.cache_charts import cache_section
from penstock.report.pages.time_charts import ranks_section, sources_section, time_section
from penstock.report.pages.words import cannot_see_text, evidence_text, gain_text, percent
from penstock.trace import Trace
from penstock.units import show_bytes, show_count, show_seconds

_RECORDERS = {
    "loader": "the loader",
    "python": "hooks in Python",
    "preload": "a preloaded library",
}


def report_page(analysis: Analysis, trace: Trace, more: Sequence[PageSection] = ()) -> Page:
    """Return the report of a run; `more` are sections about scaling and resources."""
    sections = [
        _verdict(analysis),
        _advice(analysis),
        time_section(analysis),
        ranks_section(analysis),
        sources_section(analysis),
        access_section(analysis, trace),
        _distributions(analysis),
        cache_section(analysis),
        *more,
        _parameters(analysis),
        _phases(analysis),
        _method(analysis),
    ]
    return Page(
        title=f"Training run {trace.folder.name}",
        lead=(
            f"{analysis.loader} loader, {analysis.num_ranks} "
            f"{'rank' if analysis.num_ranks == 1 else 'ranks'}, "
            f"{show_count(analysis.num_steps)} steps in {show_seconds(analysis.wall_s)}"
        ),
        sections=[section for section in sections if section is not None],
    )


def _verdict(analysis: Analysis) -> PageSection:
    verdict = analysis.verdict
    parts: list[Part] = [
        Prose(text=verdict.sentence, kind="verdict"),
        Tiles(
            tiles=[
                (show_count(round(analysis.samples_s)), "samples a second, whole job"),
                (show_seconds(analysis.step_mean_s), "mean step"),
                (show_seconds(analysis.step_s), "median step"),
                (percent(analysis.wait), "of the time waiting for batches"),
                (percent(analysis.interference.share), "lost to the loader's work beside a step"),
            ]
        ),
    ]
    if verdict.evidence:
        rows = [list(evidence_text(evidence)) for evidence in verdict.evidence]
        parts.append(PageTable(head=["What speaks for it", ""], rows=rows))
    if verdict.runner_up is not None:
        parts.append(Prose(text=f"Next: {verdict.runner_up.sentence}."))
    parts += [Prose(text=note) for note in analysis.notes]
    parts.append(Prose(text=completeness_text(analysis), kind="dim"))
    return PageSection(title="Verdict", parts=parts)


def completeness_text(analysis: Analysis) -> str:
    """Return in a sentence or two how much of the run the trace holds."""
    known = analysis.completeness
    by = " and ".join(_RECORDERS.get(name, name) for name in known.recorded_by) or "the loader"
    text = f"Recorded by {by}: {show_count(known.num_spans)} spans"
    if known.read_bytes:
        text += f", {show_bytes(known.read_bytes)} of reads"
    if known.traced_share is not None:
        text += f", {percent(known.traced_share)} of what the kernel counted where it was asked"
    text += "."
    if known.dropped:
        dropped = ", ".join(f"{show_count(n)} {kind}" for kind, n in known.dropped.items())
        text += f" Left out because files were full: {dropped}."
    if analysis.unexplained > 0.01:
        text += f" {percent(analysis.unexplained)} of the time is not explained by the trace."
    return f"{text} {cannot_see_text(known.cannot_see)}".strip()


def _advice(analysis: Analysis) -> PageSection:
    if not analysis.advice:
        text = "Nothing that the loader could do is worth changing."
        return PageSection(title="What to change", parts=[Prose(text=text)])
    parts: list[Part] = [
        PageTable(
            head=["", "Change", "Predicted throughput", "Confidence", "Cost"],
            rows=[
                [
                    str(advice.rank),
                    advice.title,
                    gain_text(advice.gain, advice.gain_low, advice.gain_high),
                    advice.confidence,
                    advice.cost,
                ]
                for advice in analysis.advice
            ],
            left=(0, 1, 3, 4),
            strong=(0,),
        )
    ]
    said = {analysis.verdict.sentence}
    for advice in analysis.advice:
        # Several changes against one cause give the same reason: the first one says it.
        why = "" if _is_said(advice.why, said) else f" {advice.why}"
        said.add(advice.why)
        title = f"{advice.rank}. {advice.title[:1].upper()}{advice.title[1:]}."
        parts += [Prose(text=title + why), Listing(text=advice.command, is_wrapped=True)]
    return PageSection(title="What to change", parts=parts)


def _is_said(why: str, said: set[str]) -> bool:
    """Return whether a sentence, or one that ends with it, was said before."""
    return any(sentence.lower().endswith(why.lower()) for sentence in said)


def _distributions(analysis: Analysis) -> PageSection | None:
    from penstock.report.charts import Axis, Line, LineChart

    def chart(found: Distribution) -> LineChart:
        counts = [*found.counts.tolist(), 0]
        unit = "bytes" if found.unit == "B" else found.unit
        axis = Axis(name=found.name, unit=unit, log=True)
        return LineChart(
            title=found.name[:1].upper() + found.name[1:],
            reading=(
                f"Half are at most {axis.text(found.p50)}, 99 % at most {axis.text(found.p99)}; "
                f"the largest is {axis.text(found.maximum)}."
            ),
            x=axis,
            y=Axis(name="count"),
            lines=[Line(name=found.name, x=found.edges, y=counts, style="filled step")],
            is_half=True,
        )

    charts = [chart(found) for found in analysis.distributions if found.counts.sum() > 0]
    return PageSection(title="Sizes and times", parts=charts) if charts else None


def _parameters(analysis: Analysis) -> PageSection:
    families = {"application": "Application", "dataset": "Data set", "system": "System"}
    parts: list[Part] = []
    for family, title in families.items():
        rows = [
            [p.label, p.shown, p.origin, "yes" if p.is_changeable else "no"]
            for p in analysis.parameters
            if p.family == family
        ]
        if rows:
            head = [title, "Value", "Known from", "You can change it"]
            parts.append(PageTable(head=head, rows=rows, left=(0, 1, 2, 3)))
    return PageSection(title="Parameters", parts=parts)


def _phases(analysis: Analysis) -> PageSection | None:
    if not analysis.phases:
        return None
    rows = [
        [
            phase.name if phase.epoch < 0 else f"{phase.name} (epoch {phase.epoch})",
            f"{phase.start_s:.1f} to {phase.end_s:.1f} s",
            show_count(phase.num_steps),
            show_seconds(phase.wait_s),
            ", ".join(_sources_of(phase.bytes_by_source)) or "–",
            show_count(phase.num_requests),
            show_count(phase.num_opens),
        ]
        for phase in analysis.phases
    ]
    head = ["Phase", "When", "Steps", "Waiting", "Bytes", "Requests", "Opens"]
    return PageSection(title="Phases", parts=[PageTable(head=head, rows=rows, left=(0, 1, 4))])


def _sources_of(bytes_by_source: object) -> Iterator[str]:
    assert isinstance(bytes_by_source, dict)
    for source, size_bytes in bytes_by_source.items():
        if size_bytes:
            yield f"{source} {show_bytes(size_bytes)}"


def _method(analysis: Analysis) -> PageSection:
    notes = [
        "Each wait of the training loop is compared with what its batch was going through at that "
        "moment; work that delayed nobody gets no blame.",
        f"Clocks: {analysis.completeness.clock}.",
    ]
    return PageSection(
        title="How this is known", parts=[Prose(text="\n\n".join(notes), kind="dim")]
    )
