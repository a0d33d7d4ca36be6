"""Objects in this process's memory: `memory://name/`, for tests, demos and small data.

Stores with the same name are the same store anywhere in the process. Pickling carries the name but
not the bytes: in another process the name means another store, which starts empty (after a fork,
with a copy of the parent's objects). No lock is needed, because each call is one operation on one
dictionary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import xxhash

from penstock.errors import ExistsError, NotFoundError
from penstock.storage.base import Buffer, ObjectInfo
from penstock.storage.keys import checked_key
from penstock.storage.ranges import changed_error, check_range, range_error

_Objects = dict[str, tuple[ObjectInfo, bytes]]
_stores: dict[str, _Objects] = {}


class MemoryStore:
    """The process-wide store of one name."""

    source = "memory"
    can_list = True

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"MemoryStore({self.name!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MemoryStore) and other.name == self.name

    def __hash__(self) -> int:
        return hash((MemoryStore, self.name))

    @property
    def uri(self) -> str:
        """Return `memory://name/`."""
        return f"memory://{self.name}/"

    @property
    def _objects(self) -> _Objects:
        return _stores.setdefault(self.name, {})

    def _found(self, key: str) -> tuple[ObjectInfo, bytes]:
        found = self._objects.get(checked_key(key))
        if found is None:
            raise NotFoundError(
                f"{self.uri}{key} does not exist; the store has {len(self._objects)} objects and "
                "lives in one process only",
                uri=self.uri + key,
            )
        return found

    def info(self, key: str) -> ObjectInfo:
        """Return size and marks of an object."""
        return self._found(key)[0]

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects there are now, sorted by key."""
        objects = self._objects.copy()
        for key in sorted(key for key in objects if key.startswith(prefix)):
            yield objects[key][0]

    def read(self, key: str) -> memoryview:
        """Return a view of the stored bytes."""
        return memoryview(self._found(key)[1])

    def read_range(self, info: ObjectInfo, offset: int, length: int) -> memoryview:
        """Return a view of a part of the stored bytes."""
        check_range(offset, length)
        now, data = self._found(info.key)
        if not info.allows(now):
            raise changed_error(self.uri + info.key, info, now)
        if offset + length > now.size_bytes:
            raise range_error(self.uri + info.key, offset, length, now.size_bytes)
        return memoryview(data)[offset : offset + length]

    def read_into(self, info: ObjectInfo, offset: int, target: memoryview) -> None:
        """Copy a part of the stored bytes."""
        target[:] = self.read_range(info, offset, target.nbytes)

    def write(self, key: str, data: Buffer, *, only_if_absent: bool = False) -> ObjectInfo:
        """Store a copy of the bytes."""
        copy = bytes(data)
        info = ObjectInfo(
            key=checked_key(key),
            size_bytes=len(copy),
            etag=xxhash.xxh3_128_hexdigest(copy),
            mtime_ns=time.time_ns(),
        )
        entry = (info, copy)
        if only_if_absent:
            # `setdefault` is atomic in the interpreter, so exactly one writer gets its own entry.
            if self._objects.setdefault(key, entry) is not entry:
                raise ExistsError(f"{self.uri}{key} exists already", uri=self.uri + key)
        else:
            self._objects[key] = entry
        return info

    def delete(self, key: str) -> None:
        """Forget an object."""
        self._objects.pop(checked_key(key), None)

    def close(self) -> None:
        """Do nothing: the objects stay until the process ends or `clear` is called."""

    def clear(self) -> None:
        """Forget all objects of this name."""
        _stores.pop(self.name, None)
