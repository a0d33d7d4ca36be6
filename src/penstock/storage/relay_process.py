"""Starts, connects to and ends the relay process of a cut-off process.

Each cut-off process has one relay, which its first call starts. Each calling thread has a socket
pair, and the relay gets the other end. A forked child closes its copies, and starts a relay of its
own when it needs one.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import threading
import weakref

_END_TIMEOUT_S = 5.0
"""How long a relay may take to notice that its owner has closed the control socket."""


class _Connection:
    """A thread's end of a socket pair; closed when the thread ends."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end

    def __del__(self) -> None:
        self.socket.close()


class Relay:
    """This process's relay and the connections of its threads."""

    def __init__(self) -> None:
        # Held while a socket or the relay is made. A fork takes it too (`before_fork`).
        self._lock = threading.Lock()
        self._local = threading.local()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._connections: weakref.WeakSet[_Connection] = weakref.WeakSet()

    def connection(self) -> socket.socket:
        """Return the calling thread's connection, made on its first call."""
        connection: _Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            with self._lock:
                if self._control is None:
                    self._start()
                assert self._control is not None
                mine, theirs = socket.socketpair()
                with theirs:
                    connection = _Connection(mine)
                    self._connections.add(connection)
                    socket.send_fds(self._control, [b"+"], [theirs.fileno()])
            self._local.connection = connection
        return connection.socket

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        # With the owner's search path, not the current folder, so that both run the same package.
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
        self._local.connection = None
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._close_control()

    def close(self) -> None:
        """Close all connections, and wait until the relay has ended."""
        with self._lock:
            self._close_control()
            if self._process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_END_TIMEOUT_S)
                self._process = None
            for connection in list(self._connections):
                connection.socket.close()
        self._local = threading.local()

    def _close_control(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None

    def before_fork(self) -> None:
        """Wait until no other thread is making a socket: the child would keep a copy open."""
        self._lock.acquire()

    def after_fork_in_parent(self) -> None:
        """Go on."""
        self._lock.release()

    def after_fork_in_child(self) -> None:
        """Close the child's copies, so that the parent's relay still ends with the parent."""
        for connection in list(self._connections):
            connection.socket.close()
        self._close_control()
        if self._process is not None:
            self._process.returncode = 0  # it is the parent's child: `Popen` must not wait for it
        self.__init__()  # type: ignore[misc]


relay = Relay()
"""The one relay of this process."""
os.register_at_fork(
    before=relay.before_fork,
    after_in_parent=relay.after_fork_in_parent,
    after_in_child=relay.after_fork_in_child,
)
atexit.register(relay.close)
