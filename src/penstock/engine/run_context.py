"""The objects that the parts of a run share in their process: counters, tiers, other nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.engine.local_tiers import LocalTiers
from penstock.engine.stats import Counters
from penstock.flow.live import LiveRates
from penstock.trace import Recorder

if TYPE_CHECKING:
    from penstock.engine.cluster import Cluster


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """Objects that a run uses and does not own."""

    counters: Counters
    live: LiveRates | None = None
    local_tiers: LocalTiers | None = None
    """The tiers of this node."""
    cluster: Cluster | None = None
    """The other nodes."""

    @property
    def recorder(self) -> Recorder | None:
        """The recorder of the run, if it is traced."""
        return self.counters.recorder

    @property
    def capacity_bytes(self) -> int:
        """Capacity of the tiers of this node, or of all nodes that share theirs."""
        if self.cluster is not None:
            return self.cluster.capacity_bytes
        return 0 if self.local_tiers is None else self.local_tiers.tiers.capacity_bytes
