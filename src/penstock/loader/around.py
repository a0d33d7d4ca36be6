"""What a run finds in its process: counters, tiers, and other nodes."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.flow.live import LiveRates
from penstock.loader.cluster import Cluster
from penstock.loader.holding import Holding
from penstock.loader.stats import Counters
from penstock.trace import Recorder


@dataclass(frozen=True, kw_only=True)
class Around:
    """What the parts of a run share; nothing of it is made by the run."""

    counters: Counters
    recorder: Recorder | None = None
    live: LiveRates | None = None
    holding: Holding | None = None
    """The tiers of this node."""
    cluster: Cluster | None = None
    """The other nodes."""
