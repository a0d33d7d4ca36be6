"""A program or a plan in words and numbers, for people. Plain text, at most `WIDTH` columns.

Numbers of bytes are exact; times are predictions of the cost model.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from penstock.step.program.bytes import sent_by_task
from penstock.step.program.cost import MachineCosts, TaskWork, unmeasured_calls, work_of
from penstock.step.program.lower import lower
from penstock.step.program.nodes import Program
from penstock.step.program.plan import COMPUTE, COPY, DECODE, FETCH, Plan, Task
from penstock.step.program.rewrites import as_method
from penstock.step.program.simulate import simulate
from penstock.step.program.timeline import Span, Timeline
from penstock.units import show_bytes, show_count, show_seconds

__all__ = ["Explanation", "explain"]

WIDTH = 100
_NAME_WIDTH = 28
_ROWS_MAX = 24
"""Lines of the timeline; all chunks of a task share one."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What a plan does: the numbers, and their text."""

    plan: Plan
    timeline: Timeline
    costs: MachineCosts

    @property
    def step_s(self) -> float:
        """How long a step takes."""
        return self.timeline.step_s

    @property
    def exposed_s(self) -> float:
        """How long in a step computation waits for communication."""
        return self.timeline.exposed_s

    @cached_property
    def _works(self) -> list[tuple[Task, TaskWork]]:
        return [(task, work_of(task, self.plan, self.costs)) for task in self.plan.tasks]

    @property
    def one_after_the_other_s(self) -> float:
        """How long a step would take if nothing overlapped."""
        return sum(_alone_s(work, self.costs) for _, work in self._works)

    @property
    def ideal_s(self) -> float:
        """How long it would take if everything overlapped: the time of the busiest resource.

        A lane does one task after the other; a wire and the processor are shared, and each task
        uses the part of them that the simulator gives it. Latencies use neither.
        """
        busy: defaultdict[str, float] = defaultdict(float)
        for task, work in self._works:
            busy[f"lane {task.lane}"] += _alone_s(work, self.costs)
            busy[f"wire {work.wire}"] += work.seconds * work.wire_share
            busy["processor"] += work.seconds * work.cores / self.costs.cores
        # A step that is simulated between others may begin with some of its work done.
        return min(self.step_s, max(busy.values(), default=0.0))

    @property
    def overlap_share(self) -> float | None:
        """The share of communication that could be hidden and is; None where none could."""
        could_s = self.one_after_the_other_s - self.ideal_s
        if could_s <= 0.01 * self.step_s:
            return None
        return max(0.0, self.one_after_the_other_s - self.step_s) / could_s

    @property
    def sent_bytes(self) -> dict[str, int]:
        """By lane: the bytes of all its tasks on the rank that sends most there.

        This is no sum of the tasks' own numbers: each task may have another busiest rank.
        """
        ranks = range(self.plan.program.mesh.num_ranks)
        out: dict[str, int] = {}
        for lane in self.plan.lanes:
            tasks = [task for task in self.plan.on(lane) if task.sent_bytes]
            if tasks:
                program = self.plan.program
                out[lane] = max(
                    sum(sent_by_task(t.nodes, program, t.kind, rank, t.chunk) for t in tasks)
                    for rank in ranks
                )
        return out

    @property
    def approximate(self) -> tuple[str, ...]:
        """The moves that round values on the wire, because the user allowed it."""
        nodes = self.plan.program.nodes
        return tuple(node.name for node in nodes if node.attr("wire") is not None)

    def __str__(self) -> str:
        sections = {
            "The step": _wrapped(_step(self)),
            "What each lane does in a step": _lanes(self),
            "When, as predicted": _times(self),
            "Memory of one rank": _memory(self),
            "In short": _wrapped(_short(self)),
        }
        lines = []
        for heading, under in sections.items():
            lines += [heading, *(f"  {line}" for line in under), ""] if under else []
        return "\n".join(lines)


@as_method
def explain(what: Program | Plan, costs: MachineCosts | None = None) -> Explanation:
    """Return what a program or a plan does, for printing."""
    plan = what if isinstance(what, Plan) else lower(what)
    chosen = costs or MachineCosts()
    return Explanation(plan=plan, timeline=simulate(plan, chosen), costs=chosen)


def _alone_s(work: TaskWork, costs: MachineCosts) -> float:
    """Return how long a task takes alone, on fewer cores than it could use."""
    return work.latency_s + work.seconds * max(1.0, work.cores / costs.cores)


def _wrapped(lines: Sequence[str]) -> tuple[str, ...]:
    return tuple(
        part for line in lines for part in textwrap.wrap(line, WIDTH - 2, subsequent_indent="  ")
    )


def _aligned(rows: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return rows as lines: the first column flush left, the others flush right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return tuple(
        (
            f"{row[0]:<{widths[0]}}"
            + "".join(f"   {cell:>{w}}" for cell, w in zip(row[1:], widths[1:], strict=True))
        ).rstrip()
        for row in rows
    )


def _step(said: Explanation) -> list[str]:
    program = said.plan.program
    ranks = f"{program.mesh.num_ranks} rank{'' if program.mesh.num_ranks == 1 else 's'}"
    lines = [
        f"program {program.name} on {program.mesh} ({ranks}), "
        f"{show_count(len(said.plan.tasks))} tasks on {len(said.plan.lanes)} lanes, "
        f"plan {said.plan.digest[:12]}"
    ]
    if program.history:
        lines.append("schedule: " + " · ".join(map(str, program.history)))
    if said.approximate:
        wires = dict.fromkeys(str(program[name].attr("wire")) for name in said.approximate)
        lines.append(
            f"approximate: {', '.join(said.approximate)} on a wire of {' and '.join(wires)}; "
            "values are not those of the program as it was written"
        )
    return lines


def _lanes(said: Explanation) -> tuple[str, ...]:
    timeline, step_s = said.timeline, max(said.step_s, 1e-12)
    rows = [["", "tasks", "sent by a rank", "busy", "of the step", "waited for"]]
    sent = said.sent_bytes
    for lane in said.plan.lanes:
        busy_s = timeline.busy_s(lane)
        rows.append(
            [
                lane,
                show_count(len(said.plan.on(lane))),
                show_bytes(sent[lane]) if lane in sent else "-",
                show_seconds(busy_s),
                f"{busy_s / step_s:.0%}",
                "-" if lane == COMPUTE else show_seconds(timeline.alone_s(lane)),
            ]
        )
    return _aligned(rows)


def _times(said: Explanation) -> tuple[str, ...]:
    """Return one line for each task, chunks of one task together, with its time as a bar."""
    start_s, end_s = said.timeline.window
    rows: dict[tuple[str, str], list[Span]] = {}
    for span in said.timeline.shown:
        rows.setdefault((span.task.lane, _stem(span.task)), []).append(span)
    largest = sorted(rows, key=lambda row: -sum(s.seconds for s in rows[row]))[:_ROWS_MAX]
    kept = [row for row in rows if row in set(largest)]
    wide = max((len(lane) for lane, _ in kept), default=0)
    bar = WIDTH - 2 - wide - _NAME_WIDTH - 14
    lines = []
    for lane, stem in kept:
        spans = rows[lane, stem]
        cells = _bar(spans, start_s, end_s, bar)
        took = show_seconds(sum(s.seconds for s in spans))
        lines.append(
            f"{lane:<{wide}} {_short_name(stem, len(spans)):<{_NAME_WIDTH}} {took:>9} {cells}"
        )
    if len(rows) > len(kept):
        rest = [row for row in rows if row not in set(largest)]
        rest_s = sum(s.seconds for row in rest for s in rows[row])
        lines.append(f"and {len(rest)} smaller ones, {show_seconds(rest_s)} in all")
    return tuple(line.rstrip() for line in lines)


def _stem(task: Task) -> str:
    return task.name.removesuffix(f"[{task.chunk}]") if task.chunk is not None else task.name


def _short_name(stem: str, count: int) -> str:
    times = f" ×{count}" if count > 1 else ""
    room = _NAME_WIDTH - len(times)
    return (stem if len(stem) <= room else stem[: room - 1] + "…") + times


def _bar(spans: Sequence[Span], start_s: float, end_s: float, width: int) -> str:
    """Return a bar of a step: full cells where tasks ran all the time, light ones for a part."""
    cell_s = max(end_s - start_s, 1e-12) / width
    covered = [0.0] * width
    for span in spans:
        first, last = ((t - start_s) / cell_s for t in (span.start_s, span.end_s))
        for at in range(max(0, int(first)), min(width, int(last) + 1)):
            covered[at] += max(0.0, min(last, at + 1) - max(first, at))
    return "".join("█" if c > 0.7 else "▒" if c > 0.02 else "·" for c in covered)


def _memory(said: Explanation) -> tuple[str, ...]:
    timeline = said.timeline
    rows = [
        ["given: states and inputs", show_bytes(timeline.given_bytes)],
        ["made in a step, at most at once", show_bytes(timeline.peak_bytes)],
    ]
    return _aligned(rows)


def _short(said: Explanation) -> list[str]:
    timeline = said.timeline
    lines = [
        f"a step takes {show_seconds(said.step_s)}; one after the other it would take "
        f"{show_seconds(said.one_after_the_other_s)}, and {show_seconds(said.ideal_s)} if all of "
        "it overlapped"
    ]
    moving_s = timeline.communication_s
    if moving_s:
        exposed = timeline.exposed_s / moving_s
        lines.append(
            f"something is on its way for {show_seconds(moving_s)}, and for "
            f"{show_seconds(timeline.exposed_s)} of that ({exposed:.0%}) nothing is computed"
        )
    if timeline.load_lanes:
        lines.append(_loading(timeline))
    if said.overlap_share is not None:
        lines.append(f"of the communication that could be hidden, {said.overlap_share:.0%} is")
    alone_s = sum(work.alone_s for task, work in said._works if task.lane == COMPUTE)
    slow_s = timeline.busy_s(COMPUTE) - alone_s
    if slow_s > 0.01 * said.step_s:
        lines.append(
            f"communication takes {show_seconds(slow_s)} of processor time from computation "
            f"({said.costs.cores:g} cores for a rank)"
        )
    return [*lines, *_doubts(said)]


def _loading(timeline: Timeline) -> str:
    """Return what loading takes by stage, and how much of it is waited for."""
    words = {FETCH: "fetching", DECODE: "decoding", COPY: "copying to the device"}
    each = [f"{words[lane]} {show_seconds(timeline.busy_s(lane))}" for lane in timeline.load_lanes]
    waited_s = timeline.alone_s(*timeline.load_lanes)
    return (
        f"of a step, {', '.join(each)}; for {show_seconds(waited_s)} something is loaded and "
        "nothing is computed"
    )


def _doubts(said: Explanation) -> list[str]:
    lines = []
    if unknown := unmeasured_calls(said.plan.program, said.costs):
        lines.append(f"not measured: {', '.join(unknown)}; counted as one pass over memory")
    if not said.costs.measured:
        lines.append("the costs are those of an ordinary machine; this one was not measured")
    return lines
