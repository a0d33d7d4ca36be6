"""Access strings: the uses of one node in time, for policies that evict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.dataset.part import Ints
from penstock.simulate.job import SimulatedJob

SmallInts = npt.NDArray[np.int32]
"""Sample ids of a whole run: four bytes each keep twelve million of them small."""


def uses_by_node(job: SimulatedJob) -> tuple[SmallInts, Ints]:
    """Return all uses of the run as sample ids, node by node and in time, and the nodes' bounds.

    Shares are fixed, so nodes have the same places in every epoch: ids are by epoch and place, with
    the places sorted by node.
    """
    epochs = [job.accesses(epoch) for epoch in range(job.scenario.job.epochs)]
    nodes = job.nodes_of(epochs[0].workers)
    order = np.argsort(nodes, kind="stable")
    ids = np.stack([epoch.ids[order].astype(np.int32) for epoch in epochs])
    bounds: Ints = np.searchsorted(nodes[order], np.arange(job.num_nodes + 1))
    return ids, bounds


def node_strings(ids: SmallInts, bounds: Ints) -> Iterator[tuple[int, SmallInts]]:
    """Yield each node's string."""
    for node in range(len(bounds) - 1):
        yield node, ids[:, bounds[node] : bounds[node + 1]].ravel()


def neighbours(string: npt.NDArray[np.signedinteger[Any]]) -> tuple[Ints, Ints]:
    """Return for every use where the same sample was used before (-1) and will be after (n).

    >>> neighbours(np.array([7, 8, 7, 7]))
    (array([-1, -1,  0,  2]), array([2, 4, 3, 4]))
    """
    count = len(string)
    order = np.argsort(string, kind="stable")
    same = string[order][1:] == string[order][:-1]
    before, after = np.full(count, -1), np.full(count, count)
    before[order[1:][same]] = order[:-1][same]
    after[order[:-1][same]] = order[1:][same]
    return before, after
