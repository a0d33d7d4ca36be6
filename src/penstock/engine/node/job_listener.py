"""The unix socket where jobs of this host connect.

Each connection has a thread: requests are few, and an answer may have to wait for a lock or for the
removal of files. Every user of the host may connect; the kernel identifies the user, and the
service decides what that user may do. So that no user can exclude others, connections per user, the
time that a request may take to arrive, and the memory of unfinished requests are bounded.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.engine.node.places import take_lock
from penstock.engine.peers.node_messages import (
    FRAME_BYTES_MAX,
    NodeAnswer,
    NodeRequest,
    RequestRefused,
    packed,
    receive_request,
    user_of,
)
from penstock.errors import OptionError, PenstockError

CONNECTIONS_MAX = 1024
CONNECTIONS_OF_USER_MAX = 128
"""Every rank has one. It takes eight users to use up `CONNECTIONS_MAX`."""
_SEND_S_MAX = 10.0

_log = logging.getLogger("penstock.engine.node")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConnection:
    """A connected process, as the kernel identifies it."""

    number: int
    pid: int
    user: int
    group: int


class JobListener:
    """Listens at a path, and answers the requests of each connection until it ends."""

    def __init__(
        self,
        path: str,
        answer: Callable[[JobConnection, NodeRequest], NodeAnswer],
        left: Callable[[JobConnection], None],
    ) -> None:
        self.path = path
        self._answer = answer
        self._left = left
        self._numbers = itertools.count(1)
        # Guards `_inside`, which the accepting thread and those of all connections change.
        self._mutex = threading.Lock()
        self._inside: dict[int, tuple[JobConnection, socket.socket]] = {}
        self._listener: socket.socket | None = None
        self._large: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        """By user: held while a large request is read, so that there is only one at a time."""
        self._lock = -1

    @property
    def num_clients(self) -> int:
        """How many processes are connected."""
        return len(self._inside)

    def take(self) -> None:
        """Take the lock that keeps other services from this socket."""
        folder = os.path.dirname(self.path)  # noqa: PTH120
        try:
            # Other users must be able to reach the socket; the service decides what they may do.
            Path(folder).mkdir(mode=0o755, parents=True, exist_ok=True)
            name = f"{os.path.basename(self.path)}.lock"  # noqa: PTH119
            self._lock = take_lock(folder, name, f"the socket {self.path}")
        except OSError as error:
            raise OptionError(
                f"no socket can be made at {self.path} ({error.strerror}); give another with "
                "--socket"
            ) from error

    def start(self) -> None:
        """Accept connections; replaces the socket of a service that has died."""
        path = Path(self.path)
        if path.exists() and not path.is_socket():
            raise OptionError(f"{path} is there and is no socket; remove it or give another")
        path.unlink(missing_ok=True)  # its service is dead, or we would not have the lock
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self.path)
        path.chmod(0o666)
        listener.listen(128)
        self._listener = listener
        threading.Thread(target=self._accept, name="penstock-listener", daemon=True).start()

    def _accept(self) -> None:
        listener = self._listener
        assert listener is not None
        while self._listener is not None:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed, or no descriptors left
                if self._listener is not None:
                    time.sleep(0.2)  # until a connection ends and gives its descriptor back
                continue
            pid, user, group = user_of(connection)
            client = JobConnection(number=next(self._numbers), pid=pid, user=user, group=group)
            if self._has_room(user):
                self._inside[client.number] = (client, connection)
                threading.Thread(
                    target=self._serve, args=(client, connection), name="penstock-job", daemon=True
                ).start()
            else:
                _log.warning("process %d of user %d was turned away: too many", pid, user)
                connection.close()

    def _has_room(self, user: int) -> bool:
        with self._mutex:
            users = Counter(client.user for client, _ in self._inside.values())
        return users.total() < CONNECTIONS_MAX and users[user] < CONNECTIONS_OF_USER_MAX

    def _serve(self, client: JobConnection, connection: socket.socket) -> None:
        try:
            large = self._large[client.user]
            while (message := receive_request(connection, large)) is not None:
                self._send(connection, self._answered(client, message))
        except (OSError, PenstockError, msgspec.MsgspecError, ValueError) as error:
            _log.info("process %d of user %d is gone: %s", client.pid, client.user, error)
        finally:
            with self._mutex:
                self._inside.pop(client.number, None)
            connection.close()
            self._left(client)

    def _answered(self, client: JobConnection, message: NodeRequest) -> NodeAnswer:
        try:
            return self._answer(client, message)
        except (PenstockError, OSError) as error:
            return RequestRefused(message=str(error))
        except Exception:
            _log.exception("no answer to %s of user %d", type(message).__name__, client.user)
            return RequestRefused(message="the node service failed here; its log says how")

    def _send(self, connection: socket.socket, answer: NodeAnswer) -> None:
        frame = packed(answer)
        assert len(frame) <= FRAME_BYTES_MAX
        connection.settimeout(_SEND_S_MAX)
        connection.sendall(frame)
        connection.settimeout(None)

    def close(self) -> None:
        """Accept no more connections."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                Path(self.path).unlink()
                listener.shutdown(
                    socket.SHUT_RDWR
                )  # wakes the thread in `accept`; `close` would not
            listener.close()

    def stop(self) -> None:
        """Close all connections, and give the socket's lock back."""
        self.close()
        with self._mutex:
            inside = list(self._inside.values())
        for _, connection in inside:
            with contextlib.suppress(OSError):  # its own thread closes it, once `recv` returns
                connection.shutdown(socket.SHUT_RDWR)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
