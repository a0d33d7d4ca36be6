"""The Store protocol: what every place that holds objects can do.

A store maps keys (relative names with `/`) to immutable bytes. All calls block and may come from
many threads at once; `storage.pool` supplies the threads. A store is a value: it can be pickled, it
holds no client, thread, socket or file before its first call, and a forked child makes its own.

Others may replace an object at any time. So a read of a range does not name the object by its key
alone: the caller passes the `ObjectInfo` from when it found the position in the object, and the
store compares it with the object that it reads from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

Buffer = bytes | bytearray | memoryview
"""What can be written: anything contiguous that exposes its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """The size and marks of an object, known without reading it."""

    key: str
    """Name relative to the store's root, with `/` between parts."""
    size_bytes: int
    """Length of the object."""
    etag: str = ""
    """The store's own mark of this content; empty if it has none (folders)."""
    mtime_ns: int = 0
    """Last change in nanoseconds since 1970; 0 if unknown."""

    def allows(self, now: ObjectInfo) -> bool:
        """Return whether `now` may be this same object, as far as their marks are comparable.

        Sizes always are. Etags are compared if both have one, times if neither has one: an index
        that was made in a folder knows nothing about the etags of a bucket.
        """
        if self.size_bytes != now.size_bytes:
            return False
        if self.etag and now.etag:
            # Azure quotes etags in answers but not in listings; proxies mark theirs as weak.
            return self.etag == now.etag or _bare(self.etag) == _bare(now.etag)
        if self.etag or now.etag or not (self.mtime_ns and now.mtime_ns):
            return True
        return self.mtime_ns == now.mtime_ns


def _bare(etag: str) -> str:
    return etag.removeprefix("W/").strip('"')


@runtime_checkable
class Store(Protocol):
    """A place that holds objects."""

    @property
    def uri(self) -> str:
        """The root, as the user would write it, ending with `/`."""

    @property
    def source(self) -> str:
        """One word for statistics: memory, folder, s3, gs, az, http."""

    @property
    def can_list(self) -> bool:
        """False for plain http, where nothing can be listed."""

    def info(self, key: str) -> ObjectInfo:
        """Return the size and marks of an object, or raise `NotFoundError`."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield all objects whose key starts with `prefix`, sorted by key."""

    def read(self, key: str) -> memoryview:
        """Return a whole object."""

    def read_range(self, info: ObjectInfo, offset: int, length: int) -> memoryview:
        """Return exactly `length` bytes of an object from `offset`.

        If the object is not the one that `info` describes, this is a `ChangedError`. A range that
        reaches past the end is a `RangeError`; an answer that is too short is a `TruncatedError`.
        """

    def read_into(self, info: ObjectInfo, offset: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `offset`; errors as in `read_range`."""

    def write(self, key: str, data: Buffer, *, only_if_absent: bool = False) -> ObjectInfo:
        """Put a whole object: afterwards readers see all of it, before that nothing of it.

        With `only_if_absent` exactly one of several writers wins; the others get `ExistsError`.
        """

    def delete(self, key: str) -> None:
        """Remove an object; do nothing if there is none."""

    def close(self) -> None:
        """Close clients and files. The store may be used again; it then opens them again."""
