"""Object stores and plain http: `s3://`, `gs://`, `az://`, `abfs://`, `http(s)://`.

A `RemoteStore` is a value: a place and options. Each call decides how to reach the store: directly
through obstore, or through a relay if the process was forked after obstore was loaded (see
`clients`). It does not retry; `locate.open_store` wraps it in a `RetryingStore`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.errors import OptionError
from penstock.storage.base import Buffer, ObjectInfo
from penstock.storage.clients import REMOTE_SCHEMES, is_cut_off
from penstock.storage.direct import DirectObjects
from penstock.storage.keys import checked_key
from penstock.storage.options import StoreOptions
from penstock.storage.ranges import check_range
from penstock.storage.relayed import RelayedObjects
from penstock.storage.uris import ParsedUri, split_uri


class RemoteStore:
    """The objects below a bucket, a prefix of one, or an http address."""

    def __init__(self, uri: str, options: StoreOptions | None = None) -> None:
        place = split_uri(uri)
        if place.scheme not in REMOTE_SCHEMES:
            raise OptionError(f"{uri!r} is not remote; remote are {', '.join(REMOTE_SCHEMES)}")
        path = place.path.strip("/")
        self.options = options or StoreOptions()
        self._place = ParsedUri(
            scheme=place.scheme, container=place.container, path=path + "/" if path else ""
        )

    def __repr__(self) -> str:
        return f"RemoteStore({self.uri!r}, {self.options!r})"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, RemoteStore)
            and other._place == self._place
            and other.options == self.options
        )

    def __hash__(self) -> int:
        return hash((self._place, self.options))

    @property
    def uri(self) -> str:
        """Return the root with its scheme."""
        return self._place.uri

    @property
    def source(self) -> str:
        """Return s3, gs, az or http."""
        return {"abfs": "az", "https": "http"}.get(self._place.scheme, self._place.scheme)

    @property
    def can_list(self) -> bool:
        """Return False for plain http."""
        return self.source != "http"

    def _objects(self) -> DirectObjects | RelayedObjects:
        return (RelayedObjects if is_cut_off() else DirectObjects)(self._place, self.options)

    def info(self, key: str) -> ObjectInfo:
        """Return size and marks of an object."""
        return self._objects().info(checked_key(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield all objects below, sorted by key; the whole listing is read before the first."""
        self._check_can_list(prefix)
        yield from self._objects().list(prefix)

    def peek(self, prefix: str = "") -> Sequence[ObjectInfo]:
        """Return some objects below, at the cost of one request."""
        self._check_can_list(prefix)
        return self._objects().peek(prefix)

    def _check_can_list(self, prefix: str) -> None:
        if not self.can_list:
            raise OptionError(
                f"{self.uri}{prefix}: plain http cannot be listed; name the objects, for example "
                f"{self.uri}shard-{{000..127}}.tar, or pass a list"
            )

    def read(self, key: str) -> memoryview:
        """Return a whole object."""
        return self._objects().read(checked_key(key))

    def read_range(self, info: ObjectInfo, offset: int, length: int) -> memoryview:
        """Return a part of an object."""
        check_range(offset, length)
        checked_key(info.key)
        return self._objects().read_range(info, offset, length)

    def read_into(self, info: ObjectInfo, offset: int, target: memoryview) -> None:
        """Fill `target` with a part of an object."""
        check_range(offset, target.nbytes)
        checked_key(info.key)
        self._objects().read_into(info, offset, target)

    def write(self, key: str, data: Buffer, *, only_if_absent: bool = False) -> ObjectInfo:
        """Put a whole object."""
        return self._objects().write(checked_key(key), data, only_if_absent=only_if_absent)

    def delete(self, key: str) -> None:
        """Remove an object."""
        self._objects().delete(checked_key(key))

    def close(self) -> None:
        """Drop the client; the next call makes a new one."""
        self._objects().close()
