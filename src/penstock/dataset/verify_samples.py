"""Is every sample what was indexed: can it be read, does its checksum hold, can it be decoded?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import xxhash

from penstock.dataset.bound import BoundPart
from penstock.dataset.checks import has_checksums
from penstock.dataset.formats.base import Block, Sample, Unit
from penstock.dataset.pack_plan import cut
from penstock.dataset.parse_values import UnsendableError
from penstock.dataset.part import Ints, Part
from penstock.dataset.samples_in_parser import SamplesInParser, reads_in_parser
from penstock.dataset.sources import read_raws, stored_bytes
from penstock.dataset.verify_index import Objects, named, problem_at
from penstock.dataset.verify_report import Findings, Problem
from penstock.errors import ChangedError, FormatError, MissingPackageError, StoreError, WorkerError
from penstock.storage.pool import ReadPool

_RUN_BYTES = 16 << 20
_RUN_SAMPLES = 4096
_RUNS_MIN = 64
"""A small set is cut into as many runs, so that threads share it and its progress can be seen."""

Raws = list[memoryview]
_NOT_THE_DATA = (MissingPackageError, WorkerError)
"""Errors that are not about a sample: they end the verification."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """What a run of samples is checked with."""

    objects: Objects
    readers: ReadPool
    decode: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRun:
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
        except _NOT_THE_DATA:
            raise
        except Exception as error:
            names = f"{named(self.bound, self.first)} to {self.bound.first + self.stop - 1}"
            what = f"{names} of {self.bound.store.uri} could not be checked"
            return Findings(
                problems=(problem_at(self.bound, self.first, "read", f"{what}: {_said(error)}"),)
            )


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
        info = self.bound.part.tables[0].info(self.number)
        try:
            unit = Unit(objects=(info,))
            part = self.bound.format.scan(unit, self.bound.store, self.bound.part.options)
        except (ChangedError, FormatError, StoreError) as error:
            what = str(error)
        else:
            what = self._difference(part)
        if not what:
            return Findings()
        sample_id = self.bound.first + self.first
        problem = Problem(kind="format", message=what, object=info.key, sample_id=sample_id)
        return Findings(problems=(problem,))

    def _difference(self, part: Part) -> str:
        """Return how the samples that were found differ from those of the index, if they do."""
        table = self.bound.part.tables[0]
        first, stop = table.first_sample[self.number : self.number + 2].tolist()
        was = table.extents(np.arange(first, stop))
        now = part.tables[0].extents(np.arange(part.num_samples))
        is_same = np.array_equal(was.offset, now.offset) and np.array_equal(was.length, now.length)
        numbers = range(part.num_samples)
        if is_same and all(part.key(i) == self.bound.part.key(first + i) for i in numbers):
            return ""
        return (
            f"{self.bound.store.uri}{table.key(self.number)} holds {part.num_samples} samples that "
            f"are not the {stop - first} that were indexed: their names or places differ"
        )


def runs_of(bound: BoundPart) -> Iterator[SampleRun]:
    """Yield the samples of a part in runs."""
    table = bound.part.tables[0]
    if bound.by_block:
        starts = np.unique(table.block_starts())
    else:
        sizes = stored_bytes(bound.part)
        size_bytes = min(_RUN_BYTES, int(sizes.sum()) // _RUNS_MIN + 1)
        starts = cut(sizes, size_bytes, min(_RUN_SAMPLES, len(sizes) // _RUNS_MIN + 1))
    for first, stop in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        yield SampleRun(bound=bound, first=first, stop=stop)


def structures_of(bound: BoundPart, objects: Objects) -> Iterator[Structure]:
    """Yield the objects that have something between their samples and are whole."""
    table = bound.part.tables[0]
    if bound.part.format == "tar":
        for number in range(table.num_objects):
            found = objects.found.get(table.key(number))
            if found is not None and found.size_bytes == int(table.sizes[number]):
                yield Structure(bound=bound, number=number)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _at(bound: BoundPart, local: int) -> str:
    """Return words that say which sample and where it lies."""
    table = bound.part.tables[0]
    extents = table.extents(np.array([local], np.int64))
    offset, length = int(extents.offset[0]), int(extents.length[0])
    where = f"{bound.store.uri}{table.key(int(extents.object[0]))}"
    return f"{named(bound, local)} in {where}, bytes {offset} to {offset + length}"


def _readable(run: SampleRun, objects: Objects) -> Ints:
    """Return the samples that lie in what is there; the others are the objects' problems."""
    ids = np.arange(run.first, run.stop, dtype=np.int64)
    is_there = np.ones(len(ids), bool)
    for table in run.bound.part.tables:
        extents = table.extents(ids)
        is_there &= extents.offset + extents.length <= objects.sizes(table, extents.object)
    return ids[is_there]


def _check_run(run: SampleRun, checks: Checks) -> Findings:
    bound, problems = run.bound, list[Problem]()
    ids = _readable(run, checks.objects)
    raws = _read(bound, ids, checks.readers, problems)
    has_sums = has_checksums(bound)
    if has_sums:
        expected = bound.part.columns["checksum"][list(raws)].tolist()
        pairs = zip(raws.items(), expected, strict=True)
        held = [i for (i, raw), e in pairs if _holds(bound, i, raw[0], e, problems)]
    else:
        held = list(raws)
    if checks.decode and held:
        problems += _undecodable(bound, {local: raws[local] for local in held})
    return Findings(
        num_samples=len(raws),
        size_bytes=sum(view.nbytes for raw in raws.values() for view in raw),
        num_checksums=len(raws) if has_sums else 0,
        problems=tuple(problems),
    )


def _read(
    bound: BoundPart, ids: Ints, readers: ReadPool, problems: list[Problem]
) -> dict[int, Raws]:
    """Return the bytes of samples; one that cannot be read becomes a problem."""
    try:
        return dict(zip(ids.tolist(), read_raws(bound, ids, readers), strict=True))
    except StoreError:
        pass  # Find out below which of the samples it was.
    out: dict[int, Raws] = {}
    for local in ids.tolist():
        try:
            (out[local],) = read_raws(bound, np.array([local], np.int64), readers)
        except StoreError as error:
            what = f"{_at(bound, local)}, cannot be read"
            problems.append(problem_at(bound, local, "read", f"{what}: {_said(error)}"))
    return out


def _holds(
    bound: BoundPart, local: int, raw: memoryview, expected: int, problems: list[Problem]
) -> bool:
    found = xxhash.xxh3_64_intdigest(raw)
    if found != expected:
        what = f"{_at(bound, local)}: checksum {expected:016x} expected, {found:016x} found"
        problems.append(problem_at(bound, local, "checksum", what))
    return found == expected


def _undecodable(bound: BoundPart, raws: dict[int, Raws]) -> Iterator[Problem]:
    """Yield the samples, addressed alone, that cannot be cut into fields and decoded."""
    ids = np.array(list(raws), np.int64)
    sent = partial(SamplesInParser.alone, bound, ids, list(raws.values()))
    verdicts = _verdicts(bound, sent, len(ids))
    if verdicts is not None:
        found = [(int(ids[row]), _judged(bound, int(ids[row]), v)) for row, v in verdicts]
    else:
        pairs = [(local, (np.array([local]), [raw])) for local, raw in raws.items()]
        found = [(local, _error_of(bound.decoded_all, *pair)) for local, pair in pairs]
    for local, because in found:
        if because:
            what = f"{_at(bound, local)}, cannot be decoded"
            yield problem_at(bound, local, "decode", f"{what}: {because}")


def _verdicts(
    bound: BoundPart, send: Callable[[], SamplesInParser], num_samples: int
) -> list[tuple[int, str | Sample]] | None:
    """Return what a parser process finds, as `SamplesInParser` does; None where none is used."""
    if not reads_in_parser(bound, bound.steps):
        return None
    try:
        return list(send().verdicts(range(num_samples)))
    except UnsendableError:
        return None


def _judged(bound: BoundPart, local: int, verdict: str | Sample) -> str:
    """Return what is wrong with a sample after the user's decoders have seen it as well."""
    if isinstance(verdict, str):
        return verdict
    return _error_of(bound.decoded, verdict, local) if verdict else ""


def _error_of(decode: Callable[..., Any], *arguments: Any) -> str:
    """Return the error that a function raises, as words."""
    try:
        decode(*arguments)
    except _NOT_THE_DATA:
        raise
    except Exception as error:
        return _said(error)
    return ""


def _check_block(run: SampleRun, checks: Checks) -> Findings:
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
        for local, because in _checked_rows(run, block_number, raw, decode=checks.decode):
            if because:
                what = f"{_at(bound, local)}, row {local - run.first}, cannot be decoded"
                problems.append(problem_at(bound, local, "decode", f"{what}: {because}"))
    except _NOT_THE_DATA:
        raise
    except Exception as error:
        what = f"the block from {_at(bound, run.first)}, cannot be unpacked"
        problems.append(problem_at(bound, run.first, "block", f"{what}: {_said(error)}"))
    return Findings(**counts, problems=tuple(problems))


def _checked_rows(
    run: SampleRun, number: int, raw: memoryview, *, decode: bool
) -> Iterator[tuple[int, str]]:
    """Yield the samples of a block with what is wrong with them; raises for the whole block."""
    bound, ids = run.bound, range(run.first, run.stop) if decode else range(0)
    verdicts = _verdicts(bound, partial(SamplesInParser.of_block, bound, number, raw), len(ids))
    if verdicts is not None:
        for row, verdict in verdicts:
            yield run.first + row, _judged(bound, run.first + row, verdict)
        return
    block = bound.unpack(run.first, raw)
    for local in ids:
        yield local, _error_of(_decode_row, bound, block, local, local - run.first)


def _decode_row(bound: BoundPart, block: Block, local: int, row: int) -> None:
    bound.decoded(block.sample(row), local)
