"""NoPFS (SC 2021), as published.

It places by frequency (`frequency`), loads tiers in the background in the order of first use, and
reads a sample from the own tier, from the one copy that all workers know of, or from the store: the
fastest source that has it. A second copy of a sample comes from the peer that has the first.

Each rank of a node has tiers of its own; reads between ranks of one node count as local here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from penstock.dataset.part import Ints
from penstock.simulate.devices import Devices
from penstock.simulate.job import Floats
from penstock.simulate.policies.base import Policy
from penstock.simulate.policies.frequency import OwnCopies, known_holders, place
from penstock.simulate.reads import EpochReads, SourceOption, StagingWork


class Nopfs(Policy):
    """Frequency placement; copies are loaded once from the store, then from peers."""

    title = "NoPFS"
    ties: ClassVar[str] = "random"
    copies_from_peers: ClassVar[bool] = True
    peers: ClassVar[bool] = True
    """Whether what is read ahead may come from peers."""

    def why_not(self) -> str:
        """It needs a tier."""
        return "" if self.job.num_tiers else "it caches, and the machine has no tier"

    def start(self) -> StagingWork | None:
        """Decide what every worker keeps, and when each copy will be loaded."""
        job = self.job
        self._copies = place(job, ties=self.ties)
        self._known = known_holders(job, self._copies)
        self._own = OwnCopies(job, self._copies)
        self._from_store = np.ones(len(self._copies.ids), np.bool_)
        if self.copies_from_peers:
            # Only the copy that all know of comes from the store; the others are copied from it.
            self._from_store[:] = False
            self._from_store[self._known[self._known >= 0]] = True
        self._loaded_s = self._loading_s()
        self._done_s = float(self._loaded_s.max(initial=0.0))
        return None

    def reads(self, epoch: int) -> EpochReads:
        """Return the store, and copies as options from the time at which they are loaded."""
        reads = self.all_from_store(epoch)
        own = self._own.rows(reads.workers, reads.ids)
        options: tuple[SourceOption, ...] = (self._option(reads, own, own),)
        if self.peers:
            known = self._option(reads, self._known[reads.ids], own)
            options = _faster_first(options[0], known, Devices(self.job).byte_s)
        return replace(reads, options=options)

    def store_left(self, now_s: float) -> float:
        """Return the share of the bandwidth that loading the tiers leaves to the stage."""
        loader = self.job.scenario.loader
        if now_s >= self._done_s or self.job.scenario.model.store_share == "thread":
            return 1.0
        loading = loader.fill_threads * self.job.num_tiers
        return loader.threads / (loader.threads + loading)

    def background_bytes(self, time_s: float) -> tuple[float, float]:
        """Return the bytes loaded into tiers by some time: from the store, from peers."""
        loaded = self._loaded_s <= time_s
        sizes = self.job.sizes[self._copies.ids]
        store = float(sizes[loaded & self._from_store].sum())
        return store, float(sizes[loaded & ~self._from_store].sum())

    def _option(self, uses: EpochReads, rows: Ints, own: Ints) -> SourceOption:
        """Return the copies in some rows as a source."""
        job, copies = self.job, self._copies
        if not len(copies.ids):
            never = np.full(len(rows), np.inf)
            return SourceOption(
                sources=np.zeros(len(rows), np.uint8), holders=rows * 0, from_s=never
            )
        holder = job.nodes_of(copies.workers[rows])
        mine = holder == job.nodes_of(uses.workers)
        tier = copies.tiers[rows]
        there_s = self._loaded_s[rows]
        if rows is not own:
            there_s = self._seen_s(uses, rows)
        return SourceOption(
            sources=np.where(mine, tier, job.num_tiers + tier).astype(np.uint8),
            holders=holder,
            from_s=np.where(rows >= 0, there_s, np.inf),
        )

    def _seen_s(self, uses: EpochReads, rows: Ints) -> Floats:
        """Return when a worker believes that the copy of another one is loaded."""
        return self._loaded_s[rows]

    def _loading_s(self) -> Floats:
        """Return when each copy is loaded: tiers at the same time, copies of a tier in a row."""
        job, copies = self.job, self._copies
        devices, loader = Devices(job), job.scenario.loader
        nodes = np.array([float(job.num_nodes)])
        ranks = job.ranks
        threads = loader.fill_threads * ranks
        loading = threads * job.num_tiers
        share = devices.node_bytes_s(nodes, loading + loader.threads * ranks)[0]
        # Loading and reading ahead share what a node gets by their threads, and ranks share it
        # evenly.
        share = share * threads / (loading + loader.threads * ranks) / ranks
        store_s = (devices.store_byte_s(nodes)[0] + devices.decode_s) / loader.fill_threads
        store_s = max(store_s, 1 / share)
        mean = job.size_bytes / len(job.sizes)
        store_s += devices.latency_s[job.store] / mean / loader.fill_threads
        peer_s = (devices.byte_s[job.num_tiers] + devices.decode_s) / loader.fill_threads
        seconds = np.where(self._from_store, store_s, peer_s) * job.sizes[copies.ids]
        total = np.cumsum(seconds)
        out: Floats = total - (total - seconds)[np.arange(len(total)) - copies.places]
        return out


def _faster_first(
    one: SourceOption, other: SourceOption, byte_s: Floats
) -> tuple[SourceOption, SourceOption]:
    """Return the two options with the faster source of each access in the first."""
    swap = byte_s[other.sources] < byte_s[one.sources]
    return _mixed(swap, other, one), _mixed(swap, one, other)


def _mixed(choose: npt.NDArray[np.bool_], yes: SourceOption, no: SourceOption) -> SourceOption:
    return SourceOption(
        sources=np.where(choose, yes.sources, no.sources),
        holders=np.where(choose, yes.holders, no.holders),
        from_s=np.where(choose, yes.from_s, no.from_s),
    )
