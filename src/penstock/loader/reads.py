"""Reading samples that are near: from mapped files, open files or memory, into the batch.

Files of a data set are immutable by contract and checked when they are opened. One that is cut off
while it is mapped ends the process (SIGBUS), as with every loader that maps files.
"""

from __future__ import annotations

import mmap
import os
import resource
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

import numpy as np

from penstock.dataset.bound import BoundPart, explained
from penstock.errors import ChangedError, StoreError
from penstock.loader.buffers import BufferPool, Bytes
from penstock.loader.job import Group, Piece
from penstock.loader.stats import Counters
from penstock.loader.warmth import Warmth
from penstock.storage.files import OpenFile
from penstock.storage.folder import FolderStore

_OPEN_SHARE = 4
"""The share of the files that a process may have open that is ours: one in so many."""


def is_local(bound: BoundPart) -> bool:
    """Return whether a read takes less time than asking somebody else to do it."""
    return bound.store.source in ("folder", "memory")


class SampleReader:
    """Reads samples in the calling thread; shared by all threads of a run."""

    def __init__(self, pool: BufferPool, counters: Counters, *, at_random: bool) -> None:
        self._pool = pool
        self._counters = counters
        self._at_random = at_random
        self._warmth = Warmth()
        self._open_max = max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _OPEN_SHARE)
        self._files: dict[tuple[int, int, int], OpenFile] = {}
        self._maps: dict[tuple[int, int, int], Bytes] = {}

    def raws(self, group: Group, piece: Piece) -> list[list[memoryview]]:
        """Return the bytes of the samples of a piece, one for each table, in leased memory."""
        out: list[list[memoryview]] = [[] for _ in range(piece.stop - piece.start)]
        for table, extents in enumerate(group.extents):
            lengths = extents.length[piece.start : piece.stop]
            ends = np.cumsum(lengths)
            starts = (ends - lengths).tolist()
            target: Bytes = self._pool.array((int(ends[-1]),), np.uint8)
            self.read_into(group, table, piece, target, starts)
            for raws, start, end in zip(out, starts, ends.tolist(), strict=True):
                raws.append(target.data[start:end])
        return out

    def read_into(
        self, group: Group, table: int, piece: Piece, target: Bytes, starts: Sequence[int]
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
            # From a map it takes two thirds of the time of a read, if the file is in memory.
            with self.warmed(bound, table, lambda: zip(numbers, offsets, lengths, strict=True)):
                maps = {n: self.mapped(bound, table, n) for n in set(numbers)}
                for number, offset, length, at in rows:
                    target[at : at + length] = maps[number][offset : offset + length]
        else:
            for number, offset, length, at in rows:
                view = target[at : at + length].data
                # Held while it is read: others may drop it from the cache meanwhile.
                file = self.file(bound, table, number)
                if os.preadv(file.descriptor, [view], offset) != length:
                    _read_one(bound, table, number, offset, view)
        seconds = time.perf_counter() - begin
        self._counters.add_reads(bound.store.source, sum(lengths), len(lengths), seconds)

    def can_map(self, bound: BoundPart, table: int) -> bool:
        """Return whether objects are mapped: files, and few enough to stay open all at once."""
        few = bound.part.tables[table].num_objects <= self._open_max
        return few and isinstance(bound.store, FolderStore)

    def mapped(self, bound: BoundPart, table: int, number: int) -> Bytes:
        """Return an object of a folder as memory."""
        name = (id(bound), table, number)
        view = self._maps.get(name)
        if view is None:
            file = self.file(bound, table, number)
            if bound.part.tables[table].sizes[number] == 0:
                return np.zeros(0, np.uint8)  # Nothing cannot be mapped.
            memory = mmap.mmap(file.descriptor, 0, access=mmap.ACCESS_READ)
            if self._at_random:
                # Else each fault reads on for as long as the disk is set to: megabytes for a row.
                memory.madvise(mmap.MADV_RANDOM)
            view = self._maps[name] = np.frombuffer(memory, np.uint8)
        return view

    def warmed(
        self,
        bound: BoundPart,
        table: int,
        ranges: Callable[[], Iterable[tuple[int, int, int]]],
    ) -> AbstractContextManager[None]:
        """Ask the kernel for some ranges (object, offset, length) at once while files are cold."""
        if not self._at_random:
            return nullcontext()  # The kernel reads ahead by itself.
        return self._warmth.asked(
            lambda: ((self.file(bound, table, n), o, size) for n, o, size in ranges())
        )

    def file(self, bound: BoundPart, table: int, number: int) -> OpenFile:
        """Return an object of a folder, opened and checked to be the one that was indexed."""
        name = (id(bound), table, number)
        file = self._files.get(name)
        if file is None:
            store = bound.store
            assert isinstance(store, FolderStore)
            info = bound.part.tables[table].info(number)
            file = store.open_file(info.key)
            size_bytes = os.fstat(file.descriptor).st_size
            if size_bytes != info.size_bytes:
                raise ChangedError(
                    f"{store.uri}{info.key} has {size_bytes} bytes, {info.size_bytes} when it was "
                    "indexed; index it again with `penstock index --rebuild`"
                )
            if len(self._files) >= self._open_max:
                # Files close themselves with their last reader.
                with suppress(KeyError, RuntimeError, StopIteration):
                    del self._files[next(iter(self._files))]
            self._files[name] = file
        return file


def _read_one(bound: BoundPart, table: int, number: int, offset: int, view: memoryview) -> None:
    try:
        bound.store.read_into(bound.part.tables[table].key(number), offset, view)
    except StoreError as error:
        raise explained(error, bound, table, number) from error
