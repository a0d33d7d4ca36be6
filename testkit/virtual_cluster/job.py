"""The job of a simulated cluster: the data, the order, and the home of each unit.

Each sample is one unit. Order, batches and homes are those of a real job: `order`,
`flow.layout.spans` and `flow.layout.homes` compute them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from penstock.dataset.part import Ints
from penstock.flow.layout.homes import HomeNode, Homes, cluster_homes
from penstock.flow.layout.placement import UnitLayout, offsets_of
from penstock.flow.layout.spans import spans_of
from penstock.order import GlobalOrder, Steps, StreamHash
from testkit.virtual_cluster.faults import ClusterFault, drawn_faults

STAGE_BYTES = 2 << 20
"""Memory of a rank for batches that are being made."""
_UNIT_BYTES = (65_536, 200_000)
_STORE_BYTES_S = 10e6
_NODE_BYTES_S = 20e6


@dataclass(frozen=True, kw_only=True)
class ClusterJob:
    """A job on a cluster, and its faults."""

    seed: int
    nodes: int = 4
    ranks: int = 1
    """Ranks of each node."""
    steps: int = 16
    """Steps of each epoch."""
    epochs: int = 3
    batch: int = 2
    """Samples of a rank and step."""
    capacity: float = 1.2
    """What all tiers together hold, as a share of the data set."""
    compute_s: float = 0.1
    """How long the training loop computes in a step."""
    lockstep: bool = True
    """Whether ranks wait for each other at each step, as a real job does."""
    faults: tuple[ClusterFault, ...] = ()
    _batches: dict[tuple[int, int], list[int]] = field(default_factory=dict, repr=False, init=False)

    @classmethod
    def drawn(cls, seed: int, *, nodes: int | None = None, faults: int | None = None) -> ClusterJob:
        """Draw a job and its faults."""
        draws = random.Random(seed)
        num_nodes = nodes or draws.choice((2, 3, 3, 4, 4, 5, 6, 8))
        num_faults = faults if faults is not None else draws.choice((0, 1, 1, 2, 2, 3, 5))
        job = cls(
            seed=seed,
            nodes=num_nodes,
            ranks=draws.choice((1, 1, 2)) if num_nodes < 5 else 1,
            capacity=draws.choice((0.6, 1.0, 1.05, 1.5, 2.5)),
            lockstep=draws.random() < 0.8,
            epochs=draws.choice((2, 3)),
        )
        drawn = drawn_faults(
            draws, num_nodes=num_nodes, num_faults=num_faults, within_s=job.quick_s
        )
        return replace(job, faults=drawn)

    # -- the data ----------------------------------------------------------------------------

    @property
    def num_ranks(self) -> int:
        """Ranks on all nodes."""
        return self.nodes * self.ranks

    @property
    def num_steps(self) -> int:
        """Steps of all epochs."""
        return self.steps * self.epochs

    @property
    def quick_s(self) -> float:
        """About how long it takes when nothing goes wrong."""
        return max(self.num_steps * self.compute_s, self.size_bytes / _STORE_BYTES_S) + 1.0

    @cached_property
    def lengths(self) -> list[int]:
        """Bytes of each unit."""
        num_samples = self.num_ranks * self.batch * self.steps
        sizes = np.random.default_rng(self.seed).integers(*_UNIT_BYTES, num_samples)
        out: list[int] = sizes.tolist()
        return out

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of all units."""
        return sum(self.lengths)

    @property
    def store_bytes_s(self) -> float:
        """Bandwidth of the store, for all nodes together."""
        return _STORE_BYTES_S

    @property
    def node_bytes_s(self) -> float:
        """Bandwidth of a node's link."""
        return _NODE_BYTES_S

    # -- the order ---------------------------------------------------------------------------

    @cached_property
    def _split(self) -> Steps:
        return Steps(
            num_samples=len(self.lengths),
            global_batch_size=self.num_ranks * self.batch,
            num_ranks=self.num_ranks,
        )

    @cached_property
    def order(self) -> list[Ints]:
        """The samples of each epoch in the order of use."""
        order = GlobalOrder(num_samples=len(self.lengths), seed=self.seed)
        return [order.ids(epoch, 0, order.num_samples) for epoch in range(self.epochs)]

    def batch_of(self, rank: int, step: int) -> list[int]:
        """Return the samples of a rank's batch; steps count over all epochs."""
        known = self._batches.get((rank, step))
        if known is None:
            epoch, inside = divmod(step, self.steps)
            positions, _ = self._split.positions(inside, rank)
            known = self._batches[rank, step] = self.order[epoch][positions].tolist()
        return known

    def units_of_step(self, step: int) -> Ints:
        """Return the samples that all ranks together use at a step; steps count over all epochs."""
        epoch, inside = divmod(step, self.steps)
        width = self.num_ranks * self.batch
        return self.order[epoch][inside * width : (inside + 1) * width]

    def hash_of(self, rank: int) -> StreamHash:
        """Return the hash of all that a rank should deliver, computed from the order alone."""
        steps = [(step, self.batch_of(rank, step)) for step in range(self.num_steps)]
        return self.hash_of_steps(rank, steps)

    def hash_of_steps(self, rank: int, steps: Iterable[tuple[int, list[int]]]) -> StreamHash:
        """Return the hash of what a rank has delivered in some steps."""
        hashed = StreamHash()
        by_epoch: dict[int, tuple[list[Ints], list[int]]] = {}
        for step, ids in steps:
            epoch, inside = divmod(step, self.steps)
            places, all_ids = by_epoch.setdefault(epoch, ([], []))
            places.append(self._split.positions(inside, rank)[0])
            all_ids += ids
        for epoch, (places, all_ids) in by_epoch.items():
            hashed = hashed.update(epoch, np.concatenate(places), all_ids)
        return hashed

    # -- homes -------------------------------------------------------------------------------

    @cached_property
    def homes(self) -> Homes:
        """The homes, as each node computes them from the list of members."""
        layout = UnitLayout(
            offsets=self.offsets,
            lengths=np.array(self.lengths),
            size_bytes=self.size_bytes,
        )
        capacity = int(self.capacity * self.size_bytes / self.nodes)
        nodes = [
            HomeNode(name=self.name_of(number), capacity_bytes=capacity)
            for number in range(self.nodes)
        ]
        return cluster_homes(spans_of(layout), nodes)

    @cached_property
    def offsets(self) -> Ints:
        """The place of each unit in the layout."""
        return offsets_of(np.array(self.lengths))

    def spans_of(self, units: Ints) -> Ints:
        """Return the spans of the layout that units lie in."""
        return self.homes.spans.number_of(self.offsets[units])

    def name_of(self, node: int) -> str:
        """Return the name of a node."""
        return f"{self.seed:x}-{node}"

    @cached_property
    def home_of(self) -> list[int]:
        """The home of each unit while all nodes live; `NOBODY` where none has room."""
        out: list[int] = self.homes.home_of(self.offsets).tolist()
        return out

    def home_bytes(self, node: int) -> int:
        """Return the bytes whose home is a node while all nodes live."""
        return sum(
            size for size, home in zip(self.lengths, self.home_of, strict=True) if home == node
        )
