"""The part of a data set that the tiers of this node hold, seen by sample.

`LocalTiers` knows the unit of every sample, the tier of each unit, and its place there. The thread
that needs a sample reads it from the tier's file and checks it; no other process is involved. To
the caller, a damaged unit is an absent one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.dataset.dataset import Dataset
from penstock.dataset.mixture import Mixture, datasets_of
from penstock.dataset.part import Ints
from penstock.engine.buffers import Bytes
from penstock.engine.cache_hits import CacheHits, HitCounter
from penstock.engine.job import GroupPiece, SampleGroup
from penstock.engine.page_cache import PageCacheState
from penstock.engine.stats import Counters, TierStats
from penstock.flow.layout.cuts import UNITS_MAX
from penstock.flow.layout.placement import (
    Floats,
    KeptUnits,
    kept_by,
    layout_of,
    paged,
    paged_layout_of,
)
from penstock.flow.layout.units import Units
from penstock.storage.passing import PassedBytes
from penstock.storage.tier import Tier, Tiers
from penstock.storage.tier_open import open_tiers
from penstock.storage.tier_shape import PAGE_BYTES, TierShape
from penstock.storage.tier_sizes import Wish
from penstock.trace import Kind

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePlaces:
    """Where some samples of one table lie."""

    units: Ints
    inside: Ints
    """Where in its unit each sample begins."""

    def part(self, piece: GroupPiece) -> SamplePlaces:
        """Return the places of a piece's samples."""
        chosen = slice(piece.start, piece.stop)
        return SamplePlaces(units=self.units[chosen], inside=self.inside[chosen])


class LocalTiers:
    """A data set's units in the tiers of this node."""

    def __init__(
        self,
        dataset: Dataset | Mixture,
        wishes: Sequence[Wish] | Callable[[TierShape], Sequence[Wish]],
        *,
        placed: bool = True,
        moving: str = "",
    ) -> None:
        """Open the tiers; `placed` says that what they keep does not depend on other nodes.

        Wishes may be a function of the shape of the data. `moving` names an order whose windows
        decide what is kept: then units come and go, and the tiers serve jobs with that order alone.
        Units of tiny samples stay even then.
        """
        self.is_moving = bool(moving) and _can_move(dataset)
        uses = None
        if self.is_moving:
            self.units = Units.alone(dataset)
            self.layout = paged_layout_of(self.units)
        else:
            moving = ""
            self.units = Units.of(dataset)
            uses = _uses(dataset, self.units) if isinstance(dataset, Mixture) else None
            self.layout = layout_of(self.units, uses)
        self.bounds = dataset.bound
        self._sources = list({bound.store.source for bound in self.bounds})
        # A data set that a mixture names twice has its units once.
        numbers = reversed(list(enumerate(self.bounds)))
        self._numbers = {id(bound): n for n, bound in numbers}
        self._kept: tuple[int, KeptUnits] | None = None
        name = self.units.name if uses is None else _name_with(self.units.name, uses)
        shape = TierShape(
            name=xxhash.xxh3_128_hexdigest(f"{name} {moving}".encode()) if moving else name,
            offsets=self.layout.offsets,
            lengths=self.layout.lengths,
            known=self.layout.known,
            about={"uri": " + ".join(dict.fromkeys(b.store.uri for b in self.bounds))},
        )
        self.name, self.uri = shape.name, shape.about["uri"]
        chosen = wishes(shape) if callable(wishes) else wishes
        self.tiers: Tiers = open_tiers(chosen, shape, placed=placed and not moving)
        self.hits = HitCounter()
        """Hits of tiers whose units come and go."""
        self.keeps: Flags = np.zeros(self.units.num_units if moving else 0, bool)
        """Where units come and go: the units that a batch planned now will find."""
        if moving:
            self.tiers.begin_moving()
        self._passed = _passed_by(dataset)
        self._passed_bytes = sum(p.held_bytes for p in set(self._passed.values()))
        self.warm_bytes = self.tiers.present_bytes + self._passed_bytes
        """Bytes that were there from the beginning, in tiers or from indexing."""
        self._page_cache = [PageCacheState() for _ in self.tiers.tiers]

    def place(self, span_bytes: int, spans: Flags) -> None:
        """Keep the units of some spans of the layout here."""
        self.tiers.place(span_bytes, spans)
        self.warm_bytes = max(self.warm_bytes, self.tiers.present_bytes + self._passed_bytes)

    def kept(self, capacity_bytes: int) -> KeptUnits:
        """Return the units that tiers of some capacity keep; computed once for a capacity."""
        if self._kept is None or self._kept[0] != capacity_bytes:
            self._kept = capacity_bytes, kept_by(self.units, self.layout, capacity_bytes)
        return self._kept[1]

    def close(self) -> None:
        """Close the tiers."""
        self.tiers.close()

    def stats(self) -> tuple[TierStats, ...]:
        """Return capacity and contents of the tiers."""
        return tuple(
            TierStats(
                source=tier.source,
                folder=tier.path,
                capacity_bytes=tier.capacity_bytes,
                held_bytes=tier.fill_bytes,
                num_damaged=tier.num_damaged,
            )
            for tier in self.tiers.tiers
        )

    def cache_hits(self) -> CacheHits | None:
        """Return the hits of tiers whose units come and go; None for others."""
        if not self.is_moving:
            return None
        assert isinstance(self.layout.lengths, np.ndarray)
        sizes = paged(self.layout.lengths)
        return self.hits.hits(sizes, sum(t.capacity_bytes for t in self.tiers.tiers))

    # -- by sample ---------------------------------------------------------------------------

    def places(self, group: SampleGroup) -> list[SamplePlaces]:
        """Return the units of a group's samples, table by table; looked up once for a group."""
        if group.places is None:
            object.__setattr__(group, "places", self._look_up(group))
        found: list[SamplePlaces] = group.places
        return found

    def _look_up(self, group: SampleGroup) -> list[SamplePlaces]:
        number = self._numbers[id(group.bound)]
        out = []
        for table in range(len(group.bound.part.tables)):
            units, inside = self.units.locate(number, table, group.local_ids)
            out.append(SamplePlaces(units=units, inside=inside))
        return out

    def is_placed(self, places: list[SamplePlaces]) -> Flags:
        """Return which samples have all their units in tiers that hold them or have room."""
        flags = self.has_place(places[0].units)
        for table in places[1:]:
            flags &= self.has_place(table.units)
        return flags

    def has_place(self, units: Ints) -> Flags:
        """Return which units lie in a tier, or have their place in one that has room."""
        tier_of = self.tiers.tier_of(units)
        flags = self.keeps[units] if self.is_moving else tier_of >= 0
        for number, tier in enumerate(self.tiers.tiers):
            if tier.is_full:
                flags &= (tier_of != number) | self.tiers.present(units)
        return flags

    def absent(self, units: Ints) -> list[int]:
        """Return the units that are not there yet, each once, in order of first use."""
        missing = units[~self.tiers.held(units)]
        return list(dict.fromkeys(missing.tolist()))

    # -- by unit -----------------------------------------------------------------------------

    def source(self, unit: int) -> str:
        """Return the word for the store that a unit comes from."""
        if len(self._sources) == 1:
            return self._sources[0]
        return self.bounds[self.units.extent(unit).bound_number].store.source

    def length(self, unit: int) -> int:
        """Return the bytes of a unit."""
        return int(self.layout.lengths[unit])

    def tier(self, unit: int) -> Tier:
        """Return the tier that a unit belongs to."""
        return self.tiers.tiers[int(self.tiers.tier_of(np.array([unit]))[0])]

    def settle(self, unit: int) -> bool:
        """Return whether a unit is good in its tier; bytes of an earlier run are checked first."""
        return bool(self.tiers.settle(np.array([unit]))[0])

    def read_elsewhere(self, unit: int) -> memoryview | None:
        """Return a unit that this node has somewhere else than in its tier.

        Another tier may hold it, because sizes may change between runs; or the unit was read while
        the data set was indexed.
        """
        if len(self.tiers.tiers) > 1:
            found = self.tiers.holder(unit)
            if found is not None:
                return found.read(unit)
        if not self._passed:
            return None
        e = self.units.extent(unit)
        passed = self._passed.get(e.bound_number)
        key = self.bounds[e.bound_number].part.tables[e.table].key(e.object)
        return None if passed is None else passed.take(key, e.offset, e.length)

    def ranges(self, units: Ints, inside: Ints | int, lengths: Ints) -> Ints:
        """Return parts of units as the ranges of a question to a peer; see `peers.base.Ask`."""
        out = np.empty((len(units), 5), np.int64)
        out[:, 0], out[:, 3], out[:, 4] = units, inside, lengths
        out[:, 1], out[:, 2] = self.layout.offsets[units], self.layout.lengths[units]
        return out

    def read(self, unit: int, inside: int, size: int) -> Bytes | None:
        """Return checked bytes of a unit from its tier; None if it is not there."""
        number = self.tiers.tier_of_one(unit)
        if number < 0 or not self.tiers.tiers[number].is_held(unit):
            return None
        return self.tiers.tiers[number].read_part(unit, inside, size)

    # -- copying -----------------------------------------------------------------------------

    def copy_into(
        self, places: SamplePlaces, lengths: Ints, target: Bytes, starts: Ints, counters: Counters
    ) -> Ints:
        """Copy samples into `target`, each to its start; return which ones are absent."""
        held = self.tiers.held(places.units)
        tier_of = self.tiers.tier_of(places.units)
        view = target.data
        for number, tier in enumerate(self.tiers.tiers):
            chosen = np.flatnonzero(held & (tier_of == number))
            if len(chosen):
                begin = time.perf_counter()
                units, inside, sizes = places.units[chosen], places.inside[chosen], lengths[chosen]
                with self._page_cache[number].asked(
                    partial(self._ranges_in, tier, units, inside, sizes)
                ):
                    damaged = tier.copy(units, inside, sizes, view, starts[chosen])
                held[chosen[damaged]] = False
                count_tier_read(tier, begin, int(sizes.sum()), len(chosen), counters)
        return np.flatnonzero(~held)

    def _ranges_in(
        self, tier: Tier, units: Ints, inside: Ints, sizes: Ints
    ) -> Iterator[tuple[Tier, int, int]]:
        """Yield where parts of units lie in the file of their tier."""
        offsets = (self.layout.offsets[units] + inside).tolist()
        return ((tier, o, size) for o, size in zip(offsets, sizes.tolist(), strict=True))


def count_tier_read(
    tier: Tier, begin_s: float, size_bytes: int, num_samples: int, counters: Counters
) -> None:
    """Count a read from a tier since `begin_s`, and record it."""
    now_s = time.perf_counter()
    counters.add_reads(tier.source, size_bytes, num_samples, now_s - begin_s)
    if (recorder := counters.recorder) is not None:
        recorder.span(
            Kind.TIER_READ,
            round(begin_s * 1e9),
            round(now_s * 1e9),
            source_id=recorder.name(tier.source),
            size_bytes=size_bytes,
            count=num_samples,
        )


def _can_move(dataset: Dataset | Mixture) -> bool:
    """Return whether single samples can come and go: they fill half a page and are not too many.

    Pages of smaller samples would be almost empty; such samples are kept in runs, for good.
    """
    several = datasets_of(dataset)
    num_samples = sum(len(one) for one in several)
    size_bytes = sum(one.size_bytes for one in several)
    return num_samples <= UNITS_MAX and size_bytes >= num_samples * PAGE_BYTES // 2


def _passed_by(dataset: Dataset | Mixture) -> dict[int, PassedBytes]:
    """Return the bytes that were read to index data sets, by the numbers of their parts."""
    by_part = [one.passed for one in datasets_of(dataset) for _ in one.bound]
    return {number: passed for number, passed in enumerate(by_part) if passed is not None}


def _uses(mixture: Mixture, units: Units) -> Floats:
    """Return how often an epoch uses each unit of a mixture; if there are very many, each table."""
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
    """Return a name for a layout that depends on how often units are used."""
    classes = np.frexp(uses)[1].astype("<i2")
    return xxhash.xxh3_128_hexdigest(name.encode() + classes.tobytes())
