"""Loads: the bytes and requests that reads come to, by step and node."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.dataset.part import Ints
from penstock.simulate.job import Codes, Floats, SimulatedJob, added
from penstock.simulate.reads import Flags, Reads


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


def load_of(job: SimulatedJob, reads: Reads, chosen: Flags | None, num_steps: int) -> StepTraffic:
    """Return what the chosen accesses come to; None chooses all."""
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
    """Return what each node reads from its tiers for others."""
    tiers, cells = shape
    peers = (sources >= tiers) & (sources < 2 * tiers)
    keys = (rows[peers] + holders[peers]) * tiers + sources[peers] - tiers
    return added(keys, sizes[peers], cells * tiers)
