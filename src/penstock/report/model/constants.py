"""Constants of a run: what its steps, its batches and its hand-over take, as measured.

Nothing is reduced to a mean that can be kept as it was measured: the replay draws stretches of what
really happened, so that slow stretches stay together and tails stay tails.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from penstock.report.model.store_fit import Floats, StoreFit, with_latency
from penstock.report.model.what_if import WhatIf

HAND_OVER_S = 0.001
"""A batch through torch's queue between processes, where a run did not show it."""


@dataclass(frozen=True, kw_only=True)
class MakingCosts:
    """What workers do for samples, in the order in which they did it."""

    counts: Floats
    """Samples that a record stands for."""
    delay_s: Floats
    """Blocked, without the transfer of bytes: the latency of a store, a sleep, a lock."""
    cpu_s: Floats
    sample_bytes: float
    """Bytes that a sample moves from its store."""
    batch_s: float = 0.0
    """A core, for a batch beyond its samples: collating."""

    @property
    def service_s(self) -> float:
        """Mean time of a sample that meets no others, without its transfer."""
        return float((self.delay_s.sum() + self.cpu_s.sum()) / self.counts.sum())


class DrawnTimes:
    """Draws what batches take: stretches of consecutive records."""

    def __init__(self, costs: MakingCosts, seed: int) -> None:
        self._ends = np.concatenate([[0.0], np.cumsum(costs.counts)])
        self._delay = np.concatenate([[0.0], np.cumsum(costs.delay_s)])
        self._cpu = np.concatenate([[0.0], np.cumsum(costs.cpu_s)])
        self._rng = np.random.default_rng(seed)

    def pieces(self, num_samples: int, num_pieces: int) -> tuple[Floats, Floats]:
        """Return delay and cores' seconds of each piece of a batch."""
        total = self._ends[-1]
        start = self._rng.uniform(0.0, total)
        if len(self._ends) > num_samples:  # Records are single samples: begin with a whole one.
            start = float(self._ends[np.searchsorted(self._ends, start) - 1])
        at = start + np.linspace(0.0, num_samples, num_pieces + 1)
        turns, place = np.divmod(at, total)
        delay = np.interp(place, self._ends, self._delay) + turns * self._delay[-1]
        cpu = np.interp(place, self._ends, self._cpu) + turns * self._cpu[-1]
        return np.diff(delay), np.diff(cpu)


@dataclass(frozen=True, kw_only=True)
class RunConstants:
    """All constants that were calibrated from a run."""

    compute_s: Floats
    """Of each step, as its training thread sees it, without waiting for a core."""
    compute_cpu_share: float
    """How much of it needs a core: issuing kernels, or computing on the processor."""
    communicate_s: float
    """Of it, collectives: mean of a step."""
    compute_batch_size: int
    """Samples of the steps that `compute_s` was measured with."""
    compute_fixed_s: float
    """The part of a step that does not grow with its batch; 0 where one run cannot tell."""
    hand_over_s: float
    """The training thread, for taking a batch that is ready."""
    deliver_s: float
    """From the end of making a batch until the training process could take it."""
    start_s: float
    """Before the first batch of a run: workers, connections."""
    num_starts: float
    """Workers that `start_s` was measured with (torch)."""
    making: MakingCosts | None
    """None where no row says what making a batch takes."""
    store: StoreFit | None
    request_s: float = 0.0003
    """Python for one request (Penstock)."""
    disk_bytes_s: float = 0.0
    """Of the disk tier; 0 where the run had none."""
    link_bytes_s: float = 0.0
    """Between nodes, the most that was seen; 0 where the run had one node."""
    interference: float = 0.0
    """How much longer a step computes beside the loader's work: share of the time without it."""
    worker_bytes: float = 0.0
    """Memory of a worker process that it shares with nobody."""
    batch_bytes: float = 0.0
    """Memory of one batch; 0: as its samples are stored."""
    errors: dict[str, float] = field(default_factory=dict)
    """Standard error of constants, relative, by name: `compute`, `fetch`, `decode`, `hand_over`."""
    notes: tuple[str, ...] = ()

    def computed_s(self, batch_size: int, what_if: WhatIf) -> Floats:
        """Return times of steps with another batch, of which a replay draws."""
        grows = batch_size / self.compute_batch_size
        fixed = min(self.compute_fixed_s, float(self.compute_s.min(initial=np.inf)))
        steps = fixed + (self.compute_s - fixed) * grows
        if not what_if.interference:
            steps = steps / (1 + self.interference)
        own = np.maximum(steps - self.communicate_s, 0.0) * what_if.compute_factor
        return np.asarray(own + self.communicate_s * what_if.communicate_factor)

    def store_for(self, what_if: WhatIf) -> StoreFit | None:
        """Return the store after a change."""
        if self.store is None:
            return None
        changed = self.store.changed(
            bytes_s=what_if.store_bandwidth, latency_s=what_if.store_latency_s
        )
        return changed.slower(what_if.fetch_factor) if what_if.fetch_factor != 1.0 else changed

    def making_for(self, what_if: WhatIf) -> MakingCosts | None:
        """Return what making samples takes after a change."""
        if self.making is None:
            return None
        delay = self.making.delay_s
        if what_if.store_latency_s is not None and self.store is not None:
            delay = with_latency(delay, self.store.latency_s, what_if.store_latency_s)
        return replace(
            self.making,
            delay_s=delay * what_if.fetch_factor,
            cpu_s=self.making.cpu_s * what_if.decode_factor,
            batch_s=self.making.batch_s * what_if.decode_factor,
        )
