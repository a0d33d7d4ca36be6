"""One thread of a server: a selector, the connections on it, and a router.

The first loop also accepts connections and deals them out to all loops. In each turn, after it has
served the sockets, a loop handles everything that depends on time: parked requests, heartbeats,
clients that take too long to prove themselves, and clients that do not read their answers.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

from penstock.engine.peers import handshake, wire
from penstock.engine.peers.addresses import is_over_hardware
from penstock.engine.peers.channel import Channel, TlsChannel, tuned, watch
from penstock.engine.peers.guard import RateLimitedLog
from penstock.engine.peers.request_router import RequestRouter, ServerState
from penstock.engine.peers.requests import OutgoingFrame, PeerRequest
from penstock.engine.peers.server_connection import READ_BYTES, GoneError, ServerConnection

LOOK_S = 0.002
"""Time between two polls of parked requests."""
BEAT_S = 0.25
IDLE_S = 0.5
"""The longest time between two turns."""
SEND_S_MAX = 20.0
"""A client that reads nothing of its answers for so long is dropped."""
STRANGERS_MAX = 256
"""Connections of a loop whose clients have not proven themselves."""
CONNECTIONS_MAX = 8192
"""Connections of a loop."""
LOOP_COST_MAX = 2**21
"""A loop reads no more from any connection while the unanswered requests of all of them cost this
much, in ranges of 40 bytes each. At half of it requests are no longer parked."""
ACCEPTS_MAX = 64
"""Connections accepted in one turn."""
PAUSE_S = 0.25
"""How long not to accept if there are no descriptors left; and how long to sleep after a bug."""
FAILURES_MAX = 100
"""Failed turns after which a loop gives up."""
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_log = logging.getLogger("penstock.engine.peers")


class ServerLoop:
    """A thread that serves some of a server's connections."""

    def __init__(
        self,
        serving: ServerState,
        tls: ssl.SSLContext | None,
        deal: Callable[[socket.socket], None],
    ) -> None:
        self._serving = serving
        self._tls = tls
        self._deal = deal
        """Passes an accepted socket to one of the loops."""
        self.router = RequestRouter(serving, settled=self._resume_later)
        self.router.has_room_to_park = lambda: self._cost < LOOP_COST_MAX // 2
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        self._inbox: deque[Callable[[], None]] = deque()
        self._connections: dict[ServerConnection, int] = {}
        """Each with the selector events that it is registered for."""
        self._strangers: dict[ServerConnection, None] = {}
        """Connections whose clients have not proven themselves, the oldest first."""
        self._held_up: set[ServerConnection] = set()
        self._listeners: list[socket.socket] = []
        self._accepts_at_s = 0.0
        self._cost = 0
        self._limited_log = RateLimitedLog(_log)
        self._scratch = memoryview(bytearray(READ_BYTES))
        self._beat_at_s = self._look_at_s = 0.0
        self._leave_at_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="penstock-serve", daemon=True)

    def start(self, listeners: Sequence[socket.socket]) -> None:
        """Start the thread; a loop that gets listeners also accepts connections."""
        for end in (self._woken, self._wake):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._listeners = list(listeners)
        self._listen()
        self._thread.start()

    def _listen(self) -> None:
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ)

    @property
    def num_connections(self) -> int:
        """Return the number of connections."""
        return len(self._connections)

    @property
    def num_parked(self) -> int:
        """Return the number of parked requests."""
        return sum(len(parking) for parking in list(self.router.parked.values()))

    def call(self, action: Callable[[], None]) -> None:
        """Let the loop's thread run an action soon; any thread may call this."""
        # In this order: the thread that a byte wakes up must find the action.
        self._inbox.append(action)
        with contextlib.suppress(OSError):  # a full socket wakes the thread as well
            self._wake.send(b"!")

    def adopt(self, sock: socket.socket) -> None:
        """Serve an accepted connection; any thread may call this."""
        self.call(lambda: self._begin_connection(sock))

    def leave(self, at_s: float) -> None:
        """Stop accepting now, and end at `at_s` at the latest."""
        self.call(lambda: self._start_leaving(at_s))

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the thread; return whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def has_room(self) -> bool:
        """Return whether the bound of all connections together allows another request."""
        return self._cost < LOOP_COST_MAX

    def add_cost(self, cost: int) -> None:
        """Count the cost of a request; negative: the request is gone."""
        self._cost += cost

    def _run(self) -> None:
        num_failures = 0
        while not self._has_left() and num_failures < FAILURES_MAX:
            try:
                self._turn()
            except Exception:
                num_failures += 1
                _log.exception("a turn of the peer server failed (%d)", num_failures)
                time.sleep(PAUSE_S)  # a lasting failure must not spin or flood the log
        if num_failures >= FAILURES_MAX:
            _log.error("the peer server gives up; other nodes read from the store instead")
        self._end()

    def _turn(self) -> None:
        events = self._selector.select(self._timeout_s())
        now_s = time.monotonic()
        for key, mask in events:
            if key.fileobj is self._woken:
                self._read_inbox()
            elif key.data is None:
                self._accept(cast(socket.socket, key.fileobj), now_s)
            else:
                self._serve(key.data, mask, now_s)
        self._look_after(now_s)

    def _timeout_s(self) -> float:
        # Their frames have been read already, so no event of a socket will announce them.
        if any(not connection.is_full for connection in self._held_up):
            return 0.0
        if self.router.parked or self._leave_at_s is not None:
            return LOOK_S
        return BEAT_S if self._connections else IDLE_S

    def _read_inbox(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        while self._inbox:
            self._inbox.popleft()()

    def _accept(self, listener: socket.socket, now_s: float) -> None:
        for _ in range(ACCEPTS_MAX):
            if listener not in self._listeners or self._accepts_at_s:
                return  # earlier in this turn, the listener was closed or accepting was paused
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_DESCRIPTORS:
                    self._limited_log.warning(
                        "no peer can connect for a moment: %s", error.strerror
                    )
                    for each in self._listeners:
                        self._selector.unregister(each)
                    self._accepts_at_s = now_s + PAUSE_S
                return  # with other errors, the client has disconnected again
            self._deal(sock)

    def _begin_connection(self, sock: socket.socket) -> None:
        now_s = time.monotonic()
        self.router.counts.accepted += 1
        try:
            tuned(sock)
            channel = (
                TlsChannel(sock, self._tls, is_server=True)
                if self._tls
                else Channel(sock, copies=not is_over_hardware(sock))
            )
        except (OSError, ValueError):
            sock.close()
            return
        if self._leave_at_s is not None or len(self._connections) >= CONNECTIONS_MAX:
            self.router.counts.dropped += 1
            is_leaving = self._leave_at_s is not None
            code = handshake.SAID_LEAVING if is_leaving else handshake.SAID_BUSY
            self._refuse(channel, code)
            channel.close()
            return
        connection = ServerConnection(channel, self._serving, self.router, self, now_s)
        if len(self._strangers) >= STRANGERS_MAX:
            # Drop the oldest: an honest client proves itself within moments.
            self.router.counts.dropped += 1
            self._drop(next(iter(self._strangers)))
        self._strangers[connection] = None
        self._connections[connection] = selectors.EVENT_READ
        self._selector.register(channel, selectors.EVENT_READ, connection)
        self._serve(connection, selectors.EVENT_READ, now_s)  # its HELLO may be there already

    def _refuse(self, channel: Channel, code: int) -> None:
        with contextlib.suppress(OSError):
            channel.send(memoryview(handshake.refusal(code)))

    def _serve(self, connection: ServerConnection, mask: int, now_s: float) -> None:
        """Let a connection go on, and register it for the events that it needs next."""
        if connection not in self._connections:
            return
        try:
            if mask & selectors.EVENT_READ or connection.channel.wants_write:
                connection.on_readable(self._scratch, now_s)
            connection.flush(now_s)
        except Exception as error:
            self._failed(connection, error)
            return
        if connection.is_known:
            self._strangers.pop(connection, None)
        self._watch(connection)

    def _failed(self, connection: ServerConnection, error: Exception) -> None:
        name = _name_of(connection)
        if isinstance(error, handshake.RefusedError):
            self._refused(connection, str(error), error.code)
        elif isinstance(error, wire.WireError):
            self.router.counts.broken += 1
            self._limited_log.warning(
                "%s was dropped because it sent invalid bytes: %s", name, error
            )
        elif isinstance(error, GoneError) and str(error) and not connection.is_known:
            self._refused(connection, str(error), 0)
        elif isinstance(error, ssl.SSLError) and not connection.is_known:
            self._refused(connection, f"does not get through TLS: {error}", 0)
        elif isinstance(error, GoneError) and str(error):
            self._limited_log.warning("the connection of %s was dropped: %s", name, error)
        elif isinstance(error, GoneError | OSError):
            _log.debug("%s has left: %s", name, error)
        else:
            _log.error("the connection of %s was dropped", name, exc_info=error)
        self._drop(connection)

    def _refused(self, connection: ServerConnection, reason: str, code: int) -> None:
        self.router.counts.refused += 1
        self._limited_log.warning("%s was refused: it %s", _name_of(connection), reason)
        if code:
            self._refuse(connection.channel, code)

    def _watch(self, connection: ServerConnection) -> None:
        events = connection.interest()
        before = self._connections[connection]
        if events != before:
            self._connections[connection] = events
            watch(self._selector, connection.channel, before, events, connection)
        if connection.is_held_up:
            self._held_up.add(connection)
        else:
            self._held_up.discard(connection)

    def _drop(self, connection: ServerConnection) -> None:
        if self._connections.pop(connection, 0):
            self._selector.unregister(connection.channel)
        self._strangers.pop(connection, None)
        self._held_up.discard(connection)
        if connection.cost:  # parked requests would keep the connection alive
            self.router.take_of(connection)
        connection.close()

    def _resume_later(self, request: PeerRequest) -> None:
        self.call(lambda: self._resume(request))

    def _resume(self, request: PeerRequest) -> None:
        request.has_settled = True
        self._look_again([request], time.monotonic())

    def _look_again(self, requests: list[PeerRequest], now_s: float) -> None:
        touched: dict[ServerConnection, None] = {}
        for request in requests:
            connection = request.connection
            assert isinstance(connection, ServerConnection)
            if connection in self._connections:
                self.router.look(request, connection, now_s)
                touched[connection] = None
        for connection in touched:
            self._serve(connection, selectors.EVENT_WRITE, now_s)

    def _look_after(self, now_s: float) -> None:
        if self.router.parked and now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_S
            self._look_again(self.router.take_due(now_s), now_s)
        for connection in [each for each in self._held_up if not each.is_full]:
            self._serve(connection, selectors.EVENT_READ, now_s)
        if now_s >= self._beat_at_s:
            self._beat_at_s = now_s + BEAT_S
            self._beat(now_s)
            self._drop_slow(now_s)
        if 0 < self._accepts_at_s <= now_s:
            self._accepts_at_s = 0.0
            self._listen()

    def _beat(self, now_s: float) -> None:
        progress_marks = self.router.progress_marks()
        for connection in list(self._connections):
            # Bytes that wait to be sent prove as much as a heartbeat. A connection that is held up
            # has sent requests that were not even read: its client waits for an answer, too.
            is_waiting = connection.cost or connection in self._held_up
            if is_waiting and not connection.has_output:
                head = wire.pack_beat(progress_marks.get(connection, {}))
                connection.put(OutgoingFrame(head=memoryview(head)))
                self._serve(connection, selectors.EVENT_WRITE, now_s)

    def _drop_slow(self, now_s: float) -> None:
        for connection in list(self._strangers):
            if now_s - connection.began_s <= handshake.HELLO_S_MAX:
                break
            self._refused(connection, "took too long to prove itself", handshake.SAID_SLOW)
            self._drop(connection)
        for connection in list(self._connections):
            if connection.has_output and now_s - connection.moved_s > SEND_S_MAX:
                self.router.counts.dropped += 1
                self._limited_log.warning("%s was dropped: it reads nothing", _name_of(connection))
                self._drop(connection)

    def _start_leaving(self, at_s: float) -> None:
        now_s = time.monotonic()
        self._leave_at_s = at_s
        self.router.is_leaving = True
        self._close_listeners()
        for connection in list(self._strangers):
            self._refuse(connection.channel, handshake.SAID_LEAVING)
            self._drop(connection)
        for connection in list(self._connections):
            connection.put(OutgoingFrame(head=memoryview(wire.framed(wire.BYE))))
            self._serve(connection, selectors.EVENT_WRITE, now_s)

    def _has_left(self) -> bool:
        if self._leave_at_s is None:
            return False
        # Clients that have all their answers disconnect when they read BYE.
        return not self._connections or time.monotonic() >= self._leave_at_s

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            if not self._accepts_at_s:
                self._selector.unregister(listener)
            listener.close()
        self._listeners = []

    def _end(self) -> None:
        self._leave_at_s = 0.0
        while self._inbox:
            self._inbox.popleft()()
        for connection in list(self._connections):
            self._drop(connection)
        self._close_listeners()
        self.close_descriptors()

    def close_descriptors(self) -> None:
        """Close all descriptors and send nothing; also for a forked child."""
        # Parent and child share the epoll set, so the child must close it before the sockets:
        # unregistering them there would unregister them for the parent.
        self._selector.close()
        for connection in list(self._connections):
            connection.channel.close()
        for sock in (*self._listeners, self._woken, self._wake):
            sock.close()


def _name_of(connection: ServerConnection) -> str:
    return connection.peer or "an unknown client"
