"""Units for the tiers of this node that other nodes have: copies of theirs, and our own share.

A copy comes from its home. What is at home here comes from the store, but for one case: a node that
was cut off, or stood still for a while, finds that others have read its share in the meantime. What
it lacks by then it takes from them, or the store would be asked for those bytes once more.
"""

from __future__ import annotations

import numpy as np

from penstock.engine.cluster import Cluster
from penstock.engine.fills import Fill, FillRun, Fills
from penstock.engine.local_tiers import LocalTiers
from penstock.engine.peer_reads import UnitsRead, peer_cuts


class PeerFills:
    """What other nodes are asked for before the store is."""

    def __init__(self, local_tiers: LocalTiers, cluster: Cluster) -> None:
        self._local_tiers = local_tiers
        self._cluster = cluster

    def requests(self, fills: list[Fill], work: Fills) -> tuple[list[FillRun], list[Fill]]:
        """Return requests for units that are at home on other nodes, and the rest of the fills."""
        units = np.array([fill.unit for fill in fills], np.int64)
        asked: list[FillRun] = []
        own: list[Fill] = []
        for sources, numbers in self._cluster.holders.by_home(units, ""):
            several = [fills[n] for n in numbers.tolist()]
            if sources.home:
                asked += self._reads(several, work, sources.home)
            else:
                own += several
        return asked, sorted(own, key=lambda fill: fill.unit)

    def bring(self, fills: list[Fill], work: Fills) -> list[Fill]:
        """Take claimed units from whoever has kept them in our place; return the missing ones."""
        units = np.array([fill.unit for fill in fills], np.int64)
        missing: list[Fill] = []
        for source, numbers in self._cluster.stand_ins(units):
            several = [fills[n] for n in numbers.tolist()]
            for read in self._reads(several, work, source) if source else ():
                brought = read.bring(source)
                several = [fill for fill in several if fill not in brought]
            missing += several
        return sorted(missing, key=lambda fill: fill.unit)

    def _reads(self, fills: list[Fill], work: Fills, source: str) -> list[UnitsRead]:
        """Return what one peer is asked for, in parts of the size that is asked for at once."""
        local_tiers, cluster = self._local_tiers, self._cluster
        units = np.array([fill.unit for fill in fills], np.int64)
        ranges = local_tiers.ranges(units, 0, local_tiers.layout.lengths[units])
        return [
            UnitsRead(
                fills[start:stop],
                work,
                (source, local_tiers.source(fills[start].unit)),
                ranges[start:stop],
                cluster,
            )
            for start, stop in peer_cuts(ranges)
        ]
