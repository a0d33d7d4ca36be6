"""Counts of what a shaper has seen and done."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Counts since the start of a shaper; `later - earlier` are those in between."""

    requests: int = 0
    """Heads of requests that came in."""
    methods: dict[str, int] = field(default_factory=dict)
    """Heads of requests that came in, by method."""
    body_bytes: int = 0
    """Bytes of bodies that were sent to clients, error messages included."""
    upload_bytes: int = 0
    """Bytes of bodies that came from clients."""
    unavailable: int = 0
    """Answers 503: by a fault, and above `requests_s`."""
    faults: dict[str, int] = field(default_factory=dict)
    """Faults that were carried out, by kind."""
    failures: int = 0
    """Requests that the store itself did not answer in full."""
    aborted: int = 0
    """Requests whose client hung up before the answer was out."""
    connections: int = 0
    """Connections that were accepted."""
    concurrency_max: int = 0
    """The most requests that were under way at once."""
    late_s: float = 0.0
    """The sum of the delays of answers beyond their due time, because the shaper was busy."""
    late_max_s: float = 0.0
    """The longest of these delays; if it is near the latencies, the machine is overloaded."""
    cpu_s: float = 0.0
    """Processor time of the shaper's process, its start left out."""

    def __sub__(self, earlier: Counts) -> Counts:
        """Return what was counted since then; the largest ones stay what they are."""
        return Counts(
            requests=self.requests - earlier.requests,
            methods=dict(Counter(self.methods) - Counter(earlier.methods)),
            body_bytes=self.body_bytes - earlier.body_bytes,
            upload_bytes=self.upload_bytes - earlier.upload_bytes,
            unavailable=self.unavailable - earlier.unavailable,
            faults=dict(Counter(self.faults) - Counter(earlier.faults)),
            failures=self.failures - earlier.failures,
            aborted=self.aborted - earlier.aborted,
            connections=self.connections - earlier.connections,
            concurrency_max=self.concurrency_max,
            late_s=self.late_s - earlier.late_s,
            late_max_s=self.late_max_s,
            cpu_s=self.cpu_s - earlier.cpu_s,
        )


class Tally:
    """The counts of a running shaper."""

    def __init__(self) -> None:
        self.methods: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.body_bytes = 0
        self.upload_bytes = 0
        self.unavailable = 0
        self.failures = 0
        self.aborted = 0
        self.connections = 0
        self._under_way = 0
        self._concurrency_max = 0
        self._late_s = 0.0
        self._late_max_s = 0.0

    def begin(self, method: bytes) -> None:
        """Count a request that came in."""
        self.methods[method.decode("latin-1")] += 1
        self._under_way += 1
        self._concurrency_max = max(self._concurrency_max, self._under_way)

    def due(self, late_s: float) -> None:
        """The moment of an answer has come, so much ago."""
        self._late_s += late_s
        self._late_max_s = max(self._late_max_s, late_s)

    def end(self) -> None:
        """Its answer is out, or nobody waits for it any more."""
        self._under_way -= 1

    def counts(self, cpu_s: float) -> Counts:
        """Return them as they are now."""
        return Counts(
            requests=self.methods.total(),
            methods=dict(self.methods),
            body_bytes=self.body_bytes,
            upload_bytes=self.upload_bytes,
            unavailable=self.unavailable,
            faults=dict(self.faults),
            failures=self.failures,
            aborted=self.aborted,
            connections=self.connections,
            concurrency_max=self._concurrency_max,
            late_s=self._late_s,
            late_max_s=self._late_max_s,
            cpu_s=cpu_s,
        )
