"""Memory for batches, used again and again.

Fresh memory costs a page fault for every 4 KiB, as much as filling it. So buffers are leased: when
the last array or tensor that looks into a buffer is gone, the buffer returns to its pool. Nobody
has to give anything back, and no buffer is overwritten while an array still looks into it.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import weakref
from collections import deque
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Memory = Any
"""Writable bytes at a fixed address: a map, or an array of ctypes over one."""

_SMALLEST_BYTES = 64 << 10
_HUGE_BYTES = 4 << 20
"""Buffers from this size on use large pages: fewer faults, and fewer TLB misses while copying."""


class BufferPool:
    """Buffers of a few sizes.

    A buffer that comes back is kept while all buffers, leased ones included, take at most
    `size_bytes_max` and `num_spare` buffers of its size on top of that.
    """

    def __init__(self, size_bytes_max: int, *, num_spare: int = 0) -> None:
        self._size_bytes_max = size_bytes_max
        self._num_spare = num_spare
        # No lock: buffers come back while the garbage collector runs, possibly inside of `lease` in
        # the thread that would hold the lock. Deques append and pop atomically.
        self._free: dict[int, deque[Memory]] = {}
        self._leased: dict[int, int] = {}
        self._numbers = itertools.count()

    def lease(self, size_bytes: int) -> Bytes:
        """Return at least `size_bytes` of writable memory, page-aligned, as an array of bytes."""
        memory, room = self._taken(room_for(size_bytes))
        # All views keep this small object alive, so its end is the end of the lease.
        holder = holder_type(room).from_buffer(memory)
        number = next(self._numbers)
        self._leased[number] = room
        # Not at exit: then the memory goes with the process anyway.
        weakref.finalize(holder, self._give_back, memory, room, number).atexit = False
        return np.frombuffer(holder, np.uint8, size_bytes)

    def _taken(self, room: int) -> tuple[Memory, int]:
        """Return free memory of at most twice the size, else new memory; and its size."""
        fitting = [r for r, free in list(self._free.items()) if free and room <= r <= 2 * room]
        for found in sorted(fitting):
            with suppress(IndexError):  # Another thread may have been faster.
                return self._free[found].pop(), found
        return self._make(room), room

    def _make(self, room: int) -> Memory:
        # Private, so that a forked child keeps what it sees when the parent writes again.
        memory = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if room >= _HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def _drop(self, memory: Memory) -> None:
        """Forget memory that is not kept; a subclass may have it in a table."""

    def _is_spoilt(self, memory: Memory) -> bool:
        """Return whether memory must never be used again."""
        return False

    def _give_back(self, memory: Memory, room: int, number: int) -> None:
        kept_bytes = sum(r * len(free) for r, free in list(self._free.items()))
        # This buffer is still among the leased ones, so the sum counts it.
        if self._is_spoilt(memory):
            self._drop(memory)
            self._leased.pop(number, None)
            return
        most_bytes = self._size_bytes_max + self._num_spare * room
        if kept_bytes + sum(list(self._leased.values())) <= most_bytes:
            self._free.setdefault(room, deque()).append(memory)
        else:
            self._drop(memory)
        self._leased.pop(number, None)

    def view(self, size_bytes: int) -> memoryview:
        """Return writable memory to read bytes into."""
        return self.array((size_bytes,), np.uint8).data

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return an uninitialised array in leased memory."""
        kind = np.dtype(dtype)
        size_bytes = math.prod(shape) * kind.itemsize
        if size_bytes < _SMALLEST_BYTES:
            return np.empty(shape, kind)
        return self.lease(size_bytes).view(kind).reshape(shape)


def room_for(size_bytes: int) -> int:
    """Return a size rounded up by an eighth at most: batches of similar size share buffers."""
    size = max(size_bytes, _SMALLEST_BYTES)
    step = 1 << max(size.bit_length() - 4, 12)
    return -(-size // step) * step


_types: dict[int, Any] = {}
_TYPES_MAX = 4096


def holder_type(size_bytes: int) -> Any:
    """Return the type of the object between a buffer and its arrays.

    Making a type takes longer than the rest of a lease, so types are kept by size.
    """
    kind = _types.get(size_bytes)
    if kind is None:
        if len(_types) >= _TYPES_MAX:
            _types.clear()
        kind = _types[size_bytes] = ctypes.c_ubyte * size_bytes
    return kind
