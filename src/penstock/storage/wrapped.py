"""A store that passes every call on to another one; stores that change a call derive from it."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.storage.base import Buffer, ObjectInfo, Store


class WrappedStore:
    """A store that passes every call on; a base for wrappers that change one of them."""

    def __init__(self, store: Store) -> None:
        self.inner = store

    @property
    def uri(self) -> str:
        """Return the inner store's root."""
        return self.inner.uri

    @property
    def source(self) -> str:
        """Return the inner store's word."""
        return self.inner.source

    @property
    def can_list(self) -> bool:
        """Return whether the inner store can."""
        return self.inner.can_list

    def info(self, key: str) -> ObjectInfo:
        """Pass on."""
        return self.inner.info(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Pass on."""
        return self.inner.list(prefix)

    def read(self, key: str) -> memoryview:
        """Pass on."""
        return self.inner.read(key)

    def read_range(self, info: ObjectInfo, offset: int, length: int) -> memoryview:
        """Pass on."""
        return self.inner.read_range(info, offset, length)

    def read_into(self, info: ObjectInfo, offset: int, target: memoryview) -> None:
        """Pass on."""
        self.inner.read_into(info, offset, target)

    def write(self, key: str, data: Buffer, *, only_if_absent: bool = False) -> ObjectInfo:
        """Pass on."""
        return self.inner.write(key, data, only_if_absent=only_if_absent)

    def delete(self, key: str) -> None:
        """Pass on."""
        self.inner.delete(key)

    def close(self) -> None:
        """Pass on."""
        self.inner.close()
