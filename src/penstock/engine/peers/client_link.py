"""A client's link to one peer: it dials the peer's addresses and keeps one connection in use.

Addresses are tried as in Happy Eyeballs (RFC 8305): first the one that worked last, then the next
one as soon as an attempt fails or `NEXT_S` has passed. The first connection that proves to be the
peer is used. So a peer with a dead interface, or with an address that means another machine here
(container bridges have the same address everywhere), costs a quarter of a second, not a time-out.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import ssl
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.engine.peers import handshake, wire
from penstock.engine.peers.base import Address, Gossip
from penstock.engine.peers.channel import Channel, TlsChannel, socket_address, tuned
from penstock.engine.peers.client_connection import ClientConnection, LostError
from penstock.engine.peers.guard import guarded
from penstock.engine.peers.pending import PendingAsk
from penstock.errors import PeerError

if TYPE_CHECKING:
    from penstock.engine.peers.client import PeerClient

SILENCE_S = 2.0
"""A peer that sends nothing for so long while an answer is due is lost."""
STUCK_S = 5.0
"""A peer whose progress mark does not change for so long while requests are parked there is
stuck."""
NEXT_S = 0.25
"""After this time the next address is tried beside the ones before."""
_WORST_FIRST = ("refused", "broken", "lost")
"""If several addresses failed, the link reports the first of these kinds: it says most."""

_log = logging.getLogger("penstock.engine.peers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who the client is, and what all its connections share."""

    name: str
    run_id: bytes
    secret: bytes = field(repr=False)
    gossip: Gossip
    tls: ssl.SSLContext | None


class PeerLink:
    """The requests to one peer, and the connections that carry them."""

    def __init__(self, peer: str, identity: Identity, client: PeerClient) -> None:
        self.peer = peer
        self.num_bytes = self.num_requests = self.num_failed = self.num_parked = 0
        self.seconds = 0.0
        self._identity = identity
        self._client = client
        self._waiting: deque[PendingAsk] = deque()
        """Requests that no connection has room for yet."""
        self._connection: ClientConnection | None = None
        self._attempts: list[ClientConnection] = []
        self._leaving: list[ClientConnection] = []
        """Connections whose server is stopping; it may still answer what it was sent."""
        self._untried: deque[Address] = deque()
        self._next_at_s = self._give_up_at_s = 0.0
        self._faults: list[tuple[str, str]] = []
        self._worked: Address | None = None
        """The address that was last connected to."""

    @property
    def is_busy(self) -> bool:
        """Return whether a request waits, is outstanding, or a connection is being made."""
        if self._waiting or self._attempts:
            return True
        return any(connection.outstanding for connection in self._all())

    def _all(self) -> list[ClientConnection]:
        ready = [self._connection] if self._connection is not None else []
        return [*ready, *self._leaving, *self._attempts]

    def say(self) -> bytes:
        """Return the gossip to send."""
        return guarded(b"", self._identity.gossip.say)

    def hear(self, data: bytes) -> None:
        """Take the gossip of the peer."""
        guarded(None, self._identity.gossip.hear, self.peer, data)

    def answered(self, pending: PendingAsk, num_bytes: int, seconds: float) -> None:
        """Count an answer."""
        self.num_bytes += num_bytes
        self.num_requests += 1
        self.seconds += seconds
        self.num_parked += pending.parked_s is not None
        guarded(None, self._identity.gossip.reached, self.peer)

    def submit(self, pending: PendingAsk, addresses: Sequence[Address], now_s: float) -> None:
        """Send a request as soon as there is a connection with room for it."""
        self._waiting.append(pending)
        if self._connection is not None:
            self._ask_on(self._connection, now_s)
        elif not self._attempts and not self._untried:
            self._dial(addresses, now_s)

    def _ask_on(self, connection: ClientConnection, now_s: float) -> None:
        while self._waiting and connection.has_room:
            connection.ask(self._waiting.popleft(), now_s)
        try:
            connection.flush()
        except OSError as error:
            self._on_fault(connection, error)
            return
        self._client.watch(connection, self)

    def _dial(self, addresses: Sequence[Address], now_s: float) -> None:
        self._faults.clear()
        self._untried = deque(sorted(addresses, key=lambda one: one != self._worked))
        self._give_up_at_s = now_s + SILENCE_S
        if not self._untried:
            self._faults.append(("lost", "no address of it is known"))
        self._dial_next(now_s)

    def _dial_next(self, now_s: float) -> None:
        """Begin an attempt to connect; if all have failed, the link has failed."""
        while self._untried:
            address = self._untried.popleft()
            try:
                connection = self._begun(address, now_s)
            except (OSError, ValueError) as error:
                self._faults.append(("lost", f"{address}: {error}"))
                continue
            self._attempts.append(connection)
            self._next_at_s = now_s + NEXT_S
            self._client.watch(connection, self)
            return
        if not self._attempts:
            kinds = {kind for kind, _ in self._faults}
            kind = next(kind for kind in _WORST_FIRST if kind in kinds)
            self._fail(kind, "; ".join(text for _, text in self._faults))

    def _begun(self, address: Address, now_s: float) -> ClientConnection:
        identity = self._identity
        family, place = socket_address(address)
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            tuned(sock)
            error = sock.connect_ex(place)
            if error not in (0, errno.EINPROGRESS):
                raise OSError(error, os.strerror(error))
            tls = identity.tls
            channel = TlsChannel(sock, tls, is_server=False) if tls else Channel(sock)
        except BaseException:
            sock.close()
            raise
        asker = handshake.ClientHandshake(
            name=identity.name,
            run_id=identity.run_id,
            secret=identity.secret,
            nonce=os.urandom(handshake.NONCE_BYTES),
        )
        return ClientConnection(channel, address, asker, self, now_s)

    def on_event(self, connection: ClientConnection, now_s: float) -> None:
        """Let a connection go on that a selector reported."""
        try:
            connection.on_event(now_s)
            if connection.is_ready and connection in self._attempts:
                self._adopt(connection, now_s)
        except Exception as error:
            self._on_fault(connection, error)
        if connection not in self._all():
            return
        if connection.is_leaving:
            self._retire(connection)
        elif connection is self._connection and self._waiting:
            self._ask_on(connection, now_s)
        else:
            self._client.watch(connection, self)

    def _adopt(self, connection: ClientConnection, now_s: float) -> None:
        # Another member of the run may have got the address; a name with "@" allows any member.
        if connection.peer != self.peer and not self.peer.startswith("@"):
            raise wire.WireError(f"{connection.peer} answers there")
        self._attempts.remove(connection)
        for other in self._attempts:
            self._close(other)
        self._attempts.clear()
        self._untried.clear()
        self._connection, self._worked = connection, connection.address
        connection.heard_s = now_s
        guarded(None, self._identity.gossip.reached, self.peer)
        self._ask_on(connection, now_s)

    def _retire(self, connection: ClientConnection) -> None:
        """Send no more requests on a connection, and close it after its last answer."""
        if connection is self._connection:
            self._connection = None
            self._leaving.append(connection)
        if connection.outstanding:
            self._client.watch(connection, self)
            return
        self._leaving.remove(connection)
        self._close(connection)

    def _on_fault(self, connection: ClientConnection, error: Exception) -> None:
        """Give up a connection, and fail the requests that are outstanding on it or wait for it."""
        kind = kind_of(error, is_ready=connection.is_ready)
        text = f"{connection.address}: {error}"
        was_waiting = False
        if connection in self._attempts:
            self._attempts.remove(connection)
            self._close(connection)
            self._faults.append((kind, text))
            self._dial_next(time.monotonic())
            return
        if connection is self._connection:
            self._connection, was_waiting = None, True
        elif connection in self._leaving:
            self._leaving.remove(connection)
        self._close(connection)
        due = list(connection.outstanding.values())
        if was_waiting:
            due += self._waiting
            self._waiting.clear()
        if due:  # an idle connection may close at any time; that says nothing about the peer
            self._finish(due, kind, text)

    def _fail(self, kind: str, text: str) -> None:
        due = list(self._waiting)
        self._waiting.clear()
        self._finish(due, kind, text)

    def _finish(self, due: list[PendingAsk], kind: str, text: str) -> None:
        # First: a callback that chooses another source must find this peer suspected.
        guarded(None, self._identity.gossip.silent, self.peer, kind)
        self.num_failed += len(due)
        for pending in due:
            pending.finish(PeerError(f"peer {self.peer}: {text}", peer=self.peer, kind=kind))

    def _close(self, connection: ClientConnection) -> None:
        self._client.unwatch(connection)
        connection.channel.close()

    def look_after(self, now_s: float) -> None:
        """Give up attempts and requests that have taken too long."""
        if self._attempts and now_s >= self._give_up_at_s:
            self._give_up_dialling()
        elif self._untried and now_s >= self._next_at_s:
            self._dial_next(now_s)
        in_use = [self._connection] if self._connection is not None else []
        for connection in [*in_use, *self._leaving]:
            silent_s = now_s - connection.heard_s
            if connection.outstanding and silent_s > SILENCE_S:
                num_asks = len(connection.outstanding)
                fault = f"silent for {silent_s:.1f} s with {num_asks} asks outstanding"
                self._on_fault(connection, LostError(fault))
            else:
                self._give_up_stuck(connection, now_s)

    def _give_up_dialling(self) -> None:
        for connection in self._attempts:
            text = f"{connection.address}: no connection within {SILENCE_S:g} s"
            self._faults.append(("lost", text))
            self._close(connection)
        self._attempts.clear()
        self._untried.clear()
        self._fail("lost", "; ".join(text for _, text in self._faults))

    def _give_up_stuck(self, connection: ClientConnection, now_s: float) -> None:
        stuck = [
            one for one in connection.outstanding.values() if _is_stuck(one, connection, now_s)
        ]
        if stuck:  # the connection stays; an answer that comes after all is read and discarded
            text = f"{len(stuck)} asks parked and no progress for {STUCK_S:g} s"
            self._finish(stuck, "stuck", f"{connection.address}: {text}")

    def forgive(self, slept_s: float) -> None:
        """Move all deadlines by a time in which this process did not run."""
        self._give_up_at_s += slept_s
        self._next_at_s += slept_s
        for connection in self._all():
            connection.heard_s += slept_s
            for shelf, (progress_mark, moved_s) in connection.progress_marks.items():
                connection.progress_marks[shelf] = (progress_mark, moved_s + slept_s)
            for pending in connection.outstanding.values():
                if pending.parked_s is not None:
                    pending.parked_s += slept_s

    def close(self, why: str) -> None:
        """Close all connections; requests without an answer fail."""
        due = [one for each in self._all() for one in each.outstanding.values()]
        due += self._waiting
        self._waiting.clear()
        for connection in self._all():
            self._close(connection)
        self._connection = None
        self._attempts.clear()
        self._leaving.clear()
        self._untried.clear()
        for pending in due:
            pending.finish(PeerError(f"peer {self.peer}: {why}", peer=self.peer, kind="lost"))

    def close_descriptors(self) -> None:
        """Close all sockets, and send nothing; for a forked child."""
        for connection in self._all():
            connection.channel.close()


def kind_of(error: Exception, *, is_ready: bool) -> str:
    """Return the kind of a connection's failure, as `PeerError` names kinds."""
    if isinstance(error, handshake.RefusedError):
        return "refused"
    if isinstance(error, ssl.SSLError):
        return "broken" if is_ready else "refused"
    if isinstance(error, LostError | OSError):
        return "lost"
    if not isinstance(error, wire.WireError):
        _log.error("a connection to a peer failed because of a bug in Penstock", exc_info=error)
    return "broken"


def _is_stuck(pending: PendingAsk, connection: ClientConnection, now_s: float) -> bool:
    if pending.parked_s is None or pending.is_finished or pending.ask is None:
        return False
    _, moved_s = connection.progress_marks.get(pending.ask.shelf, (0, 0.0))
    return now_s - max(pending.parked_s, moved_s) > STUCK_S
