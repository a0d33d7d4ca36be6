"""Is every sample what was indexed: can it be read, does its checksum hold, can it be decoded?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import xxhash

from penstock.dataset.bound import BoundPart
from penstock.dataset.formats.base import Unit
from penstock.dataset.pack_plan import cut
from penstock.dataset.part import Ints
from penstock.dataset.sources import read_raws, stored_bytes
from penstock.dataset.verify_index import Objects, named
from penstock.dataset.verify_report import Findings, Kind, Problem
from penstock.errors import ChangedError, FormatError, MissingPackageError, StoreError
from penstock.storage.pool import Pool

_RUN_BYTES = 16 << 20
_RUN_SAMPLES = 4096
_RUNS_MIN = 64
"""A small set has as many runs too: for threads to share, and for its progress to be seen."""

Raws = list[memoryview]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """What a run of samples is checked with."""

    objects: Objects
    readers: Pool
    decode: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Samples of a part that are checked together: some that lie near each other, or a block."""

    bound: BoundPart
    first: int
    stop: int

    @property
    def num_samples(self) -> int:
        """How many samples are checked."""
        return self.stop - self.first

    def check(self, checks: Checks) -> Findings:
        """Return what is wrong with these samples; never raises for what they hold."""
        try:
            return _check_block(self, checks) if self.bound.by_block else _check_run(self, checks)
        except MissingPackageError:
            raise
        except Exception as error:
            names = f"{named(self.bound, self.first)} to {self.bound.first + self.stop - 1}"
            what = f"{names} of {self.bound.store.uri} could not be checked"
            return Findings(problems=(_problem(self.bound, self.first, "read", what, error),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """What lies between the samples of an object: headers that other tools read."""

    bound: BoundPart
    number: int
    num_samples: ClassVar[int] = 0
    """Samples that are checked: none, their runs do that."""

    @property
    def first(self) -> int:
        """The first sample of the object."""
        return int(self.bound.part.tables[0].first_sample[self.number])

    def check(self, checks: Checks) -> Findings:
        """Return whether the format finds in an object what is in the index."""
        table = self.bound.part.tables[0]
        info = table.info(self.number)
        first, stop = table.first_sample[self.number : self.number + 2].tolist()
        try:
            unit = Unit(objects=(info,))
            part = self.bound.format.scan(unit, self.bound.store, self.bound.part.options)
        except (ChangedError, FormatError, StoreError) as error:
            problem = Problem(
                kind="format",
                message=str(error),
                object=info.key,
                sample_id=self.bound.first + first,
            )
            return Findings(problems=(problem,))
        was, now = (
            table.extents(np.arange(first, stop)),
            part.tables[0].extents(_all(part.num_samples)),
        )
        keys = [part.key(i) == self.bound.part.key(first + i) for i in range(part.num_samples)]
        if (
            np.array_equal(was.offset, now.offset)
            and np.array_equal(was.length, now.length)
            and all(keys)
        ):
            return Findings()
        what = (
            f"{self.bound.store.uri}{info.key} holds {part.num_samples} samples that are not the "
            f"{stop - first} that were indexed: their names or places differ"
        )
        problem = Problem(
            kind="format", message=what, object=info.key, sample_id=self.bound.first + first
        )
        return Findings(problems=(problem,))


def _all(count: int) -> Ints:
    return np.arange(count, dtype=np.int64)


def runs_of(bound: BoundPart) -> Iterator[Run]:
    """Yield the samples of a part in runs."""
    table = bound.part.tables[0]
    if bound.by_block:
        starts = np.unique(table.block_starts())
    else:
        sizes = stored_bytes(bound.part)
        size_bytes = min(_RUN_BYTES, int(sizes.sum()) // _RUNS_MIN + 1)
        starts = cut(sizes, size_bytes, min(_RUN_SAMPLES, len(sizes) // _RUNS_MIN + 1))
    for first, stop in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        yield Run(bound=bound, first=first, stop=stop)


def structures_of(bound: BoundPart, objects: Objects) -> Iterator[Structure]:
    """Yield the objects that have something between their samples and are whole."""
    table = bound.part.tables[0]
    if bound.part.format == "tar":
        for number in range(table.num_objects):
            found = objects.found.get(table.key(number))
            if found is not None and found.size_bytes == int(table.sizes[number]):
                yield Structure(bound=bound, number=number)


def _problem(
    bound: BoundPart, local: int, kind: Kind, what: str, error: Exception | None = None
) -> Problem:
    table = bound.part.tables[0]
    extents = table.extents(np.array([local], np.int64))
    because = f": {type(error).__name__}: {error}" if error is not None else ""
    return Problem(
        kind=kind,
        message=what + because,
        object=table.key(int(extents.object[0])),
        offset=int(extents.offset[0]),
        sample_id=bound.first + local,
        key=bound.part.key(local),
    )


def _at(bound: BoundPart, local: int) -> str:
    """Return words that say which sample and where it lies."""
    table = bound.part.tables[0]
    extents = table.extents(np.array([local], np.int64))
    offset, length = int(extents.offset[0]), int(extents.length[0])
    where = f"{bound.store.uri}{table.key(int(extents.object[0]))}"
    return f"{named(bound, local)} in {where}, bytes {offset} to {offset + length}"


def _readable(run: Run, objects: Objects) -> Ints:
    """Return the samples that lie in what is there; the others are the objects' problems."""
    ids = np.arange(run.first, run.stop, dtype=np.int64)
    is_there = np.ones(len(ids), bool)
    for table in run.bound.part.tables:
        extents = table.extents(ids)
        is_there &= extents.offset + extents.length <= objects.sizes(table, extents.object)
    return ids[is_there]


def _check_run(run: Run, checks: Checks) -> Findings:
    bound, problems = run.bound, list[Problem]()
    ids = _readable(run, checks.objects)
    raws = _read(bound, ids, checks.readers, problems)
    sums = bound.part.columns.get("checksum")
    # A checksum is of one extent; arrays side by side have several.
    has_sums = sums is not None and len(bound.part.tables) == 1
    for local, raw in raws.items():
        if (
            has_sums
            and sums is not None
            and not _holds(bound, local, raw[0], int(sums[local]), problems)
        ):
            continue
        if checks.decode:
            try:
                bound.decoded_all(np.array([local], np.int64), [raw])
            except MissingPackageError:
                raise
            except Exception as error:
                what = f"{_at(bound, local)}, cannot be decoded"
                problems.append(_problem(bound, local, "decode", what, error))
    return Findings(
        num_samples=len(raws),
        size_bytes=sum(view.nbytes for raw in raws.values() for view in raw),
        num_checksums=len(raws) if has_sums else 0,
        problems=tuple(problems),
    )


def _read(bound: BoundPart, ids: Ints, readers: Pool, problems: list[Problem]) -> dict[int, Raws]:
    """Return the bytes of samples; one that cannot be read becomes a problem."""
    try:
        return dict(zip(ids.tolist(), read_raws(bound, ids, readers), strict=True))
    except StoreError:
        pass  # Which of them was it?
    out: dict[int, Raws] = {}
    for local in ids.tolist():
        try:
            (out[local],) = read_raws(bound, np.array([local], np.int64), readers)
        except StoreError as error:
            what = f"{_at(bound, local)}, cannot be read"
            problems.append(_problem(bound, local, "read", what, error))
    return out


def _holds(
    bound: BoundPart, local: int, raw: memoryview, expected: int, problems: list[Problem]
) -> bool:
    found = xxhash.xxh3_64_intdigest(raw)
    if found != expected:
        what = f"{_at(bound, local)}: checksum {expected:016x} expected, {found:016x} found"
        problems.append(_problem(bound, local, "checksum", what))
    return found == expected


def _check_block(run: Run, checks: Checks) -> Findings:
    bound, problems = run.bound, list[Problem]()
    if not len(_readable(run, checks.objects)):
        return Findings()
    extents = bound.part.tables[0].extents(np.array([run.first], np.int64))
    block_number, number = int(extents.block[0]), int(extents.object[0])
    raw = bound.read(0, number, int(extents.offset[0]), int(extents.length[0]))
    sums = bound.part.columns.get("checksum")
    counts = {"num_samples": run.stop - run.first, "size_bytes": raw.nbytes}
    counts["num_checksums"] = 0 if sums is None else 1
    if sums is not None and not _holds(bound, run.first, raw, int(sums[block_number]), problems):
        return Findings(**counts, problems=tuple(problems))
    try:
        block = bound.unpack(run.first, raw)
    except MissingPackageError:
        raise
    except Exception as error:
        what = f"the block from {_at(bound, run.first)}, cannot be unpacked"
        return Findings(**counts, problems=(_problem(bound, run.first, "block", what, error),))
    for local in range(run.first, run.stop) if checks.decode else ():
        try:
            bound.decoded(block.sample(local - run.first), local)
        except MissingPackageError:
            raise
        except Exception as error:
            what = f"{_at(bound, local)}, row {local - run.first}, cannot be decoded"
            problems.append(_problem(bound, local, "decode", what, error))
    return Findings(**counts, problems=tuple(problems))
