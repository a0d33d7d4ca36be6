"""One thread of a server: a selector, its connections, and a router.

The first loop also accepts; connections are dealt out to all loops. Between two looks at the
sockets the loop looks after what has no socket: requests that are parked, beats that are due,
strangers who took too long, readers who do not read.
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
from penstock.engine.peers.channel import Channel, TlsChannel, tuned
from penstock.engine.peers.rate_limited_log import RateLimitedLog
from penstock.engine.peers.request_router import RequestRouter, ServerState
from penstock.engine.peers.requests import OutgoingFrame, PeerRequest
from penstock.engine.peers.server_connection import READ_BYTES, GoneError, ServerConnection

LOOK_S = 0.002
"""Between two looks at parked requests."""
BEAT_S = 0.25
IDLE_S = 0.5
"""The longest time between two looks at anything."""
SEND_S_MAX = 20.0
"""A reader that takes nothing for so long is dropped."""
STRANGERS_MAX = 256
"""Connections of a loop that have not proven who they are."""
CONNECTIONS_MAX = 8192
"""Of a loop."""
COST_MAX = 2**21
"""Of the unanswered requests of a loop: about as many ranges of 40 bytes."""
ACCEPTS_MAX = 64
"""Before others have their turn."""
PAUSE_S = 0.25
"""Without accepting, when there are no descriptors left; and after a failure of ours."""
FAILURES_MAX = 100
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
        """Gives an accepted socket to one of the loops."""
        self.router = RequestRouter(serving, settled=self._resume_later)
        self.router.has_room_to_park = lambda: self._cost < COST_MAX // 2
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        self._inbox: deque[Callable[[], None]] = deque()
        self._connections: dict[ServerConnection, int] = {}
        """With the events that each is registered for."""
        self._strangers: dict[ServerConnection, None] = {}
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
        """Serve; the loop that is given listeners also accepts."""
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
        """Return how many connections there are, known or not."""
        return len(self._connections)

    @property
    def num_parked(self) -> int:
        """Return how many requests are parked."""
        return sum(len(parking) for parking in list(self.router.parked.values()))

    def call(self, action: Callable[[], None]) -> None:
        """Let the loop's thread do something soon."""
        self._inbox.append(action)
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake.send(b"!")

    def adopt(self, sock: socket.socket) -> None:
        """Serve an accepted connection; called from any loop."""
        self.call(lambda: self._begin(sock))

    def leave(self, at_s: float) -> None:
        """End: no more connections, and at that time no more anything."""
        self.call(lambda: self._start_leaving(at_s))

    def join(self, timeout_s: float) -> bool:
        """Wait until the loop has ended; return whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def has_room(self) -> bool:
        """Return whether another request may be taken in."""
        return self._cost < COST_MAX

    def took(self, cost: int) -> None:
        """Count a request; negative: one that is gone."""
        self._cost += cost

    def _run(self) -> None:
        num_failures = 0
        while not self._has_left() and num_failures < FAILURES_MAX:
            try:
                self._turn()
            except Exception:
                num_failures += 1
                _log.exception("a turn of the peer server failed (%d)", num_failures)
                time.sleep(PAUSE_S)  # whatever it is, it must not happen too often
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
                return  # closed, or set aside, in this turn
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
                return  # else the one who connected has left again
            self._deal(sock)

    def _begin(self, sock: socket.socket) -> None:
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
            # The oldest: whoever is honest proves itself in a moment.
            self.router.counts.dropped += 1
            self._drop(next(iter(self._strangers)))
        self._strangers[connection] = None
        self._connections[connection] = selectors.EVENT_READ
        self._selector.register(channel, selectors.EVENT_READ, connection)
        self._serve(connection, selectors.EVENT_READ, now_s)  # its hello may be there already

    def _refuse(self, channel: Channel, code: int) -> None:
        with contextlib.suppress(OSError):
            channel.send(memoryview(handshake.refusal(code)))

    def _serve(self, connection: ServerConnection, mask: int, now_s: float) -> None:
        """Let a connection do what it can, and see to it that it is called again."""
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
        name = connection.peer or "somebody"
        if isinstance(error, handshake.RefusedError):
            self._refused(connection, str(error), error.code)
        elif isinstance(error, wire.WireError):
            self.router.counts.broken += 1
            self._limited_log.warning("%s was dropped, it makes no sense: %s", name, error)
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
        self._limited_log.warning("%s was refused: it %s", connection.peer or "somebody", reason)
        if code:
            self._refuse(connection.channel, code)

    def _watch(self, connection: ServerConnection) -> None:
        events = connection.interest()
        before = self._connections[connection]
        if events != before:
            self._connections[connection] = events
            if not events:
                self._selector.unregister(connection.channel)
            elif not before:
                self._selector.register(connection.channel, events, connection)
            else:
                self._selector.modify(connection.channel, events, connection)
        if connection.is_held_up:
            self._held_up.add(connection)
        else:
            self._held_up.discard(connection)

    def _drop(self, connection: ServerConnection) -> None:
        if self._connections.pop(connection, 0):
            self._selector.unregister(connection.channel)
        self._strangers.pop(connection, None)
        self._held_up.discard(connection)
        if connection.cost:
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
            self._drop_the_slow(now_s)
        if 0 < self._accepts_at_s <= now_s:
            self._accepts_at_s = 0.0
            self._listen()

    def _beat(self, now_s: float) -> None:
        cursors = self.router.cursors()
        for connection in list(self._connections):
            # Where bytes wait to be sent, they say as much.
            # One that is held up has asked for something that was not even read.
            is_waiting = connection.cost or connection in self._held_up
            if is_waiting and not connection.has_output:
                head = wire.pack_beat(cursors.get(connection, {}))
                connection.put(OutgoingFrame(head=memoryview(head)))
                self._serve(connection, selectors.EVENT_WRITE, now_s)

    def _drop_the_slow(self, now_s: float) -> None:
        for connection in list(self._strangers):
            if now_s - connection.began_s <= handshake.HELLO_S_MAX:
                break
            self._refused(connection, "took too long to prove itself", handshake.SAID_SLOW)
            self._drop(connection)
        for connection in list(self._connections):
            if connection.has_output and now_s - connection.moved_s > SEND_S_MAX:
                self.router.counts.dropped += 1
                self._limited_log.warning(
                    "%s was dropped: it reads nothing", connection.peer or "somebody"
                )
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
        # Those who have all that they asked for hang up when they read our farewell.
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
        """Close all that is open, without a word to anybody; also for a forked child."""
        # First the selector: in a child it is the parent's too, and nothing may be taken off it.
        self._selector.close()
        for connection in list(self._connections):
            connection.channel.close()
        for sock in (*self._listeners, self._woken, self._wake):
            sock.close()
