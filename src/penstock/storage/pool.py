"""Reads many ranges at once, in threads that live as long as a `with` block.

After the first error, reads that have not begun are cancelled and the others are waited for. The
caller gets the error with its own traceback, and no thread outlives the block.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Self, TypeVar

from penstock.errors import OptionError
from penstock.storage.base import ObjectInfo, Store
from penstock.storage.coalesce import merge_ranges

T = TypeVar("T")
R = TypeVar("R")

GAP_BYTES_MAX = 64 * 2**10
"""Unwanted bytes that are read to save a request."""
MERGED_BYTES_MAX = 8 * 2**20
"""The longest merged request: larger ones gain nothing, and the last one would end late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest:
    """A range of an object, and the memory for its bytes."""

    info: ObjectInfo
    """The object, as it was indexed."""
    offset: int
    """Where the range begins."""
    target: memoryview
    """Filled completely: its size is the length of the range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _MergedRead:
    """One request to the store: a merged range, and the wanted parts of it."""

    info: ObjectInfo
    offset: int
    length: int
    wanted: tuple[tuple[int, memoryview], ...]


class ReadPool:
    """A fixed number of threads, from `with` to the end of its block."""

    def __init__(self, num_threads: int) -> None:
        if num_threads < 1:
            raise OptionError(f"a pool needs at least 1 thread, got {num_threads}")
        self.num_threads = num_threads
        self._executor: ThreadPoolExecutor | None = None

    def __enter__(self) -> Self:
        self._executor = ThreadPoolExecutor(self.num_threads, thread_name_prefix="penstock-pool")
        return self

    def __exit__(self, *_: object) -> None:
        assert self._executor is not None
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._executor = None

    def map_unordered(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """Yield `function(item)` of all items as they finish; few calls are started ahead."""
        assert self._executor is not None, "a pool works inside its with block"
        rest = iter(items)
        running: set[Future[R]] = set()
        try:
            while True:
                for item in itertools.islice(rest, 2 * self.num_threads - len(running)):
                    running.add(self._executor.submit(function, item))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        finally:
            # Even if the caller stops early: no call may write into a target that the caller has
            # given up. Cancelled calls are not waited for, because a closed pool never reports
            # them.
            wait([future for future in running if not future.cancel()])

    def read_many(self, store: Store, requests: Iterable[ReadRequest]) -> None:
        """Fill the targets of all requests; near ranges of an object are read together."""
        for _ in self.map_unordered(lambda piece: _read(store, piece), _pieces(requests)):
            pass


def _pieces(requests: Iterable[ReadRequest]) -> list[_MergedRead]:
    by_object: defaultdict[ObjectInfo, list[ReadRequest]] = defaultdict(list)
    for request in requests:
        by_object[request.info].append(request)
    return [piece for info, wanted in by_object.items() for piece in _pieces_of(info, wanted)]


def _pieces_of(info: ObjectInfo, requests: list[ReadRequest]) -> list[_MergedRead]:
    merged = merge_ranges(
        [request.offset for request in requests],
        [request.target.nbytes for request in requests],
        gap_bytes_max=GAP_BYTES_MAX,
        length_bytes_max=MERGED_BYTES_MAX,
    )
    wanted: list[list[tuple[int, memoryview]]] = [[] for _ in merged.offsets]
    for request, index, inside in zip(
        requests, merged.index.tolist(), merged.inside.tolist(), strict=True
    ):
        wanted[index].append((inside, request.target))
    ranges = zip(merged.offsets.tolist(), merged.lengths.tolist(), wanted, strict=True)
    return [
        _MergedRead(info=info, offset=offset, length=length, wanted=tuple(parts))
        for offset, length, parts in ranges
    ]


def _read(store: Store, piece: _MergedRead) -> None:
    if len(piece.wanted) == 1:
        store.read_into(piece.info, piece.offset, piece.wanted[0][1])
        return
    data = store.read_range(piece.info, piece.offset, piece.length)
    for inside, target in piece.wanted:
        target.cast("B")[:] = data[inside : inside + target.nbytes]
