"""A plan in words and numbers, for people. Plain text, at most `WIDTH` columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.flow.cost import connection_bytes_s, whole_block_share
from penstock.simulate.plan.planner import EpochPlan, RunPlan
from penstock.simulate.plan.traffic import RUN_BYTES
from penstock.simulate.plan.what_if import PlanGain, blocks_first_gain_s, what_if
from penstock.units import show_bytes, show_count, show_seconds

WIDTH = 100
_WORTH_SHARE = 0.03
"""A change that gains a smaller share of the time is shown as no gain."""

SOURCES = {
    "store": "from the store",
    "memory": "from memory tiers",
    "disk": "from disk tiers",
    "peers": "between nodes",
}
RESOURCES = {
    "store": "the store",
    "memory": "the memory tier",
    "disk": "the disk tier",
    "link": "the link between nodes",
    "cores": "the cores (copying, decoding)",
    "compute": "the training itself",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSection:
    """A heading and the lines under it."""

    heading: str
    lines: tuple[str, ...]


def explain(plan: RunPlan) -> str:
    """Return a plan as text."""
    out = []
    for section in sections(plan):
        out += [section.heading, *(f"  {line}" for line in section.lines), ""]
    return "\n".join(out)


def sections(plan: RunPlan) -> tuple[PlanSection, ...]:
    """Return a plan as headings with lines under them."""
    return (
        PlanSection(heading="The run", lines=_wrapped(_run(plan))),
        PlanSection(heading="What comes from where, on all nodes together", lines=_sources(plan)),
        PlanSection(heading="How long each resource of a node is busy", lines=_resources(plan)),
        PlanSection(heading="In short", lines=_wrapped(_short(plan))),
        PlanSection(heading="How it is read", lines=_wrapped(_reading(plan))),
        PlanSection(heading="What more would buy", lines=_gains(plan, what_if(plan))),
    )


def _wrapped(lines: Sequence[str]) -> tuple[str, ...]:
    """Wrap sentences into lines that fit behind an indent of two."""
    return tuple(
        part for line in lines for part in textwrap.wrap(line, WIDTH - 2, subsequent_indent="  ")
    )


def _run(plan: RunPlan) -> list[str]:
    summary, work, held = plan.summary, plan.work, plan.held
    world = work.world
    units = f"{show_count(summary.num_units)} units"
    if summary.num_blocks:
        units = f"{show_count(summary.num_blocks)} blocks of {summary.samples_a_block:.3g} samples"
    lines = [
        f"{show_count(summary.num_samples)} samples, {show_bytes(summary.size_bytes)} in {units}",
        f"{_count(work.num_nodes, 'node')}, {_count(world.num_ranks, 'rank')}, batches of "
        f"{work.batch_size} on each, {_count(work.num_epochs, 'epoch')}, shuffle {work.shuffle}",
    ]
    tiers = " and ".join(f"{show_bytes(t.capacity_bytes)} of {t.kind}" for t in plan.machine.tiers)
    if not tiers:
        return [*lines, "no tiers: every epoch reads everything from the store"]
    share = held.total_bytes / max(1, summary.size_bytes)
    whose = "on each node" if work.num_nodes > 1 else "on the node"
    lines.append(f"tiers {whose}: {tiers}")
    if work.num_nodes == 1:
        lines.append(f"which hold {share:.0%} of the data set")
    elif work.peers:
        lines.append(f"which hold {share:.0%} of the data set, all nodes' together (peers=True)")
        if held.copies_share:
            copies = held.copies_share
            lines.append(f"and copies: a node has room for {copies:.0%} of what others hold")
    else:
        lines.append(f"which hold {share:.0%} of the data set, each node's for itself")
    return lines


def _count(count: int, what: str) -> str:
    return f"{show_count(count)} {what}{'' if count == 1 else 's'}"


def epochs_shown(plan: RunPlan) -> list[tuple[str, EpochPlan]]:
    """Return the names and plans of the epochs that are shown."""
    if plan.work.num_epochs == 1:
        return [("the epoch", plan.first)]
    last = "last epoch" if plan.is_growing else "each later one"
    return [("first epoch", plan.first), (last, plan.later)]


def _sources(plan: RunPlan) -> tuple[str, ...]:
    epochs = epochs_shown(plan)
    rows = [["", *(name for name, _ in epochs)]]
    for source, words in SOURCES.items():
        traffic = [epoch.of(source) for _, epoch in epochs]
        if source == "store" or any(t.size_bytes for t in traffic):
            rows.append([words, *(show_bytes(t.size_bytes) for t in traffic)])
        if source == "store":
            rows.append(["  in requests", *(show_count(round(t.num_requests)) for t in traffic)])
    return _aligned(rows)


def _resources(plan: RunPlan) -> tuple[str, ...]:
    epochs = epochs_shown(plan)
    rows = [["", *(name for name, _ in epochs)]]
    for resource, words in RESOURCES.items():
        seconds = [epoch.load_s(resource) for _, epoch in epochs]
        if any(seconds):
            rows.append([words, *map(_time, seconds)])
    return _aligned(rows)


def _time(seconds: float) -> str:
    return show_seconds(seconds) if seconds else "-"


def _aligned(rows: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return rows as lines: the first column flush left, the others flush right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return tuple(
        f"{row[0]:<{widths[0]}}"
        + "".join(f"   {cell:>{w}}" for cell, w in zip(row[1:], widths[1:], strict=True))
        for row in rows
    )


def _short(plan: RunPlan) -> list[str]:
    lines = []
    for name, epoch in epochs_shown(plan):
        limit = RESOURCES[epoch.bottleneck.resource]
        line = f"{name}: {show_seconds(epoch.seconds)}, limited by {limit}"
        if epoch.stall_share:
            line += f"; training waits {epoch.stall_share:.0%} of the time"
        lines.append(line)
    if plan.work.num_epochs > 1:
        lines.append(f"all {plan.work.num_epochs} epochs: {show_seconds(plan.total_s)}")
    ratio = plan.store_bytes / max(1, plan.bound_bytes)
    lines.append(
        f"from the store in all: {show_bytes(plan.store_bytes)}; the least possible with as much "
        f"room: {show_bytes(plan.bound_bytes)} (ratio {ratio:.2f})"
    )
    return lines


def _reading(plan: RunPlan) -> list[str]:
    summary = plan.summary
    request_bytes = plan.first.of("store").request_bytes
    lines = [
        f"{plan.requests_in_flight} requests in flight on each node, "
        f"{show_bytes(request_bytes)} each in the first epoch",
        f"begun {show_seconds(plan.look_ahead_s)} before their step, so that one step in a hundred "
        "waits for the slowest",
        f"two ranges are read as one if at most {show_bytes(plan.merge_gap_bytes)} lie between",
    ]
    if summary.num_blocks:
        lines.append("samples come in blocks: a block is read whole, whatever is used of it")
    elif plan.held.total_bytes < summary.size_bytes and plan.work.mode(1) == "global":
        lines.append(_granularity(plan))
    return lines + _advice(plan)


def _granularity(plan: RunPlan) -> str:
    """Return whether units without a place are read by sample or by run, and why."""
    if plan.reads_whole_runs:
        return (
            f"what has no place is read by sample, but runs of {show_bytes(RUN_BYTES)} would be "
            'faster: shuffle="blocks" reads those'
        )
    store, read_bytes = plan.machine.store, plan.summary.read_bytes
    share = whole_block_share(
        max(1, round(RUN_BYTES / read_bytes)),
        read_bytes,
        store.latency_s,
        connection_bytes_s(store),
    )
    return (
        f"what has no place is read by sample: runs of {show_bytes(RUN_BYTES)} pay if {share:.0%} "
        f"of them is used, {plan.staged_share:.1%} is"
    )


def _advice(plan: RunPlan) -> list[str]:
    """Return the gain of another shuffle."""
    gain_s = blocks_first_gain_s(plan)
    if gain_s > _WORTH_SHARE * plan.first.seconds:
        return [
            f'shuffle="blocks-first" would shorten the first epoch to '
            f"{show_seconds(plan.first.seconds - gain_s)}: large reads, mixed inside a window only"
        ]
    if plan.work.shuffle == "global":
        return ["a first epoch in blocks (large reads) would not be shorter"]
    return []


def _gains(plan: RunPlan, several: Sequence[PlanGain]) -> tuple[str, ...]:
    rows = []
    for change in several:
        share = change.gain_s / plan.total_s if plan.total_s else 0.0
        saved = change.store_bytes_saved / max(1.0, plan.store_bytes)
        what = "nothing" if abs(share) < _WORTH_SHARE else _gain(share, change)
        if abs(saved) >= _WORTH_SHARE:
            less = "less" if saved > 0 else "more"
            what += f", {show_bytes(abs(change.store_bytes_saved))} {less} from the store"
        rows.append((change.what, what))
    wide = max(len(what) for what, _ in rows)
    return tuple(f"{what:<{wide}}   {gain}" for what, gain in rows)


def _gain(share: float, change: PlanGain) -> str:
    word = "sooner" if share > 0 else "later"
    return f"{show_seconds(abs(change.gain_s))} ({abs(share):.0%}) {word}"
