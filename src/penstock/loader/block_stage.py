"""Blocks that are in use: read once, shared by all batches that need them, dropped when room is
needed.

A batch pins the blocks that it needs from the moment it is planned until it is finished. What is
not pinned stays while there is room, longest unused goes first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any


class _Entry:
    __slots__ = ("arrived", "pins", "size_bytes", "value")

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self.value: Any = None
        self.size_bytes = 0
        self.pins = 0


class BlockStage:
    """Values by name within a number of bytes; each is loaded by one thread only."""

    def __init__(self, size_bytes_max: int) -> None:
        self._size_bytes_max = size_bytes_max
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self.size_bytes = 0

    def has(self, name: Hashable) -> bool:
        """Return whether a value is there, or on its way."""
        with self._lock:
            entry = self._entries.get(name)
            return entry is not None and (entry.value is not None or not entry.arrived.is_set())

    def pin(self, names: Iterable[Hashable]) -> None:
        """Keep these, loaded or not, until they are unpinned as often."""
        with self._lock:
            for name in names:
                entry = self._entries.get(name)
                if entry is None:
                    entry = self._entries[name] = _Entry()
                    entry.arrived.set()
                entry.pins += 1

    def unpin(self, names: Iterable[Hashable]) -> None:
        """Let go of these, and of whatever has to go to keep within bounds."""
        with self._lock:
            for name in names:
                self._entries[name].pins -= 1
            self._shrink()

    def get(self, name: Hashable, load: Callable[[], tuple[Any, int]]) -> Any:
        """Return a value; whoever comes first loads it, others wait for that."""
        while True:
            with self._lock:
                entry = self._entries.get(name)
                if entry is None:
                    entry = self._entries[name] = _Entry()
                    entry.arrived.set()
                self._entries.move_to_end(name)
                if entry.value is not None:
                    return entry.value
                if entry.arrived.is_set():
                    entry.arrived.clear()
                    break
            entry.arrived.wait()
        try:
            value, size_bytes = load()
            with self._lock:
                entry.value, entry.size_bytes = value, size_bytes
                self.size_bytes += size_bytes
                self._shrink()
            return value
        finally:
            # After an error too: the next in line tries again and meets the error itself.
            entry.arrived.set()

    def _shrink(self) -> None:
        if self.size_bytes <= self._size_bytes_max:
            return
        for name in list(self._entries):
            entry = self._entries[name]
            if entry.pins == 0 and entry.arrived.is_set():
                del self._entries[name]
                self.size_bytes -= entry.size_bytes
                if self.size_bytes <= self._size_bytes_max:
                    return
