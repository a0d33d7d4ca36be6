"""Reads: what a policy decides about one epoch, and the traffic that this comes to.

For each use of a sample a policy says where its bytes come from, and whether they may be read ahead
of their step or only when the training loop asks. That is all there is to a policy: devices, look-
ahead and the barrier after every step are the same for all of them, and `bulk` turns the traffic of
steps into seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from penstock.dataset.part import Ints
from penstock.simulate.job import Codes, Floats, SimulatedJob, added

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOption:
    """A source that has samples from some time on. The first option that has a sample is read."""

    sources: Codes
    """By access."""
    holders: Ints
    """The node that holds it, by access."""
    from_s: Floats
    """When the bytes are there, by access; infinite where they never are."""

    @property
    def settled_s(self) -> float:
        """When all samples are there that ever will be."""
        return float(self.from_s[np.isfinite(self.from_s)].max(initial=0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochReads:
    """The uses of samples in one epoch, sorted by step, and the source of each."""

    ids: Ints
    steps: Ints
    workers: Ints
    sources: Codes
    """The source of each access, while no option has it."""
    holders: Ints | None = None
    """The node that serves each access from its tier; None where no peer does."""
    ahead: Flags | bool = True
    """Whether bytes may be read before their step; else the training loop waits for them."""
    fillers: Ints | None = None
    """The node that reads each access from the store into its tier first; -1 where none does."""
    fill_bytes: Ints | None = None
    """How many bytes it reads then, by access; None: only the sample."""
    options: tuple[SourceOption, ...] = ()
    """Faster sources, best first, that have samples from some time on."""
    threads: int | None = None
    """Reads in flight per rank; None: as the scenario says."""
    stage_bytes: float | None = None
    """Room for what is read ahead, per node; None: as the scenario says."""
    background: bool = False
    """Whether the threads that fill a tier read it, on all nodes at once."""
    free: bool = False
    """Whether reading costs nothing and moves no bytes."""

    def part(self, start: int, stop: int) -> EpochReads:
        """Return the accesses of one step, as step 0."""
        part = slice(start, stop)
        assert self.holders is None
        assert self.fillers is None
        return replace(
            self,
            ids=self.ids[part],
            steps=np.zeros(stop - start, np.int64),
            workers=self.workers[part],
            sources=self.sources[part],
            ahead=self.ahead[part] if isinstance(self.ahead, np.ndarray) else self.ahead,
            options=tuple(
                SourceOption(
                    sources=o.sources[part], holders=o.holders[part], from_s=o.from_s[part]
                )
                for o in self.options
            ),
        )

    def decided(self, now_s: Floats | float) -> EpochReads:
        """Return the same with a source chosen for each access, by what is there at a time."""
        sources, holders = self.sources, np.zeros(len(self.ids), np.int64)
        for option in reversed(self.options):
            there = option.from_s <= now_s
            sources = np.where(there, option.sources, sources)
            holders = np.where(there, option.holders, holders)
        return replace(self, sources=sources, holders=holders, options=())

    def is_ahead(self) -> Flags:
        """Return by access whether it may be read ahead."""
        if isinstance(self.ahead, np.ndarray):
            return self.ahead
        return np.full(len(self.ids), self.ahead)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingWork:
    """What is loaded before the first step."""

    store_bytes: Floats
    """Read from the store, by node."""
    peer_bytes: Floats
    """Read from other nodes, by node, after that."""
    tier: int
    """The tier that is filled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTraffic:
    """Bytes and requests of steps, by step and node; `bytes` and `counts` also by source."""

    bytes: Floats
    counts: Floats
    served: Floats
    """Read from each tier for other nodes, by step, node and tier."""
    filled: Floats
    """Read from the store for the node's own tiers."""
    num_filled: Floats


def traffic_of(
    job: SimulatedJob, reads: EpochReads, chosen: Flags | None, num_steps: int
) -> StepTraffic:
    """Return the traffic of the chosen accesses; None chooses all."""
    which = slice(None) if chosen is None else chosen
    nodes, sources = job.nodes_of(reads.workers[which]), reads.sources[which]
    sizes = job.sizes[reads.ids[which]].astype(np.float64)
    rows = reads.steps[which] * job.num_nodes
    shape, cells = (num_steps, job.num_nodes), num_steps * job.num_nodes
    kinds, tiers = job.store + 1, job.num_tiers
    keys = (rows + nodes) * kinds + sources
    served = np.zeros(cells * tiers)
    if reads.holders is not None:
        served = _served(rows, sources, reads.holders[which], sizes, (tiers, cells))
    filled = num_filled = np.zeros(cells)
    if reads.fillers is not None:
        fillers = reads.fillers[which]
        real = fillers >= 0
        brought = sizes if reads.fill_bytes is None else reads.fill_bytes[which].astype(np.float64)
        filled = added((rows + fillers)[real], brought[real], cells)
        num_filled = added((rows + fillers)[real], None, cells)
    return StepTraffic(
        bytes=added(keys, sizes, cells * kinds).reshape(*shape, kinds),
        counts=added(keys, None, cells * kinds).reshape(*shape, kinds),
        served=served.reshape(*shape, tiers),
        filled=filled.reshape(shape),
        num_filled=num_filled.reshape(shape),
    )


def _served(
    rows: Ints, sources: Codes, holders: Ints, sizes: Floats, shape: tuple[int, int]
) -> Floats:
    """Return the bytes that each node reads from its tiers for others."""
    tiers, cells = shape
    peers = (sources >= tiers) & (sources < 2 * tiers)
    keys = (rows[peers] + holders[peers]) * tiers + sources[peers] - tiers
    return added(keys, sizes[peers], cells * tiers)
