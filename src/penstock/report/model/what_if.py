"""Questions and answers of the model: what would change, and what would come of it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from penstock.errors import OptionError

_FACTORS = (
    "fetch_factor",
    "decode_factor",
    "hand_over_factor",
    "compute_factor",
    "communicate_factor",
)
_MAY_BE_ZERO = ("memory_cache_bytes", "disk_cache_bytes", "store_latency_s", "workers")


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """A change to a run that was traced. None: as it was in that run."""

    nodes: int | None = None
    ranks_per_node: int | None = None
    workers: int | None = None
    """Processes of a rank that make batches. 0 (torch): the training process makes them itself."""
    prefetch_factor: int | None = None
    """Batches a worker may have asked for and not delivered (torch)."""
    batch_size: int | None = None
    """Samples a step and rank."""
    epochs: int | None = None
    cores: int | None = None
    """Usable cores of a node."""
    memory_cache_bytes: int | None = None
    """Of a node, in memory: Penstock's tier, or the page cache of other loaders."""
    disk_cache_bytes: int | None = None
    """Of a node, on its disk."""
    store_bandwidth: float | None = None
    """Bytes a second that the store gives to the whole job."""
    store_latency_s: float | None = None
    """Median time to the first byte of a request."""
    link_bandwidth: float | None = None
    """Bytes a second between a node and the other nodes."""
    num_samples: int | None = None
    fetch_factor: float = 1.0
    """Reading a sample takes so many times as long; 0.5 halves it."""
    decode_factor: float = 1.0
    hand_over_factor: float = 1.0
    compute_factor: float = 1.0
    communicate_factor: float = 1.0
    interference: bool = True
    """False: the loader's work does not slow the step (worker processes and free cores)."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None or isinstance(value, bool):
                continue
            least = 0 if field.name in (*_FACTORS, *_MAY_BE_ZERO) else 1
            if not math.isfinite(value) or value < least:
                raise OptionError(f"{field.name} must be at least {least}, got {value!r}")

    @property
    def changes(self) -> dict[str, Any]:
        """What differs from the run that was traced."""
        default = WhatIf()
        return {k: v for k, v in asdict(self).items() if v != getattr(default, k)}


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What the model says of a run. `_low` and `_high` are the ends of a 90 % band."""

    step_s: float
    """Mean time of a step in the last epoch, the start of workers left out."""
    step_s_low: float
    step_s_high: float
    samples_s: float
    """Samples a second of the whole job, in the last epoch."""
    samples_s_low: float
    samples_s_high: float
    epoch_s: tuple[float, ...]
    """Each epoch, from its first question to the end of its last step."""
    epoch_s_low: float
    """Of the last epoch; where there are several."""
    epoch_s_high: float
    first_epoch_s_low: float
    first_epoch_s_high: float
    stall_share: float
    """Share of the last epoch's time after its first batch that steps wait for batches: each until
    its last rank has its own."""
    stall_share_low: float
    stall_share_high: float
    store_bytes: float
    """From the store, whole job, all epochs."""
    store_bytes_low: float
    store_bytes_high: float
    peer_bytes: float
    """Between nodes, all epochs."""
    peer_bytes_low: float
    peer_bytes_high: float
    memory_bytes: float
    """Of the busiest node: cache, batches in flight, worker processes."""
    disk_bytes: float
    """Of a node: its cache on disk."""
    store_bytes_s: float
    """Demand on the store, mean over the first epoch, whole job."""
    link_bytes_s: float
    """Demand on the link of a node, mean over the last epoch."""
    limit: str
    """What limits the last epoch: `compute`, `store`, `latency`, `cores`, `workers`, `hand-over`,
    `link`, `disk` or `barrier`."""
    num_ranks: int = 1
    notes: tuple[str, ...] = ()
    """What the reader should know: the model does not fit, or the question lies far outside."""

    @property
    def time_s(self) -> float:
        """All epochs together."""
        return sum(self.epoch_s)
