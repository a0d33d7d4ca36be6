"""The counts of a loader: bytes and requests by source, samples, waits."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.engine.cache_hits import CacheHits
from penstock.engine.draw_summary import DrawSummary
from penstock.flow.layout.placement import KeptUnits
from penstock.trace import Recorder
from penstock.units import show_bytes, show_count, show_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceStats:
    """Reads from one kind of store."""

    size_bytes: int = 0
    requests: int = 0
    seconds: float = 0.0
    """Time in reads, summed over threads."""

    def plus(self, other: SourceStats, sign: int = 1) -> SourceStats:
        """Return the sum of both; with `sign=-1` the difference."""
        return SourceStats(
            size_bytes=self.size_bytes + sign * other.size_bytes,
            requests=self.requests + sign * other.requests,
            seconds=self.seconds + sign * other.seconds,
        )


def summed(
    left: Mapping[str, SourceStats], right: Mapping[str, SourceStats], sign: int = 1
) -> dict[str, SourceStats]:
    """Return the sums of reads by source; with `sign=-1` the differences."""
    none = SourceStats()
    names = dict.fromkeys((*left, *right))
    return {name: left.get(name, none).plus(right.get(name, none), sign) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """A tier of this node."""

    source: str
    """The name of the tier among the sources: tier:memory, tier:disk."""
    folder: str
    """The folder that it lies in."""
    capacity_bytes: int
    """Bytes of this data set that it may hold."""
    held_bytes: int
    """Bytes that it holds."""
    num_damaged: int = 0
    """Units in it that this process found damaged and fetched again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStats:
    """Another node of the job."""

    host: str
    node: int
    """Its number in the world."""
    size_bytes: int
    """Bytes that this rank got from it."""
    requests: int
    state: str
    """"there", "suspect" (this rank cannot ask it now) or "lost" (to the whole job)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStats:
    """Memory of engine and workers, beside the training process."""

    shared_bytes: int
    """Shared memory: batches that are made ahead, on their way or kept by the training loop."""
    private_bytes: int
    """Sum of the memory that each process has for itself; pages that they share since the fork
    count for none of them."""
    num_processes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The counts of an engine so far."""

    sources: dict[str, SourceStats] = field(default_factory=dict)
    """Reads by source: folder, memory, s3, tier:memory, tier:disk, …"""
    decode_s: float = 0.0
    """Time in decoding, transforming and joining, summed over threads or processes."""

    @property
    def store_bytes(self) -> int:
        """Bytes that came from stores, not from tiers or other nodes."""
        return sum(s.size_bytes for name, s in self.sources.items() if not _is_near(name))

    @property
    def tier_bytes(self) -> int:
        """Bytes that came from the tiers of this node."""
        return sum(s.size_bytes for name, s in self.sources.items() if name.startswith("tier:"))

    @property
    def peer_bytes(self) -> int:
        """Bytes that came from other nodes."""
        return self.sources["peers"].size_bytes if "peers" in self.sources else 0

    def __add__(self, other: EngineStats) -> EngineStats:
        sources = summed(self.sources, other.sources)
        return EngineStats(sources=sources, decode_s=self.decode_s + other.decode_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats(EngineStats):
    """Counts since the loader was made."""

    samples: int = 0
    """Samples handed to the training loop."""
    batches: int = 0
    """Batches handed to the training loop."""
    stall_s: float = 0.0
    """Time that the training loop waited for batches, inside of `next`."""
    hand_over_s: float = 0.0
    """Time inside of `next` after a batch was there."""
    cpu_here_s: float = 0.0
    """Processor time of Penstock inside the training process; the loop cannot use it."""
    sent_bytes: int = 0
    """Bytes of batches that were copied to the training process, not shared with it."""
    workers: str = ""
    """Where batches were made, and why there."""
    memory: MemoryStats | None = None
    """Memory of engine and workers; None where there are none."""
    elapsed_s: float = 0.0
    """Time inside iterations: waits and the training loop's own work together."""
    tiers: tuple[TierStats, ...] = ()
    """The tiers of this node."""
    bound_bytes: int | None = None
    """The least that this rank's part of the job could have read from stores so far, with these
    tiers; None for local data without tiers. Exact at the end of an epoch, for all ranks together:
    one rank may fetch what another uses. `loader.least` defines the bound."""
    epochs: float = 0.0
    """Epochs that were delivered."""
    peers: tuple[PeerStats, ...] = ()
    """The other nodes, where nodes use each other's tiers."""
    events: tuple[str, ...] = ()
    """Losses and returns of nodes, engines and workers, in sentences."""
    draws: DrawSummary | None = None
    """The windows that were trained on, where samples are drawn by importance."""
    about_draws: tuple[str, ...] = ()
    """The draws, in sentences."""
    cache_hits: CacheHits | None = None
    """With importance sampling and tiers: hits, and the most that were possible."""

    @property
    def bound_ratio(self) -> float | None:
        """Bytes from stores as a multiple of the least possible; 1 is best.

        None where there is no such bound: the data is local, or other ranks or jobs of the node
        have read for this rank.
        """
        if not self.bound_bytes or self.store_bytes < _NEARLY * self.bound_bytes:
            return None
        return max(1.0, self.store_bytes / self.bound_bytes)

    @property
    def stall_share(self) -> float:
        """The part of the time that was spent waiting."""
        return self.stall_s / self.elapsed_s if self.elapsed_s > 0 else 0.0

    def __str__(self) -> str:
        lines = [
            f"{show_count(self.samples)} samples in {show_count(self.batches)} batches, "
            f"{show_seconds(self.elapsed_s)}, of it {show_seconds(self.stall_s)} "
            f"({self.stall_share:.1%}) waiting for data, {show_seconds(self.hand_over_s)} taking "
            f"batches over; {show_seconds(self.cpu_here_s)} of processor time in this process"
        ]
        if self.workers:
            lines.append(f"  batches were made {self.workers}")
        if self.memory is not None:
            lines.append(
                f"  {self.memory.num_processes} processes with "
                f"{show_bytes(self.memory.shared_bytes)} of shared memory and "
                f"{show_bytes(self.memory.private_bytes)} of their own"
            )
        if self.sent_bytes:
            lines.append(f"  {show_bytes(self.sent_bytes)} were copied to this process")
        for name, source in self.sources.items():
            lines.append(
                f"  {name}: {show_bytes(source.size_bytes)} in {show_count(source.requests)} reads"
            )
        if self.bound_ratio is not None and self.bound_bytes is not None:
            so_far = "" if self.epochs == round(self.epochs) else " so far, what is ahead included"
            lines.append(
                f"  from stores: {self.bound_ratio:.3f} times the least possible "
                f"({show_bytes(self.bound_bytes)}){so_far}"
            )
        elif self.bound_bytes:
            lines.append(
                f"  from stores: {show_bytes(self.store_bytes)}; alone and without look-ahead, "
                f"this rank would have read at least {show_bytes(self.bound_bytes)}"
            )
        if self.cache_hits is not None:
            lines.append(f"  {self.cache_hits}")
        lines += [
            f"  {tier.source} holds {show_bytes(tier.held_bytes)} of at most "
            f"{show_bytes(tier.capacity_bytes)} in {tier.folder}"
            + (f"; {show_count(tier.num_damaged)} units were damaged" if tier.num_damaged else "")
            for tier in self.tiers
        ]
        for peer in self.peers:
            state = "" if peer.state == "there" else f", {peer.state}"
            lines.append(
                f"  node {peer.node} ({peer.host}) sent {show_bytes(peer.size_bytes)} in "
                f"{show_count(peer.requests)} answers{state}"
            )
        lines += [f"  {sentence}" for sentence in (*self.about_draws, *self.events)]
        return "\n".join(lines)


@dataclass(slots=True)
class ClusterStats:
    """The latest state of tiers and other nodes; they may be closed when somebody asks for it."""

    tiers: tuple[TierStats, ...] = ()
    peers: tuple[PeerStats, ...] = ()
    events: tuple[str, ...] = ()
    cache_bytes: int = 0
    """Bytes that all nodes together may keep."""
    kept: KeptUnits | None = None
    """The units of the data set that these bytes keep; None without tiers."""
    warm_bytes: int | None = None
    """Bytes that the tiers held when they were first opened."""
    draws: DrawSummary | None = None
    """The draws by importance."""
    cache_hits: CacheHits | None = None
    """Hits of tiers whose units come and go."""


class Counters:
    """Counts reads and work; safe to use from many threads.

    The code that counts a read also records it, if there is a recorder: so the bytes of a trace are
    the bytes that were counted.
    """

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        """The recorder of this process, once a traced run begins."""
        self._lock = threading.Lock()  # Held for a few additions: all threads of a run count.
        self._decode_s = 0.0
        self._sources: dict[str, tuple[int, int, float]] = {}

    def add_reads(self, source: str, size_bytes: int, requests: int, seconds: float) -> None:
        """Count reads from a store."""
        with self._lock:
            b, r, s = self._sources.get(source, (0, 0, 0.0))
            self._sources[source] = (b + size_bytes, r + requests, s + seconds)

    def taken_reads(self) -> list[tuple[str, int, int, float]]:
        """Return the reads so far, and begin anew."""
        with self._lock:
            counted, self._sources = self._sources, {}
        return [(source, *numbers) for source, numbers in counted.items()]

    def add_decode(self, seconds: float) -> None:
        """Count time spent on samples after their bytes were there."""
        with self._lock:
            self._decode_s += seconds

    def counted(self) -> EngineStats:
        """Return the counts so far."""
        with self._lock:
            return EngineStats(
                sources={
                    name: SourceStats(size_bytes=b, requests=r, seconds=s)
                    for name, (b, r, s) in sorted(self._sources.items())
                },
                decode_s=self._decode_s,
            )


@dataclass(slots=True)
class DeliveryCounters:
    """The counts of the training process: batches handed over, and where its time went."""

    samples: int = 0
    batches: int = 0
    stall_s: float = 0.0
    hand_over_s: float = 0.0
    elapsed_s: float = 0.0
    hand_over_cpu_s: float = 0.0
    thread_cpu_s: float = 0.0
    """Processor time of threads of iterations that are over."""
    sent_bytes: int = 0

    @property
    def cpu_here_s(self) -> float:
        """Processor time of Penstock inside the training process."""
        return self.hand_over_cpu_s + self.thread_cpu_s


_NEARLY = 0.99
"""In an unfinished epoch the bound takes samples for equally large, so it may be a bit high."""


def _is_near(source: str) -> bool:
    return source == "peers" or source.startswith("tier:")
