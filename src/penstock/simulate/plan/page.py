"""A plan as a page: sources of the bytes, the limit, and the gains of changes."""

from __future__ import annotations

from penstock.report.charts import Axis, BarChart, Bars, Listing, Page, PageSection
from penstock.simulate.plan.explain import RESOURCES, SOURCES, epochs_shown, sections
from penstock.simulate.plan.planner import RunPlan
from penstock.simulate.plan.what_if import what_if


def plan_page(plan: RunPlan, *, title: str, lead: str = "") -> Page:
    """Return the page: charts, and the same text as in the terminal below them."""
    texts = {section.heading: "\n".join(section.lines) for section in sections(plan)}
    return Page(
        title=title,
        lead=lead,
        sections=[
            PageSection(title="In short", parts=[Listing(text=texts["In short"], is_wrapped=True)]),
            PageSection(title="What comes from where", parts=[_bytes(plan)]),
            PageSection(title="What limits it", parts=[_busy(plan)]),
            PageSection(title="What more would buy", parts=[_gains(plan)]),
            PageSection(
                title="The plan in words",
                parts=[Listing(text=f"{name}\n{text}\n") for name, text in texts.items()],
            ),
        ],
    )


def _bytes(plan: RunPlan) -> BarChart:
    epochs = epochs_shown(plan)
    amounts = {s: [e.of(s).size_bytes for _, e in epochs] for s in SOURCES}
    return BarChart(
        title="Bytes of an epoch by source, all nodes together",
        reading="What a tier or another node gives, the store need not give again.",
        category=Axis(name="epoch"),
        categories=[name for name, _ in epochs],
        value=Axis(name="bytes", unit="bytes"),
        bars=[
            Bars(name=SOURCES[s], values=v) for s, v in amounts.items() if s == "store" or any(v)
        ],
        is_stacked=True,
        is_horizontal=True,
    )


def _busy(plan: RunPlan) -> BarChart:
    epochs = epochs_shown(plan)
    used = [r for r in RESOURCES if any(epoch.load_s(r) for _, epoch in epochs)]
    return BarChart(
        title="How long each resource of a node is busy in an epoch",
        reading="All of it overlaps: an epoch takes as long as the longest bar.",
        category=Axis(name="resource"),
        categories=[RESOURCES[r] for r in used],
        value=Axis(name="time", unit="s"),
        bars=[Bars(name=name, values=[epoch.load_s(r) for r in used]) for name, epoch in epochs],
        is_horizontal=True,
        has_labels=True,
    )


def _gains(plan: RunPlan) -> BarChart:
    changes = what_if(plan)
    return BarChart(
        title="How much sooner the run would end, each change alone",
        reading="A bar to the left means that the change costs time.",
        category=Axis(name="change"),
        categories=[change.what for change in changes],
        value=Axis(name="time saved", unit="s"),
        bars=[Bars(name="time saved", values=[change.gain_s for change in changes])],
        is_horizontal=True,
        has_labels=True,
    )
