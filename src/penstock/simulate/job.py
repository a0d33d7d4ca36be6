"""The job of a scenario: which rank uses which sample at which step, and how long it computes.

Order and steps are the real ones (`penstock.order`): a simulated run uses the samples that a real
one would. Ranks are numbered node by node; the ranks of a node share its tiers and its link.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from penstock.dataset.part import Ints
from penstock.errors import OptionError
from penstock.order import GlobalOrder, Steps
from penstock.simulate.scenario import Scenario

Floats = npt.NDArray[np.float64]
Codes = npt.NDArray[np.uint8]
"""Sources of bytes: t < T is tier t of the own node, T + t that of another node, 2 T the store."""


def added(keys: Ints, values: Floats | None, count: int) -> Floats:
    """Return values (or ones) added up by key, for the keys from 0 to `count`."""
    out: Floats = np.bincount(keys, values, count).astype(np.float64, copy=False)
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Accesses:
    """Uses of samples in one epoch, in the order of the epoch."""

    ids: Ints
    steps: Ints
    workers: Ints
    """The ranks that use them, counted over all nodes."""


@dataclass(frozen=True)
class SimulatedJob:
    """A scenario with its sizes drawn and its epochs cut into steps."""

    scenario: Scenario

    @cached_property
    def sizes(self) -> Ints:
        """Bytes of every sample."""
        return self.scenario.sizes()

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of the data set."""
        return int(self.sizes.sum())

    @cached_property
    def order(self) -> GlobalOrder:
        """The order of all epochs."""
        return GlobalOrder(num_samples=len(self.sizes), seed=self.scenario.job.seed)

    @cached_property
    def steps(self) -> Steps:
        """The global batches of an epoch."""
        job = self.scenario.job
        size = job.batch * self.num_workers
        if size > len(self.sizes):
            raise OptionError(
                f"a global batch has {size} samples ({job.nodes} nodes, {job.ranks} ranks, batch "
                f"{job.batch}), the data set {len(self.sizes)}; lower job.batch or job.nodes"
            )
        return Steps(
            num_samples=len(self.sizes),
            global_batch_size=size,
            num_ranks=self.num_workers,
            drop_last=job.drop_last,
        )

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.scenario.job.nodes

    @property
    def ranks(self) -> int:
        """Number of ranks of a node."""
        return self.scenario.job.ranks

    @property
    def num_workers(self) -> int:
        """Number of ranks on all nodes."""
        return self.num_nodes * self.ranks

    @property
    def num_steps(self) -> int:
        """Number of steps of an epoch."""
        return self.steps.num_steps

    @property
    def num_tiers(self) -> int:
        """Number of tiers of a node."""
        return len(self.scenario.machine.tiers)

    @property
    def store(self) -> int:
        """The code of the store."""
        return 2 * self.num_tiers

    @property
    def capacities(self) -> Ints:
        """Bytes that each tier of one node holds."""
        return np.array([t.capacity_bytes for t in self.scenario.machine.tiers], np.int64)

    @property
    def capacity_bytes(self) -> int:
        """Bytes that all tiers of all nodes hold."""
        return int(self.capacities.sum()) * self.num_nodes

    def nodes_of(self, workers: Ints) -> Ints:
        """Return the nodes of some ranks."""
        return workers // self.ranks

    def accesses(self, epoch: int) -> Accesses:
        """Return which rank uses which sample in an epoch, by the place in the batch."""
        steps = self.steps
        # Fewer than samples if the last batch is dropped. Padding of an incomplete one is left out.
        positions = np.arange(min(len(self.sizes), steps.num_steps * steps.global_batch_size))
        return Accesses(
            ids=self.order.ids(epoch, 0, len(positions)),
            steps=positions // steps.global_batch_size,
            workers=positions % steps.global_batch_size // self.scenario.job.batch,
        )

    def summed(self, steps: Ints, workers: Ints, values: Floats | None) -> Floats:
        """Return values (or counts) added up by step and worker."""
        keys = steps * self.num_workers + workers
        shape = (int(steps.max()) + 1 if len(steps) else 0, self.num_workers)
        return added(keys, values, shape[0] * shape[1]).reshape(shape)

    def compute_s(self, steps: Ints, workers: Ints, sizes: Ints) -> Floats:
        """Return the seconds that each rank computes in each step."""
        job = self.scenario.job
        if job.compute_bytes_s:
            return self.summed(steps, workers, sizes.astype(np.float64)) / job.compute_bytes_s
        return self.summed(steps, workers, None) / job.compute_samples_s
