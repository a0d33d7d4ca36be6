"""The outlook of a report: how the run scales, and what it needs so that it does not wait."""

from __future__ import annotations

from penstock.errors import PenstockError
from penstock.report.charts import Axis, Line, LineChart, PageSection, PageTable, Part, Prose
from penstock.report.model import RunModel, calibrate
from penstock.report.model.bands import FIT_MAX
from penstock.report.model.resources import LITTLE_STALL, ResourceNeed, needs
from penstock.report.model.scaling import ScalingCurve, scaling_curve
from penstock.report.pages.words import LABELS, percent
from penstock.trace import Trace
from penstock.units import show_bytes, show_count

NODES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Numbers of nodes that the curve of a report shows."""
MISFIT_MAX = 3 * FIT_MAX
"""A model that is further off on its own run says nothing about others."""
_NAMES = {
    "store_bandwidth": "Bandwidth of the store, whole job",
    "workers": "Workers of a rank",
    "cores": "Cores of a node",
    "memory_cache_bytes": "Memory cache of a node",
}


def outlook_sections(trace: Trace) -> list[PageSection]:
    """Return scaling and resources; a sentence where the trace is not enough for a model."""
    try:
        model = calibrate(trace)
        if abs(model.self_check()) > MISFIT_MAX:
            return [PageSection(title="Scaling", parts=[Prose(text=_misfit(model))])]
        curve = scaling_curve(model, NODES)
        needed = needs(model)
    except PenstockError as error:
        told = Prose(text=f"There is no forecast for this run: {error}")
        return [PageSection(title="Scaling", parts=[told])]
    return [_scaling(model, curve), _resources(needed)]


def _misfit(model: RunModel) -> str:
    return (
        "There is no forecast for this run: the model's replay of it is "
        f"{100 * model.self_check():+.0f} % off the measured step time, so curves for other scales "
        "would mislead. Trace a longer run on a machine that does nothing else."
    )


def _scaling(model: RunModel, curve: ScalingCurve) -> PageSection:
    forecasts = list(curve.forecasts.values())
    ranks, rates = [f.num_ranks for f in forecasts], [f.samples_s for f in forecasts]
    chart = LineChart(
        title="Throughput by number of ranks",
        reading="The band holds nine of ten runs. Where the line leaves the ideal, a limit begins.",
        x=Axis(name="ranks", log=True),
        y=Axis(name="samples/s", log=True),
        lines=[
            Line(
                name="predicted",
                x=ranks,
                y=rates,
                low=[forecast.samples_s_low for forecast in forecasts],
                high=[forecast.samples_s_high for forecast in forecasts],
            ),
            Line(
                name="ideal",
                x=ranks,
                y=[rates[0] * count / ranks[0] for count in ranks],
                is_dashed=True,
            ),
            Line(
                name="this run",
                x=[model.settings.num_ranks],
                y=[model.settings.batch_size * model.settings.num_ranks / model.measured.step_s],
                style="points",
            ),
        ],
    )
    rows = [
        [
            show_count(nodes),
            show_count(forecast.num_ranks),
            show_count(round(forecast.samples_s)),
            f"{forecast.epoch_s[-1]:.3g} s",
            percent(forecast.stall_share),
            show_bytes(forecast.store_bytes),
            show_bytes(forecast.peer_bytes),
            show_bytes(forecast.memory_bytes),
            _part(forecast.limit),
        ]
        for nodes, forecast in curve.forecasts.items()
    ]
    head = [
        "Nodes", "Ranks", "Samples/s", "Epoch", "Waiting", "From the store", "Between nodes",
        "Memory of a node", "Limit",
    ]  # fmt: skip
    parts: list[Part] = [chart, PageTable(head=head, rows=rows, left=(-1,))]
    parts += [
        Prose(
            text=f"From {take.nodes} nodes on, the limit is {_part(take.after)}, not "
            f"{_part(take.before)}."
        )
        for take in curve.takeovers
    ]
    notes = " ".join(f"{note[:1].upper()}{note[1:]}." for note in forecasts[-1].notes)
    if notes:
        parts.append(Prose(text=notes, kind="dim"))
    return PageSection(title="Scaling", parts=parts)


def _part(limit: str) -> str:
    return LABELS.get(limit, limit).removeprefix("wait: ")


def _resources(needed: tuple[ResourceNeed, ...]) -> PageSection:
    rows = [
        [
            _NAMES.get(need.resource, need.resource),
            _amount(need, need.has) if need.has is not None else "unknown",
            _amount(need, need.no_stall),
            _amount(need, need.little_stall),
        ]
        for need in needed
    ]
    little = f"For at most {percent(LITTLE_STALL)} waiting"
    head = ["Resource, all others as they are", "This run", "For no waiting", little]
    return PageSection(title="Resources needed", parts=[PageTable(head=head, rows=rows)])


def _amount(need: ResourceNeed, value: float | None) -> str:
    if value is None:
        return "no amount alone"
    match need.resource:
        case "store_bandwidth":
            return f"{show_bytes(value)}/s"
        case "memory_cache_bytes":
            return show_bytes(value)
    return f"{value:g}"
