"""The state of a rank now, as `penstock top` and a Prometheus endpoint show it.

Everything that grows is a count since the run began (`LiveCounts`); rates are differences of two
counts, and the page that shows them computes them. Seconds of several threads or requests are added
up, so their rate is how many there were on average: reads in flight, workers that decode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from penstock.engine.stats import SourceStats, summed


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveCounts:
    """Counts since the run began, or between two looks at it."""

    samples: int = 0
    """Samples handed to the training loop."""
    batches: int = 0
    """Batches handed to the training loop."""
    elapsed_s: float = 0.0
    """Time inside iterations."""
    stall_s: float = 0.0
    """Time that the training loop waited for batches."""
    decode_s: float = 0.0
    """Time in decoding, transforming and joining, summed over threads or processes."""
    sources: Mapping[str, SourceStats] = field(default_factory=dict)
    """Reads by source; `seconds` is summed over requests."""
    cpu_s: Mapping[str, float] = field(default_factory=dict)
    """Processor time by role of a process: train, engine, worker."""

    @property
    def stall_share(self) -> float:
        """The part of the time that was spent waiting."""
        return min(1.0, self.stall_s / self.elapsed_s) if self.elapsed_s > 0 else 0.0

    @property
    def reads_in_flight(self) -> float:
        """Mean number of reads in flight."""
        return self._at_a_time(sum(source.seconds for source in self.sources.values()))

    @property
    def decodes_at_a_time(self) -> float:
        """Mean number of threads or processes that decoded."""
        return self._at_a_time(self.decode_s)

    @property
    def loader_cores(self) -> float:
        """Cores that engine and workers used, or the training process if it makes the batches."""
        apart = {role: s for role, s in self.cpu_s.items() if role != "train"}
        return self._at_a_time(sum((apart or self.cpu_s).values()))

    def _at_a_time(self, seconds: float) -> float:
        return seconds / self.elapsed_s if self.elapsed_s > 0 else 0.0

    def __add__(self, other: LiveCounts) -> LiveCounts:
        return self._with(other, 1)

    def __sub__(self, other: LiveCounts) -> LiveCounts:
        return self._with(other, -1)

    def _with(self, other: LiveCounts, sign: int) -> LiveCounts:
        return LiveCounts(
            samples=self.samples + sign * other.samples,
            batches=self.batches + sign * other.batches,
            elapsed_s=self.elapsed_s + sign * other.elapsed_s,
            stall_s=self.stall_s + sign * other.stall_s,
            decode_s=self.decode_s + sign * other.decode_s,
            sources=summed(self.sources, other.sources, sign),
            cpu_s={
                role: self.cpu_s.get(role, 0.0) + sign * other.cpu_s.get(role, 0.0)
                for role in dict.fromkeys((*self.cpu_s, *other.cpu_s))
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSnapshot:
    """One rank at one time."""

    rank: int
    host: str = ""
    at_s: float = 0.0
    """When, in seconds since 1970."""
    epoch: int = -1
    """The epoch of the latest batch; -1 where it is unknown."""
    counts: LiveCounts = field(default_factory=LiveCounts)
    """Counts since the run began."""
    ready_batches: float | None = None
    """Batches that are made and not taken yet; None where that is unknown."""
    memory_bytes: int = 0
    """Memory of engine and workers, or of the training process where it makes the batches."""
    state: str = "running"
    """`running`, `starting`, `ended`, `killed`, or `silent` (not heard of for a while)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRank:
    """A rank now, and its counts of the last seconds."""

    now: LiveSnapshot
    recent: LiveCounts
    """Counts of the last seconds; `elapsed_s` says how many seconds."""

    @property
    def samples_per_s(self) -> float:
        """Samples a second, in the last seconds."""
        return self.recent.samples / self.recent.elapsed_s if self.recent.elapsed_s > 0 else 0.0

    def in_state(self, state: str) -> LiveRank:
        """Return the rank in another state."""
        return replace(self, now=replace(self.now, state=state))
