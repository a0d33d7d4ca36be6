"""Reading samples of local files: the file stays open, the kernel writes into the batch."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.dataset.bound import BoundPart, explained
from penstock.errors import ChangedError, StoreError
from penstock.loader.buffers import BufferPool
from penstock.loader.job import Group, Piece
from penstock.loader.stats import Counters
from penstock.storage.files import OpenFile
from penstock.storage.folder import FolderStore

_FILES_MAX = 512


def is_local(bound: BoundPart) -> bool:
    """Return whether a read takes less time than asking somebody else to do it."""
    return bound.store.source in ("folder", "memory")


class SampleReader:
    """Reads samples in the calling thread; shared by all threads of a run."""

    def __init__(self, pool: BufferPool, counters: Counters) -> None:
        self._pool = pool
        self._counters = counters
        self._files: dict[tuple[int, int, int, int], OpenFile] = {}

    def raws(self, group: Group, piece: Piece) -> list[list[memoryview]]:
        """Return the bytes of the samples of a piece, one for each table, in leased memory."""
        out: list[list[memoryview]] = [[] for _ in range(piece.stop - piece.start)]
        for table, extents in enumerate(group.extents):
            lengths = extents.length[piece.start : piece.stop]
            ends = np.cumsum(lengths)
            total = int(ends[-1])
            target = self._pool.view(total)
            starts = (ends - lengths).tolist()
            views = [target[a:b] for a, b in zip(starts, ends.tolist(), strict=True)]
            self.read_into(group, table, piece, views)
            for raws, view in zip(out, views, strict=True):
                raws.append(view)
        return out

    def read_into(
        self, group: Group, table: int, piece: Piece, views: Sequence[memoryview]
    ) -> None:
        """Fill one view for each sample of a piece."""
        begin = time.perf_counter()
        extents = group.extents[table]
        numbers = extents.object[piece.start : piece.stop].tolist()
        offsets = extents.offset[piece.start : piece.stop].tolist()
        bound = group.bound
        if isinstance(bound.store, FolderStore):
            self._read_files(bound, table, numbers, offsets, views)
        else:
            for number, offset, view in zip(numbers, offsets, views, strict=True):
                _read_one(bound, table, number, offset, view)
        seconds = time.perf_counter() - begin
        size_bytes = int(extents.length[piece.start : piece.stop].sum())
        self._counters.add_reads(bound.store.source, size_bytes, len(views), seconds)

    def _read_files(
        self,
        bound: BoundPart,
        table: int,
        numbers: Sequence[int],
        offsets: Sequence[int],
        views: Sequence[memoryview],
    ) -> None:
        preadv = os.preadv
        for number, offset, view in zip(numbers, offsets, views, strict=True):
            file = self.file(bound, table, number)
            if preadv(file.descriptor, [view], offset) != len(view):
                _read_one(bound, table, number, offset, view)

    def file(self, bound: BoundPart, table: int, number: int) -> OpenFile:
        """Return an object of a folder, opened and checked to be the one that was indexed."""
        name = (id(bound), bound.first, table, number)
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
            if len(self._files) >= _FILES_MAX:
                self._files.clear()  # Files close themselves with their last reader.
            self._files[name] = file
        return file


def _read_one(bound: BoundPart, table: int, number: int, offset: int, view: memoryview) -> None:
    try:
        bound.store.read_into(bound.part.tables[table].key(number), offset, view)
    except StoreError as error:
        raise explained(error, bound, table, number) from error


def as_rows(view: npt.NDArray[Any], width: int) -> npt.NDArray[np.uint8]:
    """Return bytes as rows of equal width."""
    return view.view(np.uint8).reshape(-1, width)
