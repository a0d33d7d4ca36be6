"""What the parts of a run share in their process: counters, tiers, and the other nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.engine.holding import Holding
from penstock.engine.stats import Counters
from penstock.flow.live import LiveRates
from penstock.trace import Recorder

if TYPE_CHECKING:
    from penstock.engine.cluster import Cluster


@dataclass(frozen=True, kw_only=True)
class Around:
    """Objects that a run uses and does not own."""

    counters: Counters
    live: LiveRates | None = None
    holding: Holding | None = None
    """The tiers of this node."""
    cluster: Cluster | None = None
    """The other nodes."""

    @property
    def recorder(self) -> Recorder | None:
        """What records the run, if it is traced."""
        return self.counters.recorder

    @property
    def capacity_bytes(self) -> int:
        """Capacity of the tiers of this node, or of all nodes that share theirs."""
        if self.cluster is not None:
            return self.cluster.capacity_bytes
        return 0 if self.holding is None else self.holding.tiers.capacity_bytes
