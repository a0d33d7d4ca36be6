"""Reading the small parts of a large object: ahead where they are near, apart where they are
far."""

from __future__ import annotations

from penstock.errors import FormatError
from penstock.storage.base import ObjectInfo, Store

_NEAR_LOCAL_BYTES = 4 << 10
_NEAR_REMOTE_BYTES = 1 << 20
_FAR_BYTES = 4 << 10
_KINDS = (
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"PK\x03\x04", "a zip archive"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ", "xz"),
    (b"PAR1", "Parquet"),
    (b"<", "a page of HTML or XML, such as a server's error"),
    (b"version https://git-lfs", "a pointer of Git LFS: fetch the file with `git lfs pull`"),
)


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
        if offset < 0 or length < 0 or end > self._info.size_bytes:
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


def like_what(head: bytes) -> str:
    """Return words for the first bytes of an object that is not what its name says.

    >>> like_what(b"<html>")[:30], like_what(b"abcdefghij")
    ('it looks like a page of HTML o', "it starts with b'abcdefgh'")
    """
    found = (words for magic, words in _KINDS if head.lstrip().startswith(magic))
    words = next(found, None)
    return f"it looks like {words}" if words else f"it starts with {bytes(head[:8])!r}"
