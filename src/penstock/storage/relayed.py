"""Remote objects for a process that cannot use obstore: through a relay process of its own.

One relay per cut-off process, started on the first call; one socket pair per calling thread. A
fork drops both in the child, which starts its own when it needs one.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator

import numpy as np

from penstock import errors
from penstock.errors import StoreError, UnreachableError
from penstock.storage.base import Buffer, ObjectInfo
from penstock.storage.frames import (
    PAYLOAD_BYTES_MAX,
    Answer,
    HungUpError,
    Object,
    Operation,
    Request,
    receive_answer,
    receive_into,
    send_frame,
)
from penstock.storage.options import StoreOptions
from penstock.storage.places import Place

_END_TIMEOUT_S = 5.0
"""How long a relay may take to notice that its owner has closed the control socket."""


class Relay:
    """This process's relay and the connections of its threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._local = threading.local()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._connections: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def connection(self) -> socket.socket:
        """Return the calling thread's connection, made on its first call."""
        mine: socket.socket | None = getattr(self._local, "connection", None)
        if mine is None:
            mine, theirs = socket.socketpair()
            with self._lock, theirs:
                if self._control is None:
                    self._start()
                assert self._control is not None
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
                self._connections.add(mine)
            self._local.connection = mine
        return mine

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        # The owner's search path and not the current folder, so that both run the same package.
        path = os.pathsep.join(part for part in sys.path if part)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "penstock.storage.relay", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
            )
        self._control = ours

    def drop_connection(self) -> None:
        """Forget the calling thread's connection, and the relay when it has died."""
        connection: socket.socket | None = getattr(self._local, "connection", None)
        if connection is not None:
            connection.close()
            self._local.connection = None
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._close_control()

    def close(self) -> None:
        """Hang up and wait until the relay is gone."""
        with self._lock:
            self._close_control()
            if self._process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_END_TIMEOUT_S)
                self._process = None
        self._local = threading.local()

    def _close_control(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None

    def forget_after_fork(self) -> None:
        """Close the child's copies, so that the parent's relay still ends with the parent."""
        for connection in list(self._connections):
            connection.close()
        self._close_control()
        if self._process is not None:
            self._process.returncode = 0  # the parent's child, not ours: nothing to wait for
        self.__init__()  # type: ignore[misc]


relay = Relay()
"""The one relay of this process."""
os.register_at_fork(after_in_child=relay.forget_after_fork)
atexit.register(relay.close)


class Relayed:
    """The objects below one place, asked for through the relay."""

    def __init__(self, place: Place, options: StoreOptions) -> None:
        self._uri = place.uri
        self._options = options

    def info(self, key: str) -> ObjectInfo:
        """Ask for an object's marks."""
        with self._asking("info", key) as connection:
            return _info(_answer(connection).objects[0])

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Ask for a sorted listing."""
        found: list[ObjectInfo] = []
        with self._asking("list", prefix) as connection:
            has_more = True
            while has_more:
                answer = _answer(connection)
                found += map(_info, answer.objects)
                has_more = answer.has_more
        return iter(found)

    def peek(self, prefix: str = "") -> tuple[str, ...]:
        """Ask for the keys of the first page."""
        with self._asking("peek", prefix) as connection:
            return tuple(_answer(connection).keys)

    def read(self, key: str) -> memoryview:
        """Ask for a whole object."""
        with self._asking("read", key) as connection:
            size_bytes = _answer(connection).payload_bytes
            assert size_bytes <= PAYLOAD_BYTES_MAX, size_bytes
            data = np.empty(size_bytes, np.uint8).data
            receive_into(connection, data)
        return data

    def read_range(self, key: str, offset: int, length: int) -> memoryview:
        """Ask for a range."""
        target = np.empty(length, np.uint8).data
        self.read_into(key, offset, target)
        return target

    def read_into(self, key: str, offset: int, target: memoryview) -> None:
        """Ask for a range and receive it where it belongs."""
        with self._asking("read_range", key, offset=offset, length=target.nbytes) as connection:
            size_bytes = _answer(connection).payload_bytes
            assert size_bytes == target.nbytes, f"{size_bytes=} {target.nbytes=}"
            receive_into(connection, target)

    def write(self, key: str, data: Buffer, *, only_if_absent: bool = False) -> ObjectInfo:
        """Send an object to be put."""
        flat = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
        with self._asking("write", key, only_if_absent=only_if_absent, body=flat) as connection:
            return _info(_answer(connection).objects[0])

    def delete(self, key: str) -> None:
        """Ask to remove an object."""
        with self._asking("delete", key) as connection:
            _answer(connection)

    def close(self) -> None:
        """Let go of the calling thread's connection; the relay ends with the process."""
        relay.drop_connection()

    @contextlib.contextmanager
    def _asking(
        self,
        operation: Operation,
        key: str,
        *,
        offset: int = 0,
        length: int = 0,
        only_if_absent: bool = False,
        body: memoryview = memoryview(b""),  # noqa: B008 - empty and read only
    ) -> Iterator[socket.socket]:
        request = Request(
            operation=operation,
            uri=self._uri,
            options=dataclasses.asdict(self._options),
            key=key,
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
        except StoreError:
            raise
        except BaseException:
            relay.drop_connection()  # interrupted half way: what is in the pipe is nobody's answer
            raise


def _answer(connection: socket.socket) -> Answer:
    answer = receive_answer(connection)
    if answer.error_class:
        kind = getattr(errors, answer.error_class, StoreError)
        if issubclass(kind, StoreError):
            raise kind(answer.error_message, uri=answer.error_uri)
        assert issubclass(kind, errors.OptionError), kind
        raise kind(answer.error_message)
    return answer


def _info(found: Object) -> ObjectInfo:
    return ObjectInfo(
        key=found.key, size_bytes=found.size_bytes, etag=found.etag, mtime_ns=found.mtime_ns
    )
