"""A data set: samples by number, whatever they lie in.

`dataset[i]` is one sample with its fields decoded. Slices and selections are views that cost
nothing. A `Dataset` is a value: it may be pickled and forked, and holds no open file or connection
of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.arguments import count_of
from penstock.dataset.bound import BoundPart, Decoders, checked_decoders
from penstock.dataset.catalog import EVERYTHING_SPEC, Origin
from penstock.dataset.fields import Field
from penstock.dataset.formats.base import Block
from penstock.dataset.moved import open_parts
from penstock.dataset.part import Ints, Part, merge_fields
from penstock.errors import DatasetError, OptionError
from penstock.storage.base import Store
from penstock.storage.passing import PassedBytes

_BLOCKS_KEPT = 4


class Dataset(Sequence[dict[str, Any]]):
    """Samples of one data set, or of a view of it."""

    def __init__(
        self,
        *,
        store: Store,
        parts: Sequence[Part],
        decoders: Decoders | None = None,
        version: int = 0,
        selection: range | Ints | None = None,
        origin: Origin | None = None,
    ) -> None:
        self.store = store
        self.version = version
        """The version that is read; 0 for an index that belongs to no catalog."""
        self.origin = origin
        """The catalog that the version was found in, where that is known."""
        self.selection = selection
        self.passed: PassedBytes | None = None
        """What was read to index it, until tiers take it; None in a copy in another process."""
        self.opened_ns = (0, 0)
        """From when to when it was opened, its index looked up or built (perf_counter_ns); not of a
        copy in another process."""
        self._parts = tuple(parts)
        self._decoders: Decoders = dict(decoders or {})
        starts = np.cumsum([0] + [p.num_samples for p in self._parts])
        self.starts: Ints = starts.astype(np.int64)
        self.bound = tuple(
            BoundPart(store=store, part=p, first=int(first), decoders=self._decoders)
            for p, first in zip(self._parts, starts, strict=False)
        )
        self._recent_blocks: tuple[tuple[tuple[int, int], Block], ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        # Parts that a catalog names travel by these names: the machine that unpickles this may lack
        # the files that lie in the cache of this one.
        is_named = self.origin is not None and self.origin.catalog.store.source != "memory"
        return self.reduced(by_name=is_named)

    def reduced(self, *, by_name: bool) -> tuple[Any, ...]:
        """Take it apart for a pickler: parts by the names that its catalog gives them, which any
        machine can read, or by the files that they lie in here."""
        return _remake, (self._state() | ({"parts": None} if by_name else {}),)

    def _state(self) -> dict[str, Any]:
        """Return the arguments that make this data set."""
        return {
            "store": self.store,
            "parts": self._parts,
            "decoders": self._decoders,
            "version": self.version,
            "selection": self.selection,
            "origin": self.origin,
        }

    @property
    def uri(self) -> str:
        """Where the data lies."""
        return self.store.uri

    @property
    def format(self) -> str:
        """The name of its format."""
        return self._parts[0].format

    @property
    def options(self) -> dict[str, Any]:
        """The format's options that it was indexed with."""
        return self._parts[0].options

    @property
    def fields(self) -> dict[str, Field]:
        """The fields of a sample, by name."""
        return {f.name: f for f in merge_fields([p.fields for p in self._parts])}

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of the index, in the order of their samples."""
        return self._parts

    @property
    def size_bytes(self) -> int:
        """Bytes of all samples (of the whole set, also for a view)."""
        return sum(t.total_bytes() for p in self._parts for t in p.tables)

    @property
    def fingerprint(self) -> str:
        """A hash of what this data set holds and in which order; equal for a copy elsewhere."""
        digest = xxhash.xxh3_128("".join(p.fingerprint for p in self._parts).encode())
        if isinstance(self.selection, range):
            digest.update(repr(self.selection).encode())
        elif self.selection is not None:
            digest.update(np.ascontiguousarray(self.selection).data)
        return digest.hexdigest()

    def __len__(self) -> int:
        return int(self.starts[-1]) if self.selection is None else len(self.selection)

    @overload
    def __getitem__(self, i: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, i: slice) -> Dataset: ...
    def __getitem__(self, i: int | slice) -> dict[str, Any] | Dataset:
        if isinstance(i, slice):
            return self.select(range(len(self))[i])
        return self.__getitems__([self._place(i)])[0]

    def _place(self, i: int) -> int:
        """Return the number of a sample; negative ones count from the end."""
        if not -len(self) <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        return i % len(self)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[i] for i in range(len(self)))

    def __getitems__(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        """Return several samples; torch's DataLoader calls this with a whole batch."""
        out: list[dict[str, Any]] = []
        for base in self.base_ids(np.asarray(ids, np.int64)).tolist():
            bound = self.bound[self.part_numbers(base)]
            out.append(self._sample(bound, base - bound.first))
        return out

    def _sample(self, bound: BoundPart, local: int) -> dict[str, Any]:
        one = np.array([local], np.int64)
        if bound.by_block:
            extents = bound.part.tables[0].extents(one)
            block = self._block(bound, local, int(extents.block[0]))
            return bound.decoded(block.sample(int(extents.row[0])), local)
        raws = [bound.read_sample(table, local) for table in range(len(bound.part.tables))]
        return bound.decoded_all(one, [raws])[0]

    def _block(self, bound: BoundPart, local: int, number: int) -> Block:
        # One tuple, replaced as a whole, needs no lock. A fork could copy a lock while it is held.
        for name, block in self._recent_blocks:
            if name == (bound.first, number):
                return block
        block = bound.unpack(local)
        self._recent_blocks = (
            ((bound.first, number), block),
            *self._recent_blocks[: _BLOCKS_KEPT - 1],
        )
        return block

    def base_ids(self, ids: Ints) -> Ints:
        """Return the ids in the whole set for ids in this view."""
        if self.selection is None:
            return ids
        if isinstance(self.selection, range):
            return self.selection.start + ids * self.selection.step
        return self.selection[ids]

    def part_numbers(self, base_ids: Any) -> Any:
        """Return the part that each of some base ids lies in."""
        return np.searchsorted(self.starts, base_ids, side="right") - 1

    def groups(self, ids: Ints) -> list[tuple[BoundPart, Ints, Ints]]:
        """Return samples by part: the part, their places in `ids`, their ids in the part."""
        base = self.base_ids(ids)
        if len(self.bound) == 1:
            return [(self.bound[0], np.arange(len(ids)), base)]
        numbers = self.part_numbers(base)
        out = []
        for number in np.unique(numbers).tolist():
            where = np.flatnonzero(numbers == number)
            out.append((self.bound[number], where, base[where] - self.bound[number].first))
        return out

    def key(self, i: int) -> str | None:
        """Return a sample's own name, where its format has one."""
        base = int(self.base_ids(np.array([self._place(i)], np.int64))[0])
        bound = self.bound[self.part_numbers(base)]
        name: str | None = bound.part.key(base - bound.first)
        return name

    def select(self, chosen: range | slice | Sequence[int] | npt.NDArray[Any]) -> Dataset:
        """Return a view with some samples: a range, a list of ids, or a mask as long as the set."""
        if isinstance(chosen, slice):
            chosen = range(len(self))[chosen]
        if isinstance(chosen, range):
            selection = self._select_range(chosen)
        else:
            ids = np.asarray(chosen)
            if ids.dtype == bool:
                if len(ids) != len(self):
                    raise OptionError(f"a mask of {len(ids)} for a data set of {len(self)} samples")
                ids = np.flatnonzero(ids)
            ids = ids.astype(np.int64)
            if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < len(self)):
                raise OptionError(
                    f"ids run from 0 to {len(self) - 1}, got {ids.min()} … {ids.max()}"
                )
            selection = self.base_ids(ids)
        return self._like(selection=selection)

    def _select_range(self, chosen: range) -> range | Ints:
        if len(chosen) and not (
            0 <= min(chosen[0], chosen[-1]) <= max(chosen[0], chosen[-1]) < len(self)
        ):
            raise OptionError(f"ids run from 0 to {len(self) - 1}, got {chosen}")
        if self.selection is None:
            return chosen
        if isinstance(self.selection, range):
            start = self.selection.start + chosen.start * self.selection.step
            step = self.selection.step * chosen.step
            return range(start, start + len(chosen) * step, step)
        return self.selection[np.arange(chosen.start, chosen.stop, chosen.step)]

    def with_decoders(self, decoders: Decoders) -> Dataset:
        """Return the same samples with other decoders, by field name or by extension."""
        return self._like(decoders=checked_decoders(decoders, self._parts, self.uri))

    def with_parts(self, parts: Sequence[Part]) -> Dataset:
        """Return the same samples by other parts, which differ in the marks of objects only."""
        if all(one is other for one, other in zip(parts, self._parts, strict=True)):
            return self
        assert [p.fingerprint for p in parts] == [p.fingerprint for p in self._parts]
        return self._like(parts=parts)

    def _like(self, **changes: Any) -> Dataset:
        """Return this data set with something else in its place."""
        other = Dataset(**self._state() | changes)
        other.passed, other.opened_ns = self.passed, self.opened_ns
        return other

    def latest(self) -> Dataset:
        """Return the newest version of this data set, which is itself when there is no newer one.

        Looking costs one request. Readers of the older version are not disturbed.
        """
        origin = self._whole()
        return self.at_version(origin.catalog.newest(self.version))

    def at_version(self, version: int, *, wait_s: float = 0.0) -> Dataset:
        """Return a version of this data set.

        Where a network file system shows new files late, one that another node has seen is waited
        for up to `wait_s`.
        """
        origin = self._whole()
        version = count_of("version", version)
        if version == self.version:
            return self
        manifest = origin.catalog.read_soon(version, wait_s)
        own = origin.manifest
        if not manifest.is_of(own.spec or EVERYTHING_SPEC, own.format, own.options):
            raise DatasetError(
                f"{origin.catalog.uri}: version {version} is {manifest.format} with options "
                f"{manifest.options}, another data set than version {own.version} ({own.format}, "
                f"{own.options}); open it by its own name and format"
            )
        return Dataset(
            store=self.store,
            parts=open_parts(self.store, origin.catalog, manifest),
            decoders=self._decoders,
            version=version,
            origin=Origin(catalog=origin.catalog, manifest=manifest),
        )

    def _whole(self) -> Origin:
        if self.origin is None:
            raise OptionError(
                f"{self.uri} was opened from an index without versions; open the data set by its "
                "own name"
            )
        if self.selection is not None:
            raise OptionError(
                f"this is a view of {len(self)} samples of {self.uri}, and which samples of "
                "another version belong to it is not known; take the other version of the whole "
                "data set and select from that"
            )
        return self.origin

    def __repr__(self) -> str:
        return (
            f"Dataset({self.uri!r}, {self.format}, {len(self):,} samples, "
            f"fields={list(self.fields)}, version={self.version})"
        )


def _remake(state: dict[str, Any]) -> Dataset:
    origin: Origin | None = state["origin"]
    if state["parts"] is None:
        assert origin is not None
        state["parts"] = open_parts(state["store"], origin.catalog, origin.manifest)
    return Dataset(**state)
