"""A cache of unpacked blocks: each is read once and shared by all batches that need it.

Blocks are pinned while a piece of a batch uses them. Blocks that are not pinned stay while there is
room; the least recently used one is evicted first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any


class _PendingLoad:
    """A load in progress, for threads that wait for its value."""

    __slots__ = ("error", "is_over", "num_loading", "num_waiting")

    def __init__(self) -> None:
        self.num_loading = self.num_waiting = 0
        self.is_over = threading.Event()
        """Set when the value or the error is there."""
        self.error: BaseException | None = None


class _CachedBlock:
    __slots__ = ("load", "pins", "size_bytes", "value")

    def __init__(self) -> None:
        self.load: _PendingLoad | None = None
        """The load in progress; None if there is none."""
        self.value: Any = None
        self.size_bytes = 0
        self.pins = 0


class BlockCache:
    """Values by name, within a number of bytes; one thread at a time loads each of them.

    Only a second attempt of a slow read loads beside another thread.
    """

    def __init__(self, size_bytes_max: int) -> None:
        self._size_bytes_max = size_bytes_max
        # Guards entries and sizes. Never held during a load, which may wait for a store.
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, _CachedBlock] = OrderedDict()
        self.size_bytes = 0

    def has(self, name: Hashable) -> bool:
        """Return whether a value is there or being loaded."""
        with self._lock:
            entry = self._entries.get(name)
            return entry is not None and (entry.value is not None or entry.load is not None)

    def num_waiting(self, name: Hashable) -> int:
        """Return how many threads wait for another that loads a value."""
        with self._lock:
            entry = self._entries.get(name)
            return entry.load.num_waiting if entry is not None and entry.load is not None else 0

    def pin(self, names: Iterable[Hashable]) -> None:
        """Keep these values, loaded or not, until they are unpinned as often."""
        with self._lock:
            for name in names:
                self._entry(name).pins += 1

    def unpin(self, names: Iterable[Hashable]) -> None:
        """Unpin these values, and evict as many as the bound requires."""
        with self._lock:
            for name in names:
                self._entries[name].pins -= 1
            self._shrink()

    def get(
        self, name: Hashable, load: Callable[[], tuple[Any, int]], *, beside: bool = False
    ) -> Any:
        """Return a value; the first thread loads it, others wait for it and share its error.

        With `beside` it is loaded here even if another thread is loading it; the first value wins.
        """
        with self._lock:
            entry = self._entry(name)
            self._entries.move_to_end(name)
            if entry.value is not None:
                return entry.value
            loads = beside or entry.load is None
            under_way = entry.load = entry.load or _PendingLoad()
            under_way.num_loading += loads
            under_way.num_waiting += not loads
        if loads:
            return self._loaded(entry, under_way, load)
        under_way.is_over.wait()
        if under_way.error is not None:
            raise under_way.error
        return entry.value

    def _entry(self, name: Hashable) -> _CachedBlock:
        entry = self._entries.get(name)
        if entry is None:
            entry = self._entries[name] = _CachedBlock()
        return entry

    def _loaded(
        self, entry: _CachedBlock, under_way: _PendingLoad, load: Callable[[], tuple[Any, int]]
    ) -> Any:
        error: BaseException | None = None
        value, size_bytes = None, 0
        try:
            value, size_bytes = load()
        except BaseException as caught:
            error = caught
            raise
        finally:
            with self._lock:
                under_way.num_loading -= 1
                # Else another thread has brought the value, or this one failed and another may
                # still bring it.
                if entry.load is under_way and (error is None or not under_way.num_loading):
                    entry.load, under_way.error = None, error
                    entry.value, entry.size_bytes = value, size_bytes
                    self.size_bytes += size_bytes
                    self._shrink()
                    under_way.is_over.set()
        return entry.value

    def _shrink(self) -> None:
        if self.size_bytes <= self._size_bytes_max:
            return
        for name in list(self._entries):
            entry = self._entries[name]
            if entry.pins == 0 and entry.load is None:
                del self._entries[name]
                self.size_bytes -= entry.size_bytes
                if self.size_bytes <= self._size_bytes_max:
                    return
