"""The ranges that a store is probed with.

With an index they are samples, or runs of small samples that are read together; without one they
are parts of the objects. They come in random order, and none comes twice before all have come, so
that caches between here and the store help as little as possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from penstock.dataset.bound import BoundPart
from penstock.dataset.dataset import Dataset
from penstock.dataset.lookup import indexed
from penstock.dataset.moved import open_parts
from penstock.dataset.open import FoundDataset, look_up, names_index
from penstock.dataset.open import open as open_dataset
from penstock.dataset.part import Ints
from penstock.errors import OptionError
from penstock.flow.layout.units import ALONE_BYTES, RUN_BYTES
from penstock.simulate.probe.effort import REQUEST_BYTES_MAX
from penstock.storage.base import ObjectInfo, Store
from penstock.storage.options import StoreOptions

_RANGES_MAX = 16384
"""Ranges drawn ahead."""


class Range(NamedTuple):
    """Bytes to read."""

    info: ObjectInfo
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A store and the data to read."""

    store: Store
    dataset: Dataset | None = None
    """The data set, where there is an index."""
    objects: Sequence[ObjectInfo] = ()
    """Objects to read where there is no index."""

    @classmethod
    def of(
        cls,
        uri: str | Path | Sequence[str | Path],
        *,
        format: str | None = None,
        store: StoreOptions | None = None,
        options: dict[str, Any] | None = None,
    ) -> Target:
        """Return the target of a name; nothing is indexed for it."""
        if names_index(uri):
            dataset = open_dataset(uri, store=store)
            return cls(store=dataset.store, dataset=dataset)
        found = look_up(uri, format=format, store=store, options=options)
        return cls(store=found.located.store, dataset=_indexed(found), objects=found.objects)

    def draws(self, seed: int) -> RangeDraws:
        """Return the ranges to read, in random order."""
        generator = np.random.default_rng(seed)
        if self.dataset is not None:
            ranges = _of_samples(self.dataset, generator)
        else:
            ranges = _of_objects(self.objects, generator)
        if not ranges:
            raise OptionError(f"{self.store.uri} holds no bytes to read; name data to probe with")
        return RangeDraws([ranges[i] for i in generator.permutation(len(ranges)).tolist()])


class RangeDraws:
    """Ranges in a row; from the start again after all have been read."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        assert ranges
        self._ranges = ranges
        self.num_taken = 0

    @property
    def num_ranges(self) -> int:
        """Number of ranges."""
        return len(self._ranges)

    @property
    def mean_bytes(self) -> float:
        """The mean length."""
        return sum(r.length for r in self._ranges) / len(self._ranges)

    @property
    def num_again(self) -> int:
        """Number of reads of ranges that had been read before."""
        return max(0, self.num_taken - len(self._ranges))

    def take(self, count: int) -> list[Range]:
        """Return the next ranges."""
        first = self.num_taken
        self.num_taken += count
        return [self._ranges[i % len(self._ranges)] for i in range(first, first + count)]

    def put_back(self, count: int) -> None:
        """Give back the last ranges, because they were not read."""
        assert 0 <= count <= self.num_taken, (count, self.num_taken)
        self.num_taken -= count


def _indexed(found: FoundDataset) -> Dataset | None:
    """Return the data set if it is indexed already; a probe writes nothing to a store."""
    origin = indexed(found)
    if origin is None:
        return None
    parts = open_parts(found.store, origin.catalog, origin.manifest, lambda: found.objects)
    return Dataset(store=found.store, parts=parts, version=origin.manifest.version)


def _of_samples(dataset: Dataset, generator: np.random.Generator) -> list[Range]:
    ids = random_ids(len(dataset), _RANGES_MAX, generator)
    found: dict[Range, None] = {}
    for bound, _, local_ids in dataset.groups(ids):
        for table in range(len(bound.part.tables)):
            found |= dict.fromkeys(_of_table(bound, table, local_ids))
    return list(found)


def _of_table(bound: BoundPart, number: int, local_ids: Ints) -> list[Range]:
    """Return the ranges of some samples: the sample, its block, or a run of small ones."""
    table = bound.part.tables[number]
    extents = table.extents(local_ids)
    lengths = extents.length
    if not bound.by_block:
        left = table.sizes[extents.object] - extents.offset
        lengths = np.where(lengths < ALONE_BYTES, np.minimum(left, RUN_BYTES), lengths)
    lengths = np.minimum(lengths, REQUEST_BYTES_MAX)
    infos = {i: table.info(i) for i in np.unique(extents.object).tolist()}
    rows = zip(extents.object.tolist(), extents.offset.tolist(), lengths.tolist(), strict=True)
    return [Range(infos[o], offset, length) for o, offset, length in rows if length > 0]


def _of_objects(objects: Sequence[ObjectInfo], generator: np.random.Generator) -> list[Range]:
    ends = np.cumsum([o.size_bytes for o in objects], dtype=np.int64)
    if not len(ends) or ends[-1] == 0:
        return []
    at = random_ids(int(ends[-1]), _RANGES_MAX, generator)
    numbers = np.searchsorted(ends, at, side="right")
    found: dict[Range, None] = {}
    for place, number in zip(at.tolist(), numbers.tolist(), strict=True):
        info = objects[number]
        offset = (place - int(ends[number]) + info.size_bytes) // RUN_BYTES * RUN_BYTES
        found[Range(info, offset, min(RUN_BYTES, info.size_bytes - offset))] = None
    return list(found)


def random_ids(below: int, count_max: int, generator: np.random.Generator) -> Ints:
    """Return different numbers below a bound, all of them if they are few."""
    if below <= count_max:
        return generator.permutation(below).astype(np.int64)
    drawn = np.unique(generator.integers(0, below, 2 * count_max))
    return generator.permutation(drawn)[:count_max].astype(np.int64)
