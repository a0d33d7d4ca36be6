"""What the tiers of this node hold of a data set, seen by sample.

A holding knows the unit of every sample, the tier that each unit belongs to, and where in it. Bytes
of samples are copied out of the mapped tier files in the thread that needs them; nothing passes
through another process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.dataset.dataset import Dataset
from penstock.dataset.formats.base import Block
from penstock.dataset.mixture import Mixture
from penstock.dataset.part import Ints
from penstock.loader.buffers import Bytes
from penstock.loader.gather import copy_rows
from penstock.loader.job import Group, Piece
from penstock.loader.stats import Counters, TierStats
from penstock.loader.warmth import Warmth
from penstock.plan.placement import Floats, layout_of
from penstock.plan.units import UnitExtent, Units
from penstock.storage.tier import Tier, Tiers
from penstock.storage.tier_open import open_tiers
from penstock.storage.tier_shape import TierShape
from penstock.storage.tier_sizes import Wish

Flags = npt.NDArray[np.bool_]

_BLOCKS_KEPT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where some samples of one table lie."""

    units: Ints
    inside: Ints
    """Where in its unit each sample begins."""

    def part(self, piece: Piece) -> Places:
        """Return the places of a piece's samples."""
        chosen = slice(piece.start, piece.stop)
        return Places(units=self.units[chosen], inside=self.inside[chosen])


class Holding:
    """A data set's units in the tiers of this node."""

    def __init__(
        self,
        dataset: Dataset | Mixture,
        wishes: Sequence[Wish] | Callable[[TierShape], Sequence[Wish]],
        *,
        placed: bool = True,
    ) -> None:
        """Open the tiers; `placed` says that what they hold does not depend on other nodes.

        Wishes may depend on the shape of what is kept.
        """
        self.units = Units.of(dataset)
        uses = _uses(dataset, self.units) if isinstance(dataset, Mixture) else None
        self.layout = layout_of(self.units, uses)
        self.bounds = dataset.bound
        self._sources = list({bound.store.source for bound in self.bounds})
        # A data set that a mixture names twice has its units once.
        numbers = reversed(list(enumerate(self.bounds)))
        self._numbers = {id(bound): n for n, bound in numbers}
        self._recent: list[tuple[int, Block]] = []
        shape = TierShape(
            name=self.units.name if uses is None else _name_with(self.units.name, uses),
            offsets=self.layout.offsets,
            lengths=self.layout.lengths,
            known=self.layout.known,
            about={"uri": " + ".join(dict.fromkeys(b.store.uri for b in self.bounds))},
        )
        self.name, self.uri = shape.name, shape.about["uri"]
        chosen = wishes(shape) if callable(wishes) else wishes
        self.tiers: Tiers = open_tiers(chosen, shape, placed=placed)
        self.warm_bytes = self.tiers.present_bytes
        """What was there already."""
        self._warmth = [Warmth() for _ in self.tiers.tiers]

    def place(self, span_bytes: int, spans: Flags) -> None:
        """Keep the units of some spans of the layout here."""
        self.tiers.place(span_bytes, spans)
        self.warm_bytes = max(self.warm_bytes, self.tiers.present_bytes)

    def close(self) -> None:
        """Let go of the tiers."""
        self.tiers.close()

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole data set."""
        return self.units.size_bytes

    def stats(self) -> tuple[TierStats, ...]:
        """Return what the tiers hold."""
        return tuple(
            TierStats(
                source=tier.source,
                folder=tier.path,
                capacity_bytes=tier.capacity_bytes,
                held_bytes=tier.fill_bytes,
            )
            for tier in self.tiers.tiers
        )

    # -- by sample ---------------------------------------------------------------------------

    def places(self, group: Group) -> list[Places]:
        """Return the units of a group's samples, table by table; looked up once for a group."""
        if group.places is None:
            object.__setattr__(group, "places", self._look_up(group))
        found: list[Places] = group.places
        return found

    def _look_up(self, group: Group) -> list[Places]:
        number = self._numbers[id(group.bound)]
        out = []
        for table in range(len(group.bound.part.tables)):
            units, inside = self.units.locate(number, table, group.local_ids)
            out.append(Places(units=units, inside=inside))
        return out

    def is_placed(self, places: list[Places]) -> Flags:
        """Return which samples have all their units in tiers that hold them or have room."""
        flags = self.has_place(places[0].units)
        for table in places[1:]:
            flags &= self.has_place(table.units)
        return flags

    def has_place(self, units: Ints) -> Flags:
        """Return which units lie in a tier, or have their place in one that has room."""
        tier_of = self.tiers.tier_of(units)
        flags = tier_of >= 0
        for number, tier in enumerate(self.tiers.tiers):
            if tier.is_full:
                flags &= (tier_of != number) | self.tiers.present(units)
        return flags

    def absent(self, units: Ints) -> list[int]:
        """Return those of some units that are not there yet, each once, in order of first use."""
        missing = units[~self.tiers.held(units)]
        return list(dict.fromkeys(missing.tolist()))

    # -- by unit -----------------------------------------------------------------------------

    def extent(self, unit: int) -> UnitExtent:
        """Return where a unit lies in the store."""
        return self.units.extent(unit)

    def source(self, unit: int) -> str:
        """Return the word for the store that a unit comes from."""
        if len(self._sources) == 1:
            return self._sources[0]
        return self.bounds[self.extent(unit).bound_number].store.source

    def length(self, unit: int) -> int:
        """Return the bytes of a unit."""
        return int(self.layout.lengths[unit])

    def tier(self, unit: int) -> Tier:
        """Return the tier that a unit belongs to."""
        return self.tiers.tiers[int(self.tiers.tier_of(np.array([unit]))[0])]

    def settle(self, unit: int) -> bool:
        """Return whether a unit is in its tier and good; what an earlier run left is checked."""
        return bool(self.tiers.settle(np.array([unit]))[0])

    def read_elsewhere(self, unit: int) -> memoryview | None:
        """Return a unit from another tier than its own: sizes may have changed between runs."""
        if len(self.tiers.tiers) < 2:
            return None
        found = self.tiers.holder(unit)
        return found.read(unit) if found is not None else None

    def ranges(self, units: Ints, inside: Ints | int, lengths: Ints) -> Ints:
        """Return parts of units as other nodes are asked for them; see `peers.base.Ask`."""
        out = np.empty((len(units), 5), np.int64)
        out[:, 0], out[:, 3], out[:, 4] = units, inside, lengths
        out[:, 1], out[:, 2] = self.layout.offsets[units], self.layout.lengths[units]
        return out

    def view(self, unit: int) -> Bytes | None:
        """Return a unit as it lies in its mapped tier, if it is there."""
        if not self.tiers.held(np.array([unit]))[0]:
            return None
        start = int(self.layout.offsets[unit])
        return self.tier(unit).data[start : start + self.length(unit)]

    def samples(self, dataset: Dataset | Mixture, ids: Ints) -> list[dict[str, Any]]:
        """Return decoded samples: from the tiers, and from the store what they do not hold."""
        out: list[dict[str, Any]] = [{}] * len(ids)
        for bound, where, local_ids in dataset.groups(ids):
            group = Group(bound=bound, where=where, local_ids=local_ids)
            places = self.places(group)
            for j, (i, local) in enumerate(zip(where.tolist(), local_ids.tolist(), strict=True)):
                if bound.by_block:
                    block = self._block(group, places[0], j)
                    out[i] = bound.decoded(block.sample(int(group.extents[0].row[j])), local)
                else:
                    raws = [self._raw(group, table, p, j) for table, p in enumerate(places)]
                    out[i] = bound.decoded_all(local_ids[j : j + 1], [raws])[0]
        return out

    def _block(self, group: Group, places: Places, j: int) -> Block:
        unit = int(places.units[j])
        for number, block in self._recent:
            if number == unit:
                return block
        block = group.bound.unpack(int(group.local_ids[j]), self._raw(group, 0, places, j))
        self._recent = [(unit, block), *self._recent[: _BLOCKS_KEPT - 1]]
        return block

    def _raw(self, group: Group, table: int, places: Places, j: int) -> memoryview:
        inside, length = int(places.inside[j]), int(group.extents[table].length[j])
        whole = self.view(int(places.units[j]))
        if whole is None:
            return group.bound.read_sample(table, int(group.local_ids[j]))
        return memoryview(bytearray(whole[inside : inside + length]))

    # -- copying -----------------------------------------------------------------------------

    def copy_into(
        self,
        places: Places,
        lengths: Ints,
        target: Bytes,
        starts: Sequence[int],
        counters: Counters,
    ) -> Ints:
        """Copy samples into `target`, each to its start; return which ones are not there."""
        at = np.asarray(starts, np.int64)

        def copy(number: int, chosen: Ints, offsets: Ints) -> int:
            tier, sizes = self.tiers.tiers[number], lengths[chosen]
            rows = list(zip(offsets.tolist(), sizes.tolist(), at[chosen].tolist(), strict=True))
            ranges = ((tier, offset, size) for offset, size, _ in rows)
            with self._warmth[number].asked(lambda: ranges):
                data = tier.data
                for offset, size, start in rows:
                    target[start : start + size] = data[offset : offset + size]
            return int(sizes.sum())

        return self._copy_by_tier(places, copy, counters)

    def copy_rows(self, places: Places, target: Bytes, where: Ints, counters: Counters) -> Ints:
        """Copy samples of one length into rows of `target`; return which ones are not there."""
        width = int(target.shape[1])

        def copy(number: int, chosen: Ints, offsets: Ints) -> int:
            tier, warmth = self.tiers.tiers[number], self._warmth[number]
            ranges = [(tier, o, width) for o in offsets.tolist()]
            with warmth.asked(lambda: ranges):
                copy_rows(*_rows_of(tier.data, offsets, width), target, where[chosen])
            return len(chosen) * width

        return self._copy_by_tier(places, copy, counters)

    def count(self, places: Places, lengths: Ints, counters: Counters) -> None:
        """Count samples as read from their tiers."""
        self._copy_by_tier(places, lambda _, chosen, __: int(lengths[chosen].sum()), counters)

    def _copy_by_tier(
        self, places: Places, copy: Callable[[int, Ints, Ints], int], counters: Counters
    ) -> Ints:
        """Copy what each tier holds; return the samples that no tier holds."""
        held = self.tiers.held(places.units)
        tier_of = self.tiers.tier_of(places.units)
        offsets = self.layout.offsets[places.units] + places.inside
        for number, tier in enumerate(self.tiers.tiers):
            chosen = np.flatnonzero(held & (tier_of == number))
            if len(chosen):
                begin = time.perf_counter()
                size_bytes = copy(number, chosen, offsets[chosen])
                seconds = time.perf_counter() - begin
                counters.add_reads(tier.source, size_bytes, len(chosen), seconds)
        return np.flatnonzero(~held)


def _uses(mixture: Mixture, units: Units) -> Floats:
    """Return how often an epoch uses each unit of a mixture; of very many, those of each table."""
    total = sum(mixture.weights)
    dataset_of = np.repeat(range(len(mixture.datasets)), [len(d.bound) for d in mixture.datasets])
    of_dataset = [
        weight / total * mixture.samples_per_epoch / len(dataset)
        for weight, dataset in zip(mixture.weights, mixture.datasets, strict=True)
    ]
    of_place = [of_dataset[dataset_of[bound_number]] for bound_number, _ in units.tables]
    if units.is_computed:
        return np.array(of_place)
    places, _, _, _ = units.extents(np.arange(units.num_units))
    return np.array(of_place)[places]


def _name_with(name: str, uses: Floats) -> str:
    """Return a name of its own for a layout that depends on how often units are used."""
    classes = np.frexp(uses)[1].astype("<i2")
    return xxhash.xxh3_128_hexdigest(name.encode() + classes.tobytes())


def _rows_of(data: Bytes, offsets: Ints, width: int) -> tuple[Bytes, Ints]:
    """Return a file as rows, and the numbers of those that begin at some offsets."""
    if not (offsets % width).any():
        whole = data[: len(data) // width * width].reshape(-1, width)
        return whole, offsets // width
    # Rows that overlap: one from every byte on.
    every = np.lib.stride_tricks.as_strided(data, (len(data) - width + 1, width), (1, 1))
    return every, offsets
