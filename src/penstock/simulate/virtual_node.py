"""A node in virtual time: cores, tiers and a store that its ranks share.

Besides the store, the processor takes time. Python has one lock, so what a request or a sample
costs in Python is done one at a time in each rank. Copying, checking and receiving bytes needs a
core, and a node has a number of them.
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
    """What a loader costs the processor, in seconds; the defaults are those of a slow machine.

    To measure `request_s`, let a loader read from a store so fast that only the processor limits
    it: it is the time of an epoch over the number of requests.
    """

    request_s: float = 0.0003
    """Python for one request to the store."""
    sample_s: float = 0.00001
    """Python for one sample of a batch, planning included."""
    batch_s: float = 0.0002
    """Python for one batch."""
    byte_s: float = 1e-9
    """A core, for one byte from the store: to receive it, and to send it if the store runs here."""
    fresh_byte_s: float = 0.3e-9
    """A core, for one byte of memory that was never used before: the kernel clears it. Ten times as
    much on some virtual machines."""
    start_s: float = 0.05
    """Until the first request: threads, connections, opening tiers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """A data set as units, which tiers keep, and samples, which need units."""

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
        """Return samples that are one unit each."""
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
    """The devices that the ranks of a node share, and what its tiers hold."""

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
        """Fill the tiers."""
        self.present[:] = self.tier_of >= 0

    # -- filling -----------------------------------------------------------------------------

    def claim(self, unit: int) -> bool:
        """Return whether the caller is to fetch a unit; else another rank is fetching it."""
        if unit in self._waiting:
            return False
        self._waiting[unit] = []
        return True

    def when_filled(self, unit: int, call: Callable[[], None]) -> None:
        """Call back when a unit that is being fetched has arrived."""
        self._waiting[unit].append(call)

    def filled(self, unit: int) -> None:
        """Record that a unit is in its tier, and call those that wait for it."""
        # Present before the calls: they may plan a batch that needs this unit.
        self.present[unit] = True
        for call in self._waiting.pop(unit, []):
            call()

    # -- seconds -----------------------------------------------------------------------------

    def copy_s(self, size_bytes: float) -> float:
        """Return how long one core copies bytes."""
        return size_bytes / self.machine.copy.at(1)

    def write_s(self, unit: int) -> float:
        """Return how long one core writes a unit into its tier."""
        tier = self.machine.tiers[int(self.tier_of[unit])]
        return int(self.samples.unit_lengths[unit]) / tier.write.at(1)

    def read_tier(self, tier: int, size_bytes: float, call: Callable[[], None]) -> None:
        """Read samples from a tier. Memory takes no time here: the copy into the batch reads it."""
        if tier not in self._disks or not size_bytes:
            call()
            return
        latency_s = self.machine.tiers[tier].latency_s
        self.time.after(latency_s, lambda: self._disks[tier].send(size_bytes, call))
