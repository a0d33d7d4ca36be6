"""Reading local samples into the batch: from mapped files, open files or memory.

Files of a data set are immutable by contract, but nothing enforces that. So size and time of a file
are compared with the index after bytes were copied out of it, once for each piece of a batch. A
sample that has a checksum is compared with it the first time it is read. A file that is cut off
while it is mapped kills the process (SIGBUS). Workers can be replaced, so they copy large pieces
(see `worker_reads`); the calling thread copies small ones.
"""

from __future__ import annotations

import mmap
import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.dataset.bound import BoundPart
from penstock.dataset.checks import check_copies
from penstock.dataset.part import Table
from penstock.engine.buffers import BufferPool, Bytes
from penstock.engine.job import GroupPiece, SampleGroup
from penstock.engine.page_cache import PageCacheState
from penstock.engine.stats import Counters
from penstock.storage.base import ObjectInfo
from penstock.storage.files import OpenFile
from penstock.storage.folder import FolderStore
from penstock.trace import Kind, Recorder

if TYPE_CHECKING:
    from penstock.engine.stages import GroupStage

_OPEN_SHARE = 4
"""One in this many of the files that a process may have open is ours."""
OPEN_MIN = 16
"""Files that are kept open, however low the limit is."""
_RECORDED_OBJECTS_MAX = 4096
"""Objects whose trace names are kept; a data set may have one file for each sample."""


def is_local(bound: BoundPart) -> bool:
    """Return whether samples are read without a round trip."""
    return bound.store.source in ("folder", "memory")


class _RecordedObject(NamedTuple):
    """The columns of a trace that describe an object."""

    object_id: int
    source_id: int
    base: int
    stride: int
    """Offset of its first row and distance of its rows, if its table is even."""


class SampleReader:
    """Reads samples in the calling thread; shared by all threads of a run."""

    copies_in_workers = False
    """Whether worker processes copy large pieces, while the calling thread waits."""

    def __init__(self, pool: BufferPool, counters: Counters, *, at_random: bool) -> None:
        self._pool = pool
        self._counters = counters
        self._at_random = at_random
        self._page_cache = PageCacheState()
        self._open_max = max(OPEN_MIN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _OPEN_SHARE)
        self._files: dict[tuple[int, int, int], IndexedFile] = {}
        self._maps: dict[tuple[int, int, int], IndexedFile] = {}
        self._recorded_objects: dict[tuple[int, int, int], _RecordedObject] = {}

    def raws(
        self, group: SampleGroup, piece: GroupPiece, stage: GroupStage | None
    ) -> list[list[memoryview]]:
        """Return the bytes of the samples of a piece, one for each table, in leased memory.

        They come from `stage`, if the group has one. The memory is not shared, so a transform may
        write to it.
        """
        out: list[list[memoryview]] = [[] for _ in range(piece.stop - piece.start)]
        for table, extents in enumerate(group.extents):
            lengths = extents.length[piece.start : piece.stop]
            ends = np.cumsum(lengths)
            starts = (ends - lengths).tolist()
            target: Bytes = self._pool.array((int(ends[-1]),), np.uint8)
            if stage is None:
                self.read_into(group, table, piece, target, starts)
            else:
                stage.copy_into(table, piece, target, starts)
            for raws, start, end in zip(out, starts, ends.tolist(), strict=True):
                raws.append(target.data[start:end])
        return out

    def read_into(
        self,
        group: SampleGroup,
        table: int,
        piece: GroupPiece,
        target: Bytes,
        starts: Sequence[int],
    ) -> None:
        """Read the samples of a piece into `target`, each at its own start."""
        begin = time.perf_counter()
        extents = group.extents[table]
        numbers = extents.object[piece.start : piece.stop].tolist()
        offsets = extents.offset[piece.start : piece.stop].tolist()
        lengths = extents.length[piece.start : piece.stop].tolist()
        bound = group.bound
        rows = zip(numbers, offsets, lengths, starts, strict=True)
        if not isinstance(bound.store, FolderStore):
            for number, offset, length, at in rows:
                _read_one(bound, table, number, offset, target[at : at + length].data)
        elif self.can_map(bound, table):
            # If the file is in the page cache, a map takes two thirds of the time of a read.
            with self.warmed(bound, table, lambda: zip(numbers, offsets, lengths, strict=True)):
                maps = {n: self.mapped(bound, table, n) for n in set(numbers)}
                for number, offset, length, at in rows:
                    target[at : at + length] = maps[number].data[offset : offset + length]
                for mapped in maps.values():
                    mapped.check()
        else:
            for number, offset, length, at in rows:
                view = target[at : at + length].data
                # This reference keeps it open: another thread may drop it from the cache meanwhile.
                held = self._held(bound, table, number)
                num_read = os.preadv(held.file.descriptor, [view], offset)
                held.check()
                if num_read != length:
                    _read_one(bound, table, number, offset, view)
        check_copies(
            bound,
            group.local_ids[piece.start : piece.stop],
            lambda j: target[starts[j] : starts[j] + lengths[j]].data,
        )
        seconds = time.perf_counter() - begin
        self._counters.add_reads(bound.store.source, sum(lengths), len(lengths), seconds)
        if self._counters.recorder is not None:
            first = self._recorded(self._counters.recorder, bound, table, numbers[0])
            much = sum(lengths), len(lengths)
            _record(self._counters.recorder, begin, first, offsets[0], much)

    def rows_into(self, group: SampleGroup, table: int, piece: GroupPiece, target: Bytes) -> None:
        """Copy samples of one width, each to its row of `target`."""
        where = group.where[piece.start : piece.stop]
        if not self.can_map(group.bound, table):
            starts = (where * target.shape[1]).tolist()
            self.read_into(group, table, piece, target.reshape(-1), starts)
            return
        begin = time.perf_counter()
        ids = group.local_ids[piece.start : piece.stop]
        layout = group.bound.part.tables[table]
        first_sample = layout.first_sample
        numbers = None
        if len(first_sample) > 2:
            numbers = np.searchsorted(first_sample, ids, side="right") - 1
        for number in [0] if numbers is None else np.unique(numbers).tolist():
            chosen = slice(None) if numbers is None else np.flatnonzero(numbers == number)
            rows = ids[chosen] - first_sample[number]
            ranges = partial(_ranges, layout, number, rows)
            mapped = self.mapped(group.bound, table, number)
            with self.warmed(group.bound, table, ranges):
                copy_rows(_rows(layout, number, mapped.data), rows, target, where[chosen])
            mapped.check()
        check_copies(group.bound, ids, lambda j: target[where[j]].data)
        size_bytes = len(ids) * target.shape[1]
        self._counters.add_reads("folder", size_bytes, len(ids), time.perf_counter() - begin)
        if self._counters.recorder is not None:
            number = 0 if numbers is None else int(numbers[0])
            first = self._recorded(self._counters.recorder, group.bound, table, number)
            offset = first.base + first.stride * int(ids[0] - first_sample[number])
            _record(self._counters.recorder, begin, first, offset, (size_bytes, len(ids)))

    def _recorded(
        self, recorder: Recorder, bound: BoundPart, table: int, number: int
    ) -> _RecordedObject:
        """Return the trace columns of an object; cached, for they cost as much as three rows."""
        found = self._recorded_objects.get((id(bound), table, number))
        if found is None:
            if len(self._recorded_objects) >= _RECORDED_OBJECTS_MAX:
                self._recorded_objects.clear()
            layout = bound.part.tables[table]
            base = stride = 0
            if layout.addressing == "even":
                bases, strides, _ = layout.even_layout()
                base, stride = int(bases[number]), int(strides[number])
            found = _RecordedObject(
                recorder.name(layout.key(number)), recorder.name(bound.store.source), base, stride
            )
            self._recorded_objects[id(bound), table, number] = found
        return found

    def can_map(self, bound: BoundPart, table: int) -> bool:
        """Return whether a table's objects are mapped: files, few enough to stay open at once."""
        few = bound.part.tables[table].num_objects <= self._open_max
        return few and isinstance(bound.store, FolderStore)

    def mapped(self, bound: BoundPart, table: int, number: int) -> IndexedFile:
        """Return an object of a folder, mapped."""
        name = (id(bound), table, number)
        mapped = self._maps.get(name)
        if mapped is None:
            held = self._held(bound, table, number)
            data = _NOTHING
            if held.info.size_bytes:  # An empty file cannot be mapped.
                memory = mmap.mmap(held.file.descriptor, 0, access=mmap.ACCESS_READ)
                if self._at_random:
                    # Else each fault reads ahead as the disk is configured: megabytes for a row.
                    memory.madvise(mmap.MADV_RANDOM)
                data = np.frombuffer(memory, np.uint8)
            mapped = self._maps[name] = held._replace(data=data)
        return mapped

    def warmed(
        self,
        bound: BoundPart,
        table: int,
        ranges: Callable[[], Iterable[tuple[int, int, int]]],
    ) -> AbstractContextManager[None]:
        """Ask the kernel for some ranges (object, offset, length) at once while files are cold."""
        if not self._at_random:
            return nullcontext()  # In order, the kernel reads ahead by itself.
        return self._page_cache.asked(
            lambda: ((self._held(bound, table, n).file, o, size) for n, o, size in ranges())
        )

    def _held(self, bound: BoundPart, table: int, number: int) -> IndexedFile:
        """Return an object of a folder, opened and checked to be the one that was indexed."""
        name = (id(bound), table, number)
        held = self._files.get(name)
        if held is None:
            store = bound.store
            assert isinstance(store, FolderStore)
            info = bound.part.tables[table].info(number)
            held = IndexedFile(store, info, store.open_file(info.key), _NOTHING)
            held.check()  # Before it is mapped: access beyond the end of a file kills the process.
            if len(self._files) >= self._open_max:
                # A file is closed with its last reference, so threads that read it go on.
                with suppress(KeyError, RuntimeError, StopIteration):
                    del self._files[next(iter(self._files))]
            self._files[name] = held
        return held


class IndexedFile(NamedTuple):
    """An object of a folder that stays open: the same file, even if its name is replaced."""

    store: FolderStore
    info: ObjectInfo
    """Its size and time in the index."""
    file: OpenFile
    data: Bytes
    """All bytes, if it is mapped."""

    def check(self) -> None:
        """Raise `ChangedError` if the file has changed since it was indexed."""
        self.store.check(self.info, self.file)


_NOTHING: Bytes = np.zeros(0, np.uint8)


def _read_one(bound: BoundPart, table: int, number: int, offset: int, view: memoryview) -> None:
    bound.store.read_into(bound.part.tables[table].info(number), offset, view)


def _rows(layout: Table, number: int, whole: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return an object as an array with a row for each sample."""
    base, stride, width = (int(a[number]) for a in layout.even_layout())
    count = int(layout.first_sample[number + 1] - layout.first_sample[number])
    return np.ndarray((count, width), np.uint8, whole.data, base, (stride, 1))


def _ranges(
    layout: Table, number: int, rows: npt.NDArray[np.int64]
) -> Iterator[tuple[int, int, int]]:
    base, stride, width = (int(a[number]) for a in layout.even_layout())
    return ((number, base + stride * row, width) for row in rows.tolist())


def _record(
    recorder: Recorder, begin_s: float, at: _RecordedObject, offset: int, much: tuple[int, int]
) -> None:
    """Record reads of a piece as one row, with the place of the first of them."""
    recorder.span(
        Kind.FETCH,
        round(begin_s * 1e9),
        time.perf_counter_ns(),
        object_id=at.object_id,
        source_id=at.source_id,
        offset=offset,
        size_bytes=much[0],
        count=much[1],
    )


def copy_rows(
    source: npt.NDArray[np.uint8],
    rows: npt.NDArray[np.int64],
    target: npt.NDArray[np.uint8],
    where: npt.NDArray[np.int64],
) -> None:
    """Copy some rows of one array to some places of another."""
    start, count = int(where[0]), len(where)
    in_a_row = count == 1 or int(where[-1]) - start == count - 1
    if in_a_row and source.flags.c_contiguous:
        # "clip" because "raise" would gather into a second buffer first; rows are in range.
        source.take(rows, axis=0, out=target[start : start + count], mode="clip")
    elif in_a_row:
        target[start : start + count] = source[rows]
    else:
        target[where] = source[rows]
