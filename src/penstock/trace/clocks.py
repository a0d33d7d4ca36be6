"""One clock for a run: how far the clocks of its machines are apart.

`time.perf_counter_ns` is one clock for all processes of a machine. Between machines, a rank asks
rank 0 for its time, several times, and keeps the answer with the shortest round trip: the offset is
known to half of that round trip. It does so at the start and at the end, so that drift is corrected
as well. Without such questions the machines' own time of day is compared, which NTP keeps to
milliseconds at best.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.trace.recorder import Recorder

FACT = "clock"
"""The fact under which a process keeps its readings: at_ns, offset_ns, error_ns of each."""
OF_NO_RANK = frozenset({"launch", "node"})
"""Roles of processes that belong to no rank."""
ROUNDS = 8
_FOREVER_NS = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockReading:
    """The clock of rank 0 compared with the clock of this machine."""

    at_ns: int
    """When, on this machine's clock."""
    offset_ns: int
    """What to add to this machine's clock."""
    error_ns: int
    """How much it may be off: half of the round trip."""

    @property
    def as_fact(self) -> list[int]:
        """What is written into a trace."""
        return [self.at_ns, self.offset_ns, self.error_ns]


@dataclass(frozen=True, kw_only=True)
class ClockFacts:
    """How the clocks of machines compare."""

    readings: Mapping[str, tuple[ClockReading, ...]]
    """Of each machine, by its boot."""
    how: str
    """In words, for the report."""

    def offset_ns(self, boot: str, at_ns: Any = None) -> Any:
        """Return what to add to times of a machine, interpolated between two readings."""
        readings = self.readings.get(boot, ())
        if not readings:
            return 0
        if at_ns is None or len(readings) == 1:
            return readings[0].offset_ns
        base = readings[0].offset_ns
        known = [r.at_ns for r in readings]
        moved = [r.offset_ns - base for r in readings]
        return base + np.interp(at_ns, known, moved).astype(np.int64)

    @property
    def error_ns(self) -> int:
        """How much two machines may be apart at most; 0 on one machine."""
        errors = [
            min(r.error_ns for r in readings) for readings in self.readings.values() if readings
        ]
        return max(errors, default=0)


class ClockFact:
    """The readings of a process, recorded as they come."""

    def __init__(self, recorder: Recorder, ask: Callable[[], int]) -> None:
        """`ask` returns the time of rank 0; it may fail, then there is no reading."""
        self._recorder = recorder
        self._ask = ask
        self._readings: list[list[int]] = []

    def read(self) -> None:
        """Compare the clocks once more."""
        try:
            reading = read_clock(self._ask)
        except PenstockError:
            return  # Rank 0 may have left before us; what was read before stays.
        self._readings.append(reading.as_fact)
        self._recorder.facts({FACT: self._readings})


def clock_pair() -> tuple[int, int]:
    """Return this machine's clock and its time of day, read at the same moment.

    A process may lose its core between the two. Of a few pairs the one is taken that was read
    within the shortest time.
    """
    shortest_ns, pair = _FOREVER_NS, (0, 0)
    for _ in range(ROUNDS):
        before_ns = time.perf_counter_ns()
        day_ns = time.time_ns()
        after_ns = time.perf_counter_ns()
        if after_ns - before_ns < shortest_ns:
            shortest_ns, pair = after_ns - before_ns, ((before_ns + after_ns) // 2, day_ns)
    return pair


def read_clock(ask: Callable[[], int], rounds: int = ROUNDS) -> ClockReading:
    """Ask for the time of rank 0 several times; return the reading with the shortest round trip."""
    best: ClockReading | None = None
    for _ in range(rounds):
        asked_ns = time.perf_counter_ns()
        theirs_ns = ask()
        heard_ns = time.perf_counter_ns()
        middle_ns = (asked_ns + heard_ns) // 2
        reading = ClockReading(
            at_ns=middle_ns,
            offset_ns=theirs_ns - middle_ns,
            error_ns=max(1, (heard_ns - asked_ns) // 2),
        )
        if best is None or reading.error_ns < best.error_ns:
            best = reading
    assert best is not None, "at least one round"
    return best


def clock_facts(files: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> ClockFacts:
    """Return how clocks compare, from the heads and facts of all processes."""
    heads = [head for head, _ in files]
    # Launchers and node services are on every node, and have no rank.
    ranked = [head for head in heads if head["role"] not in OF_NO_RANK] or heads
    reference = min(ranked, key=lambda head: (head["rank"], head["boot"]))
    readings: dict[str, tuple[ClockReading, ...]] = {}
    by_day: list[str] = []
    for boot in dict.fromkeys(head["boot"] for head in heads if head["boot"] != reference["boot"]):
        asked: list[list[list[int]]] = [
            facts[FACT] for head, facts in files if head["boot"] == boot and FACT in facts
        ]
        if asked:
            longest: list[list[int]] = max(asked, key=len)
            readings[boot] = tuple(_reading(*row) for row in sorted(longest))
            continue
        head = next(head for head in heads if head["boot"] == boot)
        offset_ns = _day_ns(head) - _day_ns(reference)
        readings[boot] = (_reading(head["perf_ns"], offset_ns, 1_000_000),)
        by_day.append(head["host"])
    return ClockFacts(readings=readings, how=_how(readings, by_day))


def _how(readings: Mapping[str, tuple[ClockReading, ...]], by_day: Sequence[str]) -> str:
    if not readings:
        return "all processes ran on one machine and share its clock"
    if by_day:
        return (
            f"the time of day of {', '.join(sorted(set(by_day)))} was compared, which may be wrong "
            "by milliseconds"
        )
    worst_us = max(min(r.error_ns for r in some) for some in readings.values()) / 1e3
    return f"ranks asked rank 0 for its time; clocks agree to {worst_us:.0f} µs"


def _day_ns(head: dict[str, Any]) -> int:
    return int(head["time_ns"] - head["perf_ns"])


def _reading(at_ns: int, offset_ns: int, error_ns: int) -> ClockReading:
    return ClockReading(at_ns=at_ns, offset_ns=offset_ns, error_ns=error_ns)
