"""Timelines: when every task of a plan began and ended, simulated or measured.

The last of several steps shows how long one takes when many follow each other; all questions to a
timeline are about that step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from penstock.step.program.bytes import chunk_bytes, held_bytes
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
    """The tasks of a plan in time."""

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
        """When the last step began and ended."""
        return (self.ends_s[-2] if len(self.ends_s) > 1 else 0.0), self.ends_s[-1]

    @property
    def shown(self) -> tuple[Span, ...]:
        """The spans that lie in the last step, at least in part."""
        start, end = self.window
        return tuple(s for s in self.spans if s.end_s > start + _TINY_S and s.start_s < end)

    def busy_s(self, *lanes: str) -> float:
        """Return how long in a step at least one of some lanes was at work."""
        return _length(self._busy(lane for lane in self.plan.lanes if lane in lanes))

    @property
    def communication_s(self) -> float:
        """How long in a step ranks were communicating."""
        return _length(self._busy(self._net))

    @property
    def exposed_s(self) -> float:
        """How long in a step ranks were communicating while nothing was computed."""
        return self.alone_s(*self._net)

    def alone_s(self, *lanes: str) -> float:
        """Return how long at least one of some lanes was at work while nothing was computed."""
        both = _length(self._busy([*lanes, COMPUTE]))
        return both - _length(self._busy([COMPUTE]))

    @property
    def load_lanes(self) -> tuple[str, ...]:
        """The lanes of loads, in the order in which a batch goes through them."""
        return tuple(lane for lane in LOAD_LANES if lane in self.plan.lanes)

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
        """The most memory that values take at once on one rank, without inputs and states.

        A value lives from the beginning of its writer to the end of its last reader.
        """
        program = self.plan.program
        reads: dict[tuple[int, str], list[tuple[int | None, float]]] = {}
        for span in self.spans:
            for access in span.task.reads:
                reads.setdefault((span.step, access.value), []).append((access.chunk, span.end_s))
        changes: list[tuple[float, int, int]] = []
        for span in self.spans:
            region = self.plan.region_of(span.task)
            for access in span.task.writes:
                if access.state is not None:
                    continue
                ends = [
                    end
                    for chunk, end in reads.get((span.step, access.value), ())
                    if chunk is None or access.chunk is None or chunk == access.chunk
                ]
                size_bytes = chunk_bytes(access.value, program, region)
                last = max([span.end_s, *ends])
                # At one moment memory is given back first: 0 sorts before 1.
                changes += [(span.start_s, 1, size_bytes), (last, 0, -size_bytes)]
        return max(accumulate(change for _, _, change in sorted(changes)), default=0)

    @cached_property
    def given_bytes(self) -> int:
        """Memory of states and inputs on one rank."""
        program = self.plan.program
        return sum(held_bytes(n.name, program) for n in program.inputs)


def _length(intervals: list[tuple[float, float]]) -> float:
    """Return how much of the time some intervals cover together."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
