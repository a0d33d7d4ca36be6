"""Many reads at once: the one place of this room that starts threads.

A pool lives in a `with` block. The first error stops what has not begun, waits for what has, and
reaches the caller with its own traceback; no thread outlives the block.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

from penstock.errors import OptionError
from penstock.storage.base import ObjectInfo, Store
from penstock.storage.coalesce import merge_ranges

T = TypeVar("T")
R = TypeVar("R")

GAP_BYTES_MAX = 64 * 2**10
"""Unwanted bytes read rather than asked around."""
MERGED_BYTES_MAX = 8 * 2**20
"""Larger requests gain nothing and make the last one late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest:
    """A range of an object and the place its bytes go to."""

    info: ObjectInfo
    """The object, as it was indexed."""
    offset: int
    """Where the range begins."""
    target: memoryview
    """Filled completely; its size is the length of the range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _MergedRead:
    """One request to the store: a merged range and what is wanted of it."""

    info: ObjectInfo
    offset: int
    length: int
    wanted: tuple[tuple[int, memoryview], ...]


class ReadPool:
    """A bounded number of threads, from `with` to the end of its block."""

    def __init__(self, num_threads: int) -> None:
        if num_threads < 1:
            raise OptionError(f"a pool needs at least 1 thread, got {num_threads}")
        self.num_threads = num_threads
        self._executor: ThreadPoolExecutor | None = None

    def __enter__(self) -> Self:
        self._executor = ThreadPoolExecutor(self.num_threads, thread_name_prefix="penstock-read")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._executor is not None
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._executor = None

    def map_unordered(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """Yield `function(item)` of all items as they come, a bounded number of them ahead."""
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
            # Also when the caller stops early: nothing may run on into a target it has given up.
            # What was cancelled is not waited for: once the pool is closed, nobody reports it.
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
