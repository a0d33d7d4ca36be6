"""The planner: how many bytes a run reads from which source, how long it takes, and its limit.

A plan is made from three values: the data set in a few numbers (`summary`), the training job
(`work`: order, world, batch, epochs) and the machine. `traffic` computes the bytes of each source.
All work of a node overlaps, so an epoch takes as long as its busiest resource: the store, the link
between nodes, a tier, the cores, or the training itself.

Properties are computed on request from a handful of numbers, so a plan for a billion samples costs
no more than one for a thousand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.errors import OptionError
from penstock.flow.cost import (
    connection_bytes_s,
    look_ahead_s,
    merge_gap_bytes,
    reads_whole,
    requests_in_flight,
    store_bytes_s,
)
from penstock.machine import Machine, TierModel
from penstock.simulate.plan.summary import Summary
from penstock.simulate.plan.traffic import (
    RUN_BYTES,
    EpochBytes,
    TierContents,
    Traffic,
    epoch_bytes,
    held_by,
)
from penstock.simulate.plan.work import Work

_FULL_LINK_SHARE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceLoad:
    """The work of one resource of a node in an epoch."""

    resource: str
    """store, memory, disk, link, cores or compute."""
    seconds: float
    """How long the resource is busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """One epoch."""

    number: int
    """Counted from 0."""
    traffic: tuple[Traffic, ...]
    """On all nodes together."""
    loads: tuple[ResourceLoad, ...]
    """On each node."""

    @property
    def seconds(self) -> float:
        """The time of the epoch: that of its busiest resource."""
        return self.bottleneck.seconds

    @property
    def bottleneck(self) -> ResourceLoad:
        """The resource that all others wait for."""
        return max(self.loads, key=lambda load: load.seconds)

    @property
    def stall_share(self) -> float | None:
        """The share of the time in which training waits; None where its speed is not known."""
        busy = [load.seconds for load in self.loads if load.resource == "compute"]
        return 1 - busy[0] / self.seconds if busy and self.seconds else None

    def of(self, source: str) -> Traffic:
        """Return the traffic of one source."""
        return next(t for t in self.traffic if t.source == source)

    def load_s(self, resource: str) -> float:
        """Return how long one resource is busy, the busiest of its kind; 0 where there is none."""
        return max((load.seconds for load in self.loads if load.resource == resource), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The plan of a run."""

    summary: Summary
    work: Work
    machine: Machine

    # -- the whole run -----------------------------------------------------------------------

    @property
    def cache_bytes(self) -> int:
        """Capacity of the tiers of all nodes."""
        return self.work.num_nodes * sum(t.capacity_bytes for t in self.machine.tiers)

    @property
    def held(self) -> TierContents:
        """The contents of full tiers."""
        return held_by(self.machine.tiers, self.summary, self.work)

    @property
    def total_s(self) -> float:
        """The time of the whole run."""
        return sum(count * epoch.seconds for epoch, count in self.epochs())

    @property
    def store_bytes(self) -> float:
        """Bytes that the whole run reads from the store."""
        return sum(count * e.of("store").size_bytes for e, count in self.epochs())

    @property
    def bound_bytes(self) -> int:
        """The fewest bytes that a run with as much room for whole units reads from the store.

        Samples without a place are read alone, or in runs where the order goes block by block.
        """
        kept = min(self.summary.size_bytes, self.cache_bytes)
        loose = self.summary.size_bytes - kept
        in_first, in_later = (
            loose * (self.summary.wanted_share if self.work.mode(epoch) == "global" else 1.0)
            for epoch in (0, 1)
        )
        if not self.work.num_epochs:
            return 0
        return round(kept + in_first + (self.work.num_epochs - 1) * in_later)

    @property
    def first(self) -> EpochPlan:
        """The first epoch."""
        return self.epoch(0)

    @property
    def later(self) -> EpochPlan:
        """The last epoch. All after the first are alike, unless nodes hold more after each."""
        return self.epoch(max(1, self.work.num_epochs - 1))

    @property
    def is_growing(self) -> bool:
        """Whether nodes hold more after each epoch: on their own, or as copies of others' units."""
        return self.work.num_nodes > 1 and (self.work.peers is None or self.held.copies_share > 0)

    def epochs(self) -> Iterator[tuple[EpochPlan, int]]:
        """Yield sample epochs, each with the number of epochs that it stands for.

        All epochs after the first are alike, unless nodes hold more after each. Then a sample
        stands for few epochs at the beginning and for more of them later.
        """
        start = 0
        while start < self.work.num_epochs:
            count = 1 if start == 0 else self.work.num_epochs - start
            if self.is_growing:
                count = min(count, 1 + 2 * (start // 32))
            yield self.epoch(start + (count - 1) // 2), count
            start += count

    def epoch(self, number: int) -> EpochPlan:
        """Return one epoch, counted from 0."""
        held = self.held
        moved = epoch_bytes(self.summary, self.work, held, number)
        sources = dict.fromkeys(("memory", "disk"), 0.0)
        for tier_number, tier in enumerate(self.machine.tiers):
            sources[tier.kind] += moved.served_bytes * held.share(tier_number)
        sources["peers"] = moved.peer_bytes
        a_read = self.summary.read_bytes
        traffic = [
            Traffic(source=source, size_bytes=size, num_requests=size / a_read)
            for source, size in sources.items()
        ]
        return EpochPlan(
            number=number, traffic=(moved.store, *traffic), loads=tuple(self._loads(moved, held))
        )

    # -- how it is read ----------------------------------------------------------------------

    @property
    def requests_in_flight(self) -> int:
        """Requests that a node needs in flight to use the bandwidth of the store."""
        return requests_in_flight(self.machine.store, self.first.of("store").request_bytes)

    @property
    def look_ahead_s(self) -> float:
        """How long before its step a read from the store has to begin."""
        store = self.machine.store
        reads = self.work.node_batch_size * self.summary.num_reads / self.summary.num_samples
        return look_ahead_s(store.latency_s, store.latency_p99_s, math.ceil(reads))

    @property
    def merge_gap_bytes(self) -> int:
        """The largest gap between two wanted ranges that is worth reading."""
        store = self.machine.store
        rate = store_bytes_s(store, RUN_BYTES, self.work.num_nodes)
        return merge_gap_bytes(store.latency_s, rate, self.requests_in_flight)

    @property
    def staged_share(self) -> float:
        """The share of an epoch that all nodes together look ahead."""
        stage_bytes = self.work.stage_bytes * self.work.world.num_ranks
        return min(1.0, stage_bytes / max(1, self.summary.size_bytes))

    @property
    def reads_whole_runs(self) -> bool:
        """Whether whole runs of megabytes are faster than single samples in a shuffled epoch.

        Samples of a run that are used within the look-ahead are kept; the others are lost.
        """
        store, sample_bytes = self.machine.store, self.summary.read_bytes
        return reads_whole(
            self.staged_share,
            num_samples=max(1, round(RUN_BYTES / sample_bytes)),
            sample_bytes=sample_bytes,
            latency_s=store.latency_s,
            connection_bytes_s=connection_bytes_s(store),
            is_link_bound=self._is_link_bound,
        )

    @property
    def _is_link_bound(self) -> bool:
        """Whether reads of single samples already fill the link."""
        store, nodes = self.machine.store, self.work.num_nodes
        best = store_bytes_s(store, RUN_BYTES, nodes)
        return store_bytes_s(store, self.summary.read_bytes, nodes) >= _FULL_LINK_SHARE * best

    # -- how long it takes -------------------------------------------------------------------

    def _loads(self, moved: EpochBytes, held: TierContents) -> Iterator[ResourceLoad]:
        nodes, machine = self.work.num_nodes, self.machine
        rate = store_bytes_s(machine.store, moved.store.request_bytes, nodes)
        yield ResourceLoad(resource="store", seconds=moved.store.size_bytes / nodes / rate)
        for number, tier in enumerate(machine.tiers):
            share = held.share(number) / nodes
            seconds = moved.served_bytes * share / self._tier_bytes_s(tier)
            seconds += moved.filled_bytes * share / max(tier.write.bytes_s)
            yield ResourceLoad(resource=tier.kind, seconds=seconds)
        yield ResourceLoad(resource="link", seconds=moved.peer_bytes / nodes / machine.link.bytes_s)
        yield ResourceLoad(resource="cores", seconds=self._cores_s())
        if self.work.compute_samples_s is not None:
            a_rank = self.summary.num_samples / self.work.world.num_ranks
            yield ResourceLoad(resource="compute", seconds=a_rank / self.work.compute_samples_s)

    def _tier_bytes_s(self, tier: TierModel) -> float:
        """Return the bandwidth of a tier for samples, with the best number of threads."""
        size = self.summary.read_bytes
        return max(k * size / tier.read_s(size, k) for k in tier.read.counts)

    def _cores_s(self) -> float:
        """Return how long the cores of a node copy and decode."""
        machine = self.machine
        a_node = self.summary.size_bytes / self.work.num_nodes
        seconds = a_node / machine.copy.at(machine.cores)
        if machine.decode is not None:
            seconds += a_node / machine.decode.at(machine.cores)
        return seconds


def make_plan(summary: Summary, work: Work, machine: Machine) -> RunPlan:
    """Return the plan of a run."""
    global_batch_size = work.world.num_ranks * work.batch_size
    if global_batch_size > summary.num_samples:
        raise OptionError(
            f"a global batch of {global_batch_size} samples is more than the {summary.num_samples} "
            "that there are; use a smaller batch or fewer ranks"
        )
    return RunPlan(summary=summary, work=work, machine=machine)
