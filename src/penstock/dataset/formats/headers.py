"""Reading the small parts of a large object: ahead where they are near, apart where they are
far."""

from __future__ import annotations

from penstock.errors import FormatError
from penstock.storage.base import ObjectInfo, Store

_NEAR_LOCAL_BYTES = 4 << 10
_NEAR_REMOTE_BYTES = 1 << 20
_FAR_BYTES = 4 << 10


class HeaderReader:
    """Hands out pieces of one object, fetching as few ranges as it can.

    A request to a remote store costs as much time as a megabyte, so when the next piece is nearer
    than that, everything between is read along; when it is farther, only the piece itself.
    """

    def __init__(self, store: Store, info: ObjectInfo) -> None:
        self._store = store
        self._info = info
        local = store.source in ("folder", "memory")
        self._near_bytes = _NEAR_LOCAL_BYTES if local else _NEAR_REMOTE_BYTES
        self._start = 0
        self._window = memoryview(b"")
        self._last_miss = -self._near_bytes

    def read(self, offset: int, length: int) -> memoryview:
        """Return `length` bytes from `offset`."""
        end = offset + length
        if end > self._info.size_bytes:
            raise FormatError(
                f"{self._store.uri}{self._info.key} is cut off: it has {self._info.size_bytes} "
                f"bytes, but {length} bytes are expected at {offset}"
            )
        if offset < self._start or end > self._start + len(self._window):
            near = offset - self._last_miss <= 2 * self._near_bytes
            want = max(length, self._near_bytes if near else _FAR_BYTES)
            want = min(want, self._info.size_bytes - offset)
            self._window = self._store.read_range(self._info, offset, want)
            self._start = self._last_miss = offset
        inside = offset - self._start
        return self._window[inside : inside + length]
