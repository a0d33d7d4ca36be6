"""Devices: how long a node needs for the reads of a step.

Two limits hold at once; the slower one counts.

* A thread reads one sample after the other: latency, then bytes at the rate of one request, then
  decoding. The threads divide the sum of these times.
* A device has a throughput that all threads together cannot exceed: the node's share of the store,
  a tier, the link (in either direction), the cores that decode.

The store is shared: when n nodes read at once, each gets shared(n)/n, or less where its own
connection is the limit. Other nodes get the bandwidth that a node does not use.
"""

from __future__ import annotations

import math

import numpy as np

from penstock.errors import OptionError
from penstock.machine import Curve
from penstock.simulate.job import Floats, SimulatedJob
from penstock.simulate.reads import StepTraffic


def at(curve: Curve, counts: Floats) -> Floats:
    """Return a curve's throughput at many counts."""
    return np.interp(counts, curve.counts, curve.bytes_s)


class Devices:
    """The machine of a scenario as rates, one number per source."""

    def __init__(self, job: SimulatedJob) -> None:
        machine, model = job.scenario.machine, job.scenario.model
        self.job, self.machine = job, machine
        # Curves were measured with the latency of each request in them; here it is added by
        # request.
        self.store = machine.store.without_latency()
        self.per_thread = model.store_share == "thread"
        if (self.per_thread or model.readers == "in_turn") and machine.store.shared is None:
            raise OptionError(
                "[model] says how nodes share the store, and machine.store.shared is missing; "
                "give it, or leave [model] out"
            )
        tiers, link = [tier.without_latency() for tier in machine.tiers], machine.link
        self.tiers = tiers
        own = [1 / tier.read.at(1) for tier in tiers]
        peer = [1 / min(link.bytes_s, tier.read.at(1)) for tier in tiers]
        self.byte_s = np.array([*own, *peer, 1 / self.store.throughput.at(1)])
        """Seconds a byte that one thread needs, by source; the store's at no load."""
        own = [tier.latency_s for tier in tiers]
        self.latency_s = np.array([*own, *(link.latency_s + s for s in own), self.store.latency_s])
        self.decode_s = 1 / machine.decode.at(1) if machine.decode else 0.0

    def store_byte_s(self, num_readers: Floats) -> Floats:
        """Return how many seconds a thread needs for a byte from the store, by step."""
        alone = np.full(num_readers.shape, self.byte_s[self.job.store])
        if not self.per_thread or self.store.shared is None:
            return alone
        readers = np.maximum(num_readers, 1)
        # A node's own connection is a limit in this model too: b_fs beside t(n)/n.
        own = np.full(readers.shape, self.store.throughput.bytes_s[-1])
        out: Floats = 1 / np.minimum(own, at(self.store.shared, readers) / readers)
        return out

    def node_bytes_s(self, num_readers: Floats, threads: int) -> Floats:
        """Return the bandwidth that the store gives one node, by step."""
        if self.per_thread:
            return np.full(num_readers.shape, np.inf)
        own = np.full(num_readers.shape, self.store.throughput.at(threads))
        if self.store.shared is None:
            return own
        readers = np.maximum(num_readers, 1)
        out: Floats = np.minimum(own, at(self.store.shared, readers) / readers)
        return out

    def all_bytes_s(self) -> float:
        """Return the most bandwidth that the store gives all nodes together."""
        nodes = self.job.num_nodes
        if self.per_thread:
            return math.inf
        own = nodes * max(self.store.throughput.bytes_s)
        if self.store.shared is None:
            return own
        return min(own, max(self.store.shared.at(n) for n in (*self.store.shared.counts, nodes)))

    def fill_s(self, size_bytes: Floats, sample_bytes: float, source: int) -> Floats:
        """Return how long each node needs to fill a tier while all others fill theirs."""
        job = self.job
        threads = job.scenario.loader.fill_threads * job.ranks
        nodes = np.array([float(job.num_nodes)])
        byte_s, limit = self.byte_s[source], self.machine.link.bytes_s
        if source == job.store:
            byte_s = self.store_byte_s(nodes)[0]
            limit = float(self.node_bytes_s(nodes, threads)[0])
        byte_s += self.decode_s + self.latency_s[source] / sample_bytes
        out: Floats = size_bytes * max(byte_s / threads, 1 / limit)
        return out

    def thread_s(self, load: StepTraffic) -> tuple[Floats, Floats]:
        """Return the thread seconds of all but the store's bytes, and the store's bytes."""
        store = self.job.store
        own = load.bytes.copy()
        from_store = own[..., store] + load.filled
        own[..., store] = 0
        other_s = own @ self.byte_s + load.counts @ self.latency_s
        other_s += load.num_filled * self.latency_s[store]
        other_s += load.bytes.sum(axis=-1) * self.decode_s
        return other_s, from_store

    def limits_s(self, load: StepTraffic, num_readers: Floats, threads: int, left: float) -> Floats:
        """Return how long the busiest device of each node needs for a step."""
        job, machine = self.job, self.machine
        tiers = job.num_tiers
        from_store = load.bytes[..., job.store] + load.filled
        out = self._store_s(from_store, num_readers, threads, left)
        if self.store.requests_s_max is not None:
            asked = (load.counts[..., job.store] + load.num_filled).sum(axis=-1, keepdims=True)
            out = np.maximum(out, asked / self.store.requests_s_max)
        for number, tier in enumerate(self.tiers):
            read = load.bytes[..., number] + load.served[..., number]
            out = np.maximum(out, read / tier.read.at(threads))
        received = load.bytes[..., tiers : 2 * tiers].sum(axis=-1)
        sent = load.served.sum(axis=-1)
        out = np.maximum(out, np.maximum(received, sent) / machine.link.bytes_s)
        if machine.decode is not None:
            decode_bytes_s = machine.decode.at(min(threads, machine.cores))
            out = np.maximum(out, load.bytes.sum(axis=-1) / decode_bytes_s)
        busiest: Floats = out
        return busiest

    def _store_s(
        self, size_bytes: Floats, num_readers: Floats, threads: int, left: float
    ) -> Floats:
        """Return how long the store needs for what nodes read at once, by step and node."""
        if self.per_thread or self.store.shared is None:
            alone: Floats = self.node_bytes_s(num_readers, threads)[..., None] * left
            return size_bytes / alone
        own = self.store.throughput.at(threads) * left
        # A step is complete when all nodes have their bytes: a node that needs more gets what
        # others leave.
        all_bytes_s = at(self.store.shared, np.maximum(num_readers, 1))[..., None] * left
        together = np.where(size_bytes > 0, size_bytes.sum(axis=-1, keepdims=True), 0.0)
        out: Floats = np.maximum(size_bytes / own, together / all_bytes_s)
        return out
