"""A non-blocking connection, plain or with TLS.

Each call does what is possible without waiting: it returns None if nothing is possible now, and 0
if the other side has closed the connection. With plain TCP, `sendfile` moves a file's bytes from
the page cache to the network device without a copy. Without such a device (loopback, container
bridges) this is slower than a copy from a map of the file: 0.45 against 0.30 CPU seconds per GB on
loopback, both sides together. With TLS the bytes pass through this process. They are read, not
mapped, because a truncated map would end the process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import ssl
from collections.abc import Sequence
from typing import cast

from penstock.engine.peers.base import Address, HeldFile

_CHUNK_BYTES = 256 * 2**10
"""Read from a file at once for TLS."""
Place = tuple[str, int] | tuple[str, int, int, int]
_KEEPALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))


class Channel:
    """A connection in plain TCP."""

    has_handshake = False

    def __init__(self, sock: socket.socket, *, copies: bool = False) -> None:
        self.socket = sock
        self.copies = copies
        """Whether to copy bytes of files (`send_many`) instead of using `send_file`."""
        self.wants_write = False
        """Whether TLS has to write before it can read on."""
        self._wakes_at = 1

    def fileno(self) -> int:
        """Return the descriptor, for selectors."""
        return self.socket.fileno()

    def handshake(self) -> bool:
        """Go on with the TLS handshake; return whether it is done."""
        return True

    def recv_into(self, view: memoryview) -> int | None:
        """Read the bytes that are there."""
        try:
            return self.socket.recv_into(view)
        except BlockingIOError:
            return None

    def has_more(self) -> bool:
        """Return whether there are bytes that a selector does not see."""
        return False

    def wake_at(self, num_bytes: int) -> None:
        """Let the selector report the connection readable only once so many bytes are there."""
        if num_bytes != self._wakes_at:
            self._wakes_at = num_bytes
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)

    def send(self, data: memoryview, *, more: bool = False) -> int | None:
        """Send as much as fits; `more` says that other bytes follow at once."""
        try:
            return self.socket.send(data, socket.MSG_MORE if more else 0)
        except BlockingIOError:
            return None

    def send_many(self, buffers: Sequence[memoryview]) -> int | None:
        """Send as much as fits of several buffers, in their order."""
        try:
            return self.socket.sendmsg(buffers)
        except BlockingIOError:
            return None

    def send_file(self, file: HeldFile, offset: int, count: int) -> int | None:
        """Send as many bytes of a file as fit; 0: the file ends before."""
        try:
            return os.sendfile(self.socket.fileno(), file.descriptor, offset, count)
        except BlockingIOError:
            return None

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError):
            self.socket.close()


class TlsChannel(Channel):
    """A connection with TLS."""

    has_handshake = True

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, is_server: bool) -> None:
        self._tls = context.wrap_socket(sock, server_side=is_server, do_handshake_on_connect=False)
        super().__init__(self._tls)
        self._chunk = memoryview(bytearray(0))
        self._unsent = self._chunk
        """Read from a file and not sent yet: after a partial send TLS needs the same bytes."""

    def handshake(self) -> bool:
        """Go on with the handshake."""
        self.wants_write = False
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLWantWriteError:
            self.wants_write = True
            return False
        return True

    def recv_into(self, view: memoryview) -> int | None:
        """Read what there is."""
        self.wants_write = False
        try:
            return self._tls.recv_into(view)
        except ssl.SSLWantReadError:
            return None
        except ssl.SSLWantWriteError:
            self.wants_write = True
            return None
        except ssl.SSLEOFError:
            return 0

    def wake_at(self, num_bytes: int) -> None:
        """Do nothing: the number of bytes on the wire is not that of the payload."""

    def has_more(self) -> bool:
        """Return whether bytes are decrypted but not read yet."""
        return self._tls.pending() > 0

    def send(self, data: memoryview, *, more: bool = False) -> int | None:
        """Send as much as fits."""
        del more
        try:
            return self._tls.send(data)
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return None

    def send_file(self, file: HeldFile, offset: int, count: int) -> int | None:
        """Send as many bytes of a file as fit; 0: the file ends before."""
        if not self._unsent:
            if not self._chunk:
                self._chunk = memoryview(bytearray(_CHUNK_BYTES))
            size = os.preadv(file.descriptor, [self._chunk[: min(count, _CHUNK_BYTES)]], offset)
            if size == 0:
                return 0
            self._unsent = self._chunk[:size]
        sent = self.send(self._unsent)
        if sent is not None:
            self._unsent = self._unsent[sent:]
        return sent


def watch(
    selector: selectors.BaseSelector, channel: Channel, before: int, events: int, data: object
) -> None:
    """Change the events that a channel is registered for; 0 events: not registered."""
    if not events:
        selector.unregister(channel)
    elif not before:
        selector.register(channel, events, data)
    elif events != before:
        selector.modify(channel, events, data)


def tuned(sock: socket.socket) -> socket.socket:
    """Make a socket non-blocking and set its options; return it."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return sock


def socket_address(address: Address) -> tuple[socket.AddressFamily, Place]:
    """Return an address as the system writes it; there is no name lookup, which could block."""
    flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=flags)
    family, _, _, _, place = found[0]
    return family, cast(Place, place)


PORT_TRIES_MAX = 16
"""A port that is free at one address may be taken at the next; then another port is tried."""


def listening_at(addresses: Sequence[Address], backlog: int) -> list[socket.socket]:
    """Return a listening socket for each address; where port 0 is asked for, all share one port."""
    for _ in range(PORT_TRIES_MAX - 1):
        try:
            return _listening_on_one_port(addresses, backlog)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or addresses[0].port:
                raise
    return _listening_on_one_port(addresses, backlog)


def _listening_on_one_port(addresses: Sequence[Address], backlog: int) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    try:
        for address in addresses:
            port = address.port or (sockets[0].getsockname()[1] if sockets else 0)
            try:
                sockets.append(listening(Address(host=address.host, port=port), backlog))
            except OSError as error:
                # An IPv6 address cannot be bound in the first second after it was configured. The
                # other addresses serve without it: members learn only the bound ones.
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
                missing = error
        if missing is not None and not sockets:
            raise missing
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def listening(address: Address, backlog: int) -> socket.socket:
    """Return a listening socket; "" and "::" mean every address, of both families if possible."""
    if address.host not in ("", "::"):
        family, place = socket_address(address)
        return _listening(family, place, backlog)
    try:
        return _listening(socket.AF_INET6, ("::", address.port), backlog)
    except OSError:
        return _listening(socket.AF_INET, ("0.0.0.0", address.port), backlog)


def _listening(family: socket.AddressFamily, place: Place, backlog: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            is_all = place[0] == "::"
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if is_all else 1)
        sock.bind(place)
        sock.listen(backlog)
    except BaseException:
        sock.close()
        raise
    return sock
