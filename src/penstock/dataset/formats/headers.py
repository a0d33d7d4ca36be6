"""Reading the small parts of a large object: with what lies between them, or each alone.

The next header of a tar, or of a file of record batches, is found from the one before. Each takes a
request, and a request takes time as a megabyte does. So where headers are near each other a window
of the object is read with everything between them; where they are far apart, only the headers.
"""

from __future__ import annotations

import time

from penstock.errors import FormatError
from penstock.storage.base import ObjectInfo, Store
from penstock.storage.passing import PassingStore

_ALONE_BYTES = 4 << 10
"""Read for a header alone; the small members behind it often come along."""
_WINDOW_BYTES = 1 << 20
"""Read for the headers that lie in it."""
_STRIDE_BYTES_MAX = 512 << 10
"""Headers further apart than this are read alone on any store, or most of a set would be read."""
_KEPT_WINDOW_BYTES = 8 << 20
"""The window where bytes are kept for tiers, so that none are read in vain."""
_BYTES_S = 50e6
"""What one connection of an object store carries, until a window was read."""
_GAIN = 0.25


def ahead_bytes(stride_bytes: float, latency_s: float, bytes_s: float) -> int:
    """Return how much to read at a header, where the next ones are so far apart.

    A window of W bytes takes L + W/b and brings W/s headers, each of which would take L alone. It
    is quicker if s < W·Lb / (W + Lb).

    >>> ahead_bytes(110_000, 0.020, 50e6), ahead_bytes(2_000_000, 0.020, 50e6)
    (1048576, 4096)
    >>> ahead_bytes(110_000, 0.001, 50e6)
    4096
    """
    worth = latency_s * bytes_s
    longest = min(_STRIDE_BYTES_MAX, _WINDOW_BYTES * worth / (_WINDOW_BYTES + worth))
    return _WINDOW_BYTES if stride_bytes < longest else _ALONE_BYTES


class HeaderReader:
    """Hands out pieces of one object, in rising order."""

    def __init__(self, store: Store, info: ObjectInfo, *, walks: bool = False) -> None:
        """`walks` says that the object is gone through from its beginning to its end.

        Where its bytes are kept, windows then follow each other without gaps: what would be left
        out between them is wanted later.
        """
        self._store = store
        self._info = info
        self._is_local = store.source in ("folder", "memory")
        self._is_kept = walks and isinstance(store, PassingStore) and store.passed.keeps(info.key)
        self._start = 0
        self._window = memoryview(b"")
        self._last = 0
        self._stride_bytes = 0.0
        self._num_alone = 0
        self._latency_s, self._bytes_s = 0.0, 0.0

    def read(self, offset: int, length: int) -> memoryview:
        """Return `length` bytes from `offset`."""
        end = offset + length
        if offset < 0 or length < 0 or end > self._info.size_bytes:
            raise FormatError(
                f"{self._store.uri}{self._info.key} is cut off: it has {self._info.size_bytes} "
                f"bytes, but {length} bytes are expected at {offset}"
            )
        jump = offset - self._last
        if jump > _ALONE_BYTES:
            gain = _GAIN if self._stride_bytes else 1.0
            self._stride_bytes += gain * (jump - self._stride_bytes)
        self._last = offset
        if offset < self._start or end > self._start + len(self._window):
            self._read_window(offset, length)
        inside = offset - self._start
        return self._window[inside : inside + length]

    def _read_window(self, offset: int, length: int) -> None:
        start, want = offset, self._ahead_bytes()
        behind = self._start + len(self._window)
        if self._is_kept and want == _WINDOW_BYTES:
            want = _KEPT_WINDOW_BYTES
            if behind <= offset <= behind + _STRIDE_BYTES_MAX:
                start = behind  # The window reaches far beyond the header all the same.
        want = min(max(want, length), self._info.size_bytes - start)
        begin_s = time.perf_counter()
        self._window = self._store.read_range(self._info, start, want)
        self._start = start
        self._measure(want, time.perf_counter() - begin_s)

    def _ahead_bytes(self) -> int:
        # The first read may have to open a connection, so the second one tells the latency. Where
        # headers are next to each other there is nothing to decide.
        if self._is_local or self._num_alone < (2 if self._stride_bytes else 1):
            return _ALONE_BYTES
        return ahead_bytes(self._stride_bytes, self._latency_s, self._bytes_s or _BYTES_S)

    def _measure(self, size_bytes: int, seconds: float) -> None:
        """Take the quickest small read for the latency, and the quickest large one above it."""
        if size_bytes <= _ALONE_BYTES:
            self._num_alone += 1
            self._latency_s = min(self._latency_s or seconds, seconds)
        elif size_bytes >= _WINDOW_BYTES:
            transfer_s = max(seconds - self._latency_s, 1e-4)
            self._bytes_s = max(self._bytes_s, size_bytes / transfer_s)
