"""Remote objects through obstore, in a process that is not cut off (see `clients`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING

from penstock.errors import (
    ChangedError,
    ExistsError,
    NotFoundError,
    OptionError,
    RangeError,
    StoreError,
    UnavailableError,
)
from penstock.storage.base import Buffer, ObjectInfo
from penstock.storage.clients import StoreClient, client_of, forget_client, renewed
from penstock.storage.failures import FailedCall, is_expired, translated
from penstock.storage.options import StoreOptions
from penstock.storage.ranges import changed_error, range_error, truncated_error
from penstock.storage.uris import ParsedUri

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta

_LIST_CHUNK = 1000
_PART_BYTES = 8 * 2**20
"""Objects above this size are uploaded in parts of it, a few at once."""
_PARTS_AT_ONCE = 4


class DirectObjects:
    """The objects below one place. The caller checks the keys."""

    def __init__(self, place: ParsedUri, options: StoreOptions) -> None:
        assert not place.path or place.path.endswith("/")
        self._place = place
        self._options = options

    @contextlib.contextmanager
    def _asking(self, key: str) -> Iterator[StoreClient]:
        """Yield the client, and translate its errors into ours."""
        client = client_of(self._place, self._options)
        try:
            yield client
        except (StoreError, OptionError, ChangedError):
            raise
        except Exception as error:
            asked = FailedCall(
                uri=self._place.uri + key,
                container=self._place.container_uri,
                credentials=client.credentials,
                timeout_s=self._options.timeout_s,
                has_token=client.keys is not None and client.keys.session_token is not None,
            )
            if is_expired(error, has_token=asked.has_token) and renewed(
                self._place, self._options, client
            ):
                raise UnavailableError(
                    f"{asked.uri}: {asked.credentials} had expired, there are new ones; ask again",
                    uri=asked.uri,
                ) from error
            # The client's own text, forty lines long, stays as the cause.
            raise translated(error, asked) from error

    def info(self, key: str) -> ObjectInfo:
        """Request the marks of an object."""
        import obstore

        with self._asking(key) as client:
            return _info(key, obstore.head(client.store, self._place.path + key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Request all pages and sort them: not every server lists in the order that S3 promises."""
        found = [info for page in self._pages(prefix) for info in page]
        return iter(sorted(found, key=lambda info: info.key))

    def peek(self, prefix: str = "") -> Sequence[ObjectInfo]:
        """Return the first page: one request, and enough for a hint."""
        return next(self._pages(prefix), ())

    def _pages(self, prefix: str) -> Iterator[tuple[ObjectInfo, ...]]:
        import obstore

        # obstore lists below a folder, so the part of the prefix behind it is compared here.
        full = self._place.path + prefix
        folder = full.rpartition("/")[0]
        with self._asking(prefix) as client:
            for page in obstore.list(client.store, folder or None, chunk_size=_LIST_CHUNK):
                yield tuple(
                    _info(meta["path"][len(self._place.path) :], meta)
                    for meta in page
                    if meta["path"].startswith(full)
                )

    def read(self, key: str) -> memoryview:
        """Request a whole object."""
        import obstore

        with self._asking(key) as client:
            result = obstore.get(client.store, self._place.path + key)
            expected_bytes = result.meta["size"]
            data = memoryview(result.bytes())
        if data.nbytes != expected_bytes:
            raise truncated_error(self._place.uri + key, data.nbytes, expected_bytes)
        return data

    def read_range(self, info: ObjectInfo, offset: int, length: int) -> memoryview:
        """Request a range of an object, and check that all of it came from that object."""
        if length == 0:
            self._explain(info, offset, 0, self.info(info.key))
            return memoryview(b"")
        try:
            return self._range(info, offset, length)
        except (RangeError, ExistsError):
            # 416 or 412: the object's present marks show why.
            self._explain(info, offset, length, self.info(info.key))
        # The marks match, so the server refuses its own etag: the etag of the answer is compared.
        return self._range(replace(info, etag=""), offset, length)

    def _range(self, info: ObjectInfo, offset: int, length: int) -> memoryview:
        import obstore

        options: GetOptions = {"range": (offset, offset + length)}
        if info.etag and self._place.scheme == "s3":
            # Other stores may write the same etag differently in listings and in answers.
            options["if_match"] = info.etag
        with self._asking(info.key) as client:
            result = obstore.get(client.store, self._place.path + info.key, options=options)
            # Compared before the body is received: it may be long, and of another object.
            meta = result.meta
            if meta["size"] != info.size_bytes or meta["e_tag"] != info.etag:
                self._explain(info, offset, length, _info(info.key, meta))
            data = memoryview(result.bytes())
        if data.nbytes != length:
            # Servers silently cut a range at the end of the object.
            self._explain(info, offset, length, info)
            raise truncated_error(self._place.uri + info.key, data.nbytes, length)
        return data

    def _explain(self, info: ObjectInfo, offset: int, length: int, now: ObjectInfo) -> None:
        """Raise an error if the object was replaced, or ends before the range does."""
        uri = self._place.uri + info.key
        if not info.allows(now):
            raise changed_error(uri, info, now)
        if offset + length > now.size_bytes:
            raise range_error(uri, offset, length, now.size_bytes)

    def read_into(self, info: ObjectInfo, offset: int, target: memoryview) -> None:
        """Request a range and copy it."""
        target[:] = self.read_range(info, offset, target.nbytes)

    def write(self, key: str, data: Buffer, *, only_if_absent: bool = False) -> ObjectInfo:
        """Put an object: in one piece if conditional, in parts if large."""
        import obstore

        if self._place.scheme in ("http", "https"):
            raise OptionError(
                f"{self._place.uri}{key}: plain http is read only; write to a folder or a bucket"
            )
        flat = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
        with self._asking(key) as client:
            result = obstore.put(
                client.store,
                self._place.path + key,
                flat,
                mode="create" if only_if_absent else "overwrite",
                use_multipart=False if only_if_absent or flat.nbytes <= _PART_BYTES else None,
                chunk_size=_PART_BYTES,
                max_concurrency=_PARTS_AT_ONCE,
            )
        return ObjectInfo(key=key, size_bytes=flat.nbytes, etag=result["e_tag"] or "")

    def delete(self, key: str) -> None:
        """Remove an object."""
        import obstore

        with contextlib.suppress(NotFoundError), self._asking(key) as client:
            obstore.delete(client.store, self._place.path + key)

    def close(self) -> None:
        """Drop the client."""
        forget_client(self._place, self._options)


def _info(key: str, meta: ObjectMeta) -> ObjectInfo:
    modified: datetime | None = meta.get("last_modified")
    return ObjectInfo(
        key=key,
        size_bytes=meta["size"],
        etag=meta["e_tag"] or "",
        mtime_ns=int(modified.timestamp()) * 10**9 if modified else 0,
    )
