"""What a loader counted: bytes and requests by source, samples, waits."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceStats:
    """What was read from one kind of store."""

    size_bytes: int = 0
    requests: int = 0
    seconds: float = 0.0
    """Time in reads, summed over threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Counts since the loader was made."""

    samples: int
    """Samples handed to the training loop."""
    batches: int
    """Batches handed to the training loop."""
    stall_s: float
    """Time that the training loop waited for batches."""
    elapsed_s: float
    """Time spent inside iterations, waits and the training loop's own work together."""
    decode_s: float
    """Time in decoding, transforming and joining, summed over threads."""
    sources: dict[str, SourceStats] = field(default_factory=dict)
    """Reads by source: folder, memory, s3, …"""

    @property
    def stall_share(self) -> float:
        """The part of the time that was spent waiting."""
        return self.stall_s / self.elapsed_s if self.elapsed_s > 0 else 0.0


class Counters:
    """The same while it grows; safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.samples = 0
        self.batches = 0
        self.stall_s = 0.0
        self.elapsed_s = 0.0
        self._decode_s = 0.0
        self._sources: dict[str, tuple[int, int, float]] = {}

    def add_reads(self, source: str, size_bytes: int, requests: int, seconds: float) -> None:
        """Count reads from a store."""
        with self._lock:
            b, r, s = self._sources.get(source, (0, 0, 0.0))
            self._sources[source] = (b + size_bytes, r + requests, s + seconds)

    def add_decode(self, seconds: float) -> None:
        """Count time spent on samples after their bytes were there."""
        with self._lock:
            self._decode_s += seconds

    def stats(self, running_s: float = 0.0) -> Stats:
        """Return the counts so far; `running_s` is the age of an iteration that still runs."""
        with self._lock:
            return Stats(
                samples=self.samples,
                batches=self.batches,
                stall_s=self.stall_s,
                elapsed_s=self.elapsed_s + running_s,
                decode_s=self._decode_s,
                sources={
                    name: SourceStats(size_bytes=b, requests=r, seconds=s)
                    for name, (b, r, s) in sorted(self._sources.items())
                },
            )
