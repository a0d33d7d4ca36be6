"""A node in virtual time: cores, tiers and a store that its ranks share.

What costs time besides the store is the processor. Python holds one lock: what a request and a
sample cost there is done one at a time in each rank. Copying, checking and the network's share of a
byte need a core, of which a node has some.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from penstock.dataset.dataset import Dataset
from penstock.dataset.part import Ints
from penstock.errors import OptionError
from penstock.flow.layout.placement import offsets_of
from penstock.flow.layout.units import Units
from penstock.machine import Machine, TierModel
from penstock.simulate.virtual import SharedPipe, VirtualServers, VirtualTime
from penstock.simulate.virtual_store import VirtualStore
from penstock.simulate.weather import Weather
from penstock.storage.tier_places import places_of
from penstock.storage.tier_shape import TierShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What the processor does for a loader, in seconds; the defaults are a slow machine's.

    To measure `request_s`: let a loader read from a store so fast that only the processor limits
    it; then it is the time of an epoch over its requests.
    """

    request_s: float = 0.0003
    """Python for one request to the store."""
    sample_s: float = 0.00001
    """Python for one sample of a batch, planning included."""
    batch_s: float = 0.0002
    """Python for one batch."""
    byte_s: float = 1e-9
    """A core, for one byte from the store: receiving it, and whoever sends it from here."""
    fresh_byte_s: float = 0.3e-9
    """A core, for one byte of memory that was never used before: the kernel clears it. On some
    virtual machines ten times as much."""
    start_s: float = 0.05
    """Until the first request: threads, connections, opening tiers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """A data set as units and their uses: what a tier keeps, and what a sample needs of it."""

    lengths: Ints
    """Bytes of each sample."""
    units: Ints
    """The units of each sample: by sample and table."""
    unit_lengths: Ints

    def __post_init__(self) -> None:
        if self.units.ndim != 2 or len(self.units) != len(self.lengths):
            raise OptionError(
                f"units are by sample and table, got shape {self.units.shape} for "
                f"{len(self.lengths)} samples"
            )

    @classmethod
    def alone(cls, lengths: Ints) -> Samples:
        """Return samples that are units of their own."""
        return cls(lengths=lengths, units=np.arange(len(lengths))[:, None], unit_lengths=lengths)

    @classmethod
    def of(cls, dataset: Dataset) -> Samples:
        """Return the samples of a data set with the units that tiers really keep."""
        units = Units.of(dataset)
        columns: list[Ints] = []
        lengths = np.zeros(len(dataset), np.int64)
        for bound, where, local_ids in dataset.groups(np.arange(len(dataset))):
            number = [b is bound for b in dataset.bound].index(True)
            for table in range(len(bound.part.tables)):
                if table == len(columns):
                    columns.append(np.zeros(len(dataset), np.int64))
                columns[table][where] = units.locate(number, table, local_ids)[0]
                lengths[where] += bound.part.tables[table].extents(local_ids).length
        return cls(
            lengths=lengths, units=np.stack(columns, axis=1), unit_lengths=np.asarray(units.lengths)
        )


class VirtualNode:
    """What the ranks of a node share."""

    def __init__(
        self, time: VirtualTime, machine: Machine, samples: Samples, weather: Weather
    ) -> None:
        self.time, self.machine, self.samples = time, machine, samples
        self.store = VirtualStore(time, machine.store, weather)
        self.cores = VirtualServers(time, machine.cores)
        self.tier_of = self._tiers_of(machine.tiers)
        """The tier that each unit belongs to; -1 where none holds it."""
        self.present: npt.NDArray[np.bool_] = np.zeros(len(samples.unit_lengths), np.bool_)
        self._waiting: dict[int, list[Callable[[], None]]] = {}
        self._disks = {
            number: SharedPipe(time, max(tier.read.bytes_s), each_bytes_s=tier.read.at(1))
            for number, tier in enumerate(machine.tiers)
            if tier.kind == "disk"
        }

    def _tiers_of(self, tiers: tuple[TierModel, ...]) -> Ints:
        lengths = self.samples.unit_lengths.astype(np.int64)
        shape = TierShape(name="virtual", offsets=offsets_of(lengths), lengths=lengths)
        ends = np.cumsum([0, *(tier.capacity_bytes for tier in tiers)]).tolist()
        return places_of(shape, list(pairwise(ends))).tier_of(np.arange(len(lengths)))

    def warm_up(self) -> None:
        """Have everything that has a place in it."""
        self.present[:] = self.tier_of >= 0

    # -- filling -----------------------------------------------------------------------------

    def claim(self, unit: int) -> bool:
        """Return whether a unit is the caller's to fetch; else somebody is at it."""
        if unit in self._waiting:
            return False
        self._waiting[unit] = []
        return True

    def when_filled(self, unit: int, call: Callable[[], None]) -> None:
        """Be called when a unit that somebody else fetches is there."""
        self._waiting[unit].append(call)

    def filled(self, unit: int) -> None:
        """Note that a unit is in its tier."""
        self.present[unit] = True
        for call in self._waiting.pop(unit, []):
            call()

    # -- seconds -----------------------------------------------------------------------------

    def copy_s(self, size_bytes: float) -> float:
        """Return the time that one core copies bytes."""
        return size_bytes / self.machine.copy.at(1)

    def write_s(self, unit: int) -> float:
        """Return the time that one core writes a unit into its tier."""
        tier = self.machine.tiers[int(self.tier_of[unit])]
        return int(self.samples.unit_lengths[unit]) / tier.write.at(1)

    def read_tier(self, tier: int, size_bytes: float, call: Callable[[], None]) -> None:
        """Read samples from a tier; memory is read by the copy that makes the batch."""
        if tier not in self._disks or not size_bytes:
            call()
            return
        latency_s = self.machine.tiers[tier].latency_s
        self.time.after(latency_s, lambda: self._disks[tier].send(size_bytes, call))
