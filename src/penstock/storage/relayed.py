"""Remote objects for a process that cannot use obstore: through a relay process of its own.

`relay_process` starts the relay, `frames` defines the messages, `relay` is the relay's program.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence

import numpy as np

from penstock import errors
from penstock.errors import ChangedError, StoreError, UnreachableError
from penstock.storage.base import Buffer, ObjectInfo
from penstock.storage.frames import (
    PAYLOAD_BYTES_MAX,
    HungUpError,
    Operation,
    RelayAnswer,
    RelayRequest,
    receive_answer,
    receive_into,
    send_frame,
)
from penstock.storage.options import StoreOptions
from penstock.storage.relay_process import relay
from penstock.storage.uris import ParsedUri


class RelayedObjects:
    """The objects below one place, through the relay."""

    def __init__(self, place: ParsedUri, options: StoreOptions) -> None:
        self._uri = place.uri
        self._options = options

    def info(self, key: str) -> ObjectInfo:
        """Request the marks of an object."""
        with self._asking("info", key) as connection:
            return _answer(connection).objects[0]

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Request a sorted listing."""
        found: list[ObjectInfo] = []
        with self._asking("list", prefix) as connection:
            has_more = True
            while has_more:
                answer = _answer(connection)
                found += answer.objects
                has_more = answer.has_more
        return iter(found)

    def peek(self, prefix: str = "") -> Sequence[ObjectInfo]:
        """Request the first page."""
        with self._asking("peek", prefix) as connection:
            return _answer(connection).objects

    def read(self, key: str) -> memoryview:
        """Request a whole object."""
        with self._asking("read", key) as connection:
            size_bytes = _answer(connection).payload_bytes
            assert size_bytes <= PAYLOAD_BYTES_MAX, size_bytes
            data = np.empty(size_bytes, np.uint8).data
            receive_into(connection, data)
        return data

    def read_range(self, info: ObjectInfo, offset: int, length: int) -> memoryview:
        """Request a range."""
        target = np.empty(length, np.uint8).data
        self.read_into(info, offset, target)
        return target

    def read_into(self, info: ObjectInfo, offset: int, target: memoryview) -> None:
        """Request a range, and receive it straight into `target`."""
        with self._asking(
            "read_range", info.key, wanted=info, offset=offset, length=target.nbytes
        ) as connection:
            size_bytes = _answer(connection).payload_bytes
            assert size_bytes == target.nbytes, f"{size_bytes=} {target.nbytes=}"
            receive_into(connection, target)

    def write(self, key: str, data: Buffer, *, only_if_absent: bool = False) -> ObjectInfo:
        """Send an object to be put."""
        flat = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
        with self._asking("write", key, only_if_absent=only_if_absent, body=flat) as connection:
            return _answer(connection).objects[0]

    def delete(self, key: str) -> None:
        """Request the removal of an object."""
        with self._asking("delete", key) as connection:
            _answer(connection)

    def close(self) -> None:
        """Drop the calling thread's connection; the relay ends with the process."""
        relay.drop_connection()

    @contextlib.contextmanager
    def _asking(
        self,
        operation: Operation,
        key: str,
        *,
        wanted: ObjectInfo | None = None,
        offset: int = 0,
        length: int = 0,
        only_if_absent: bool = False,
        body: memoryview = memoryview(b""),  # noqa: B008 - empty and read only
    ) -> Iterator[socket.socket]:
        request = RelayRequest(
            operation=operation,
            uri=self._uri,
            options=self._options,
            key=key,
            wanted=wanted,
            offset=offset,
            length=length,
            only_if_absent=only_if_absent,
            payload_bytes=body.nbytes,
        )
        try:
            connection = relay.connection()
            send_frame(connection, request)
            connection.sendall(body)
            yield connection
        except (HungUpError, OSError) as error:
            if isinstance(error, StoreError) and not isinstance(error, HungUpError):
                raise
            relay.drop_connection()
            raise UnreachableError(
                f"{self._uri}{key}: this process's relay ended unexpectedly ({error}); "
                "the next call starts a new one",
                uri=self._uri + key,
            ) from error
        except (StoreError, ChangedError):
            raise
        except BaseException:
            # Interrupted half way: the next answer in this connection belongs to no request.
            relay.drop_connection()
            raise


def _answer(connection: socket.socket) -> RelayAnswer:
    answer = receive_answer(connection)
    if answer.error_class:
        kind = getattr(errors, answer.error_class, StoreError)
        if issubclass(kind, StoreError):
            raise kind(answer.error_message, uri=answer.error_uri)
        assert issubclass(kind, errors.OptionError | errors.ChangedError), kind
        raise kind(answer.error_message)
    return answer
