"""The bytes of each source in an epoch, on all nodes together.

For S bytes of which the tiers have room for C:

* Units with a place are fetched once, whole, by their first use; from then on tiers serve them.
* All others come from the store again in each epoch: sample by sample in a uniform shuffle (without
  the headers of a tar that units hold between small samples), or in runs of megabytes where the
  order goes block by block. A block is read whole when one of its samples is needed, and again if
  it is dropped before its next sample is due.
* Nodes that read from each other (`peers`) share their tiers. Of the bytes that tiers hold, the
  share 1-1/N comes over the link; or sqrt((1-1/N)/(2πb)) if samples are assigned to the nodes that
  hold them, b of them on a node in a step. Room for more than the set holds copies: a node keeps
  what it got from another node, if the unit is one of those that it copies.
* Nodes that do not are alone: a node fetches what its ranks use, and after e epochs it has seen
  1-(1-1/N)^(k·e) of its units of k samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.flow.layout import rereads
from penstock.machine import TierModel
from penstock.simulate.plan.summary import Summary
from penstock.simulate.plan.work import Mode, Peers, Work

RUN_BYTES = 4 << 20
"""Bytes of one request where the order goes block by block, or as stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes and requests of one source in an epoch."""

    source: str
    """store, memory, disk or peers."""
    size_bytes: float
    num_requests: float

    @property
    def request_bytes(self) -> float:
        """Mean bytes of a request."""
        return self.size_bytes / self.num_requests if self.num_requests else float(RUN_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierContents:
    """The contents of full tiers."""

    tier_bytes: tuple[float, ...]
    """Bytes in each tier of a node."""
    total_bytes: float
    """Bytes of the data set that a node finds in tiers: its own, or those of all nodes."""
    copies_share: float = 0.0
    """The share of the units of other homes that a node has room to copy."""

    def share(self, tier: int) -> float:
        """Return the share of the held bytes that lies in one tier."""
        return self.tier_bytes[tier] / max(1.0, sum(self.tier_bytes))


def held_by(tiers: Sequence[TierModel], summary: Summary, work: Work) -> TierContents:
    """Return the contents of full tiers; the first tiers are filled first."""
    nodes = work.num_nodes if work.peers else 1
    room = sum(tier.capacity_bytes for tier in tiers)
    left = own = min(summary.size_bytes, room)
    held = []
    for tier in tiers:
        held.append(min(left, tier.capacity_bytes))
        left -= held[-1]
    total = min(summary.size_bytes, nodes * room)
    others = total - total / nodes
    return TierContents(
        tier_bytes=tuple(held),
        total_bytes=total,
        copies_share=(own - total / nodes) / others if others else 0.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochBytes:
    """The bytes of one epoch, on all nodes together."""

    store: Traffic
    filled_bytes: float
    """Bytes from the store that tiers are filled with."""
    served_bytes: float
    """Bytes that tiers serve."""
    peer_bytes: float
    """Bytes that nodes get from each other."""


def epoch_bytes(summary: Summary, work: Work, held: TierContents, epoch: int) -> EpochBytes:
    """Return the bytes of each source in an epoch, counted from 0."""
    filled, served = _tier_bytes(summary, work, held, epoch)
    mode = work.mode(epoch)
    times = times_read(summary, work, held, mode)
    rest = summary.size_bytes - held.total_bytes
    if mode == "global":
        rest *= summary.wanted_share  # Samples are read alone, without what lies between them.
        units = summary.units_in(held.total_bytes)
        left = 1 - units / summary.num_units
        reads = (summary.num_blocks or summary.num_reads) * left * times
        requests = filled / max(1.0, held.total_bytes / max(1.0, units)) + reads
    else:
        requests = (filled + rest * times) / _run_bytes(summary)
    return EpochBytes(
        store=Traffic(source="store", size_bytes=filled + rest * times, num_requests=requests),
        filled_bytes=filled,
        served_bytes=served,
        peer_bytes=_peer_bytes(summary, work, held, epoch),
    )


def _tier_bytes(
    summary: Summary, work: Work, held: TierContents, epoch: int
) -> tuple[float, float]:
    """Return the bytes that fill tiers, and the bytes that tiers serve."""
    placed = held.total_bytes
    if work.peers or work.num_nodes == 1:
        return (placed, 0.0) if epoch == 0 else (0.0, placed)
    others = 1 - 1 / work.num_nodes
    samples = summary.num_reads / summary.num_units
    filled = work.num_nodes * placed * others ** (samples * epoch) * (1 - others**samples)
    return filled, max(0.0, placed - filled)


def _peer_bytes(summary: Summary, work: Work, held: TierContents, epoch: int) -> float:
    """Return what nodes get from each other."""
    nodes = work.num_nodes
    if work.peers is None or nodes == 1:
        return 0.0
    moved = moved_share(work.peers, nodes, work.node_batch_size)
    # A node uses a sample that is at home elsewhere with this chance in each epoch.
    used = moved / (nodes - 1)
    samples = summary.num_reads / summary.num_units
    copied: float = held.copies_share * (1 - (1 - used) ** (samples * epoch))
    return held.total_bytes * moved * (1 - copied)


def times_read(summary: Summary, work: Work, held: TierContents, mode: Mode) -> float:
    """Return how often a byte without a place is read from the store in an epoch."""
    nodes, block = work.num_nodes, summary.samples_a_block
    if mode == "blocks":
        block = max(block, _run_bytes(summary) / summary.read_bytes)
    if mode == "sequential" or block <= 1:
        return 1.0
    # The samples of a block go to all nodes, and each node that gets one reads the whole block.
    touched: float = nodes * (1 - (1 - 1 / nodes) ** block)
    if mode == "blocks":
        return touched
    # In a uniform shuffle a later use finds the block in the stage if it has not been dropped.
    rest_bytes = max(1.0, summary.size_bytes - held.total_bytes)
    stage_bytes = work.stage_bytes * work.world.num_ranks / nodes
    return touched * rereads.times_read(block / touched, rest_bytes, stage_bytes)


def _run_bytes(summary: Summary) -> float:
    """Return the bytes of one request where neighbours are used together."""
    if summary.num_blocks:
        return max(1.0, summary.size_bytes / summary.num_blocks)
    return max(1.0, min(RUN_BYTES, summary.size_bytes))


def moved_share(peers: Peers, num_nodes: int, node_batch_size: float) -> float:
    """Return the share of the held bytes that moves between nodes in an epoch.

    `fixed`: a sample is computed wherever its place in the batch says, on its own home one time in
    N. `locality`: on its home, and only what one node has too much of for this step moves.

    >>> round(moved_share("fixed", 16, 64), 3), round(moved_share("locality", 16, 64), 3)
    (0.938, 0.048)
    """
    elsewhere = 1 - 1 / num_nodes
    if peers == "fixed":
        return elsewhere
    return min(elsewhere, math.sqrt(elsewhere / (2 * math.pi * max(1.0, node_batch_size))))
