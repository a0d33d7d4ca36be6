"""Timelines: when every task of a plan began and ended, simulated or measured.

The last step of several tells how long one takes when many follow each other; what is asked of a
timeline is asked of that step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from penstock.step.program.bytes import held_bytes
from penstock.step.program.loads import LOAD_LANES
from penstock.step.program.plan import COMPUTE, Plan, Task

__all__ = ["Span", "Timeline"]

_TINY_S = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One task of one step, from its beginning to its end."""

    task: Task
    step: int
    """The step whose values it makes."""
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What a plan does in virtual time."""

    plan: Plan
    spans: tuple[Span, ...]
    """By their beginning."""
    ends_s: tuple[float, ...]
    """By step: when it was over, so that the next could begin."""

    @property
    def step_s(self) -> float:
        """How long a step takes when many follow each other."""
        return self.window[1] - self.window[0]

    @cached_property
    def window(self) -> tuple[float, float]:
        """From when to when the last step went."""
        return (self.ends_s[-2] if len(self.ends_s) > 1 else 0.0), self.ends_s[-1]

    @property
    def shown(self) -> tuple[Span, ...]:
        """The spans that lie in the last step, at least in part."""
        start, end = self.window
        return tuple(s for s in self.spans if s.end_s > start + _TINY_S and s.start_s < end)

    def busy_s(self, *lanes: str) -> float:
        """Return for how long of a step one of some lanes was at work."""
        return _length(self._busy(lane for lane in self.plan.lanes if lane in lanes))

    @property
    def communication_s(self) -> float:
        """For how long of a step something was on its way between ranks."""
        return _length(self._busy(self._net))

    @property
    def exposed_s(self) -> float:
        """For how long of a step something was on its way while nothing was computed."""
        return self.alone_s(*self._net)

    def alone_s(self, *lanes: str) -> float:
        """Return for how long one of some lanes was at work while nothing was computed."""
        both = _length(self._busy([*lanes, COMPUTE]))
        return both - _length(self._busy([COMPUTE]))

    @property
    def load_lanes(self) -> tuple[str, ...]:
        """The lanes of what is loaded, in the order in which a batch comes to them."""
        return tuple(lane for lane in LOAD_LANES if lane in self.plan.lanes)

    @property
    def idle_s(self) -> float:
        """For how long of a step no lane did anything."""
        return self.step_s - _length(self._busy(self.plan.lanes))

    @property
    def _net(self) -> list[str]:
        return [lane for lane in self.plan.lanes if lane.startswith("net:")]

    def _busy(self, lanes: Iterable[str]) -> list[tuple[float, float]]:
        start, end = self.window
        wanted = set(lanes)
        return [
            (max(start, s.start_s), min(end, s.end_s)) for s in self.shown if s.task.lane in wanted
        ]

    @cached_property
    def peak_bytes(self) -> int:
        """The most memory that values take at once on one rank, beside what it was given."""
        changes: list[tuple[float, int, int]] = []
        for key, size_bytes in self._made.items():
            first, last = self._lives[key]
            changes += [(first, 1, size_bytes), (last, 0, -size_bytes)]
        now = peak = 0
        for _, _, change in sorted(changes):
            now += change
            peak = max(peak, now)
        return peak

    @cached_property
    def given_bytes(self) -> int:
        """Memory of what a rank was given: states and inputs."""
        program = self.plan.program
        return sum(held_bytes(n.name, program) for n in program.inputs)

    @cached_property
    def _made(self) -> dict[tuple[int, str, int | None], int]:
        out = {}
        for span in self.spans:
            for access in span.task.writes:
                if access.state is None:
                    size = _written_bytes(span.task, access.value, self.plan)
                    out[span.step, access.value, access.chunk] = size
        return out

    @cached_property
    def _lives(self) -> dict[tuple[int, str, int | None], tuple[float, float]]:
        """By value: from the beginning of what writes it to the end of what reads it last."""
        lives = {}
        reads: dict[tuple[int, str], list[tuple[int | None, float]]] = {}
        for span in self.spans:
            for access in span.task.reads:
                reads.setdefault((span.step, access.value), []).append((access.chunk, span.end_s))
        for span in self.spans:
            for access in span.task.writes:
                ends = [
                    end
                    for chunk, end in reads.get((span.step, access.value), ())
                    if chunk is None or access.chunk is None or chunk == access.chunk
                ]
                lives[span.step, access.value, access.chunk] = (
                    span.start_s,
                    max([span.end_s, *ends]),
                )
        return lives


def _written_bytes(task: Task, value: str, plan: Plan) -> int:
    region = plan.program.region(task.region) if task.region is not None else None
    total = held_bytes(value, plan.program)
    if region is None or region.dim(value) is None:
        return total
    return -(-total // region.num_chunks)


def _length(intervals: list[tuple[float, float]]) -> float:
    """Return how much of the time some intervals cover together."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
