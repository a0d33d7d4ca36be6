"""One non-blocking connection's bytes, plain or in TLS.

Every call does what it can at once: None says that nothing can be done now, 0 that the other side
is gone. In plain TCP a file's bytes go from the page cache to the network device without a copy
(`sendfile`). Where no device reads them by itself (loopback, bridges of containers), small pages
are the slower way, and the kernel copies from a map of the file instead: measured on loopback, 0.30
against 0.45 CPU seconds per GB of both sides. In TLS the bytes have to pass through this process
and are read, not mapped: a page that was given back meanwhile must not end it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
from collections.abc import Sequence
from typing import cast

from penstock.engine.peers.base import Address, HeldFile

_CHUNK_BYTES = 256 * 2**10
"""Of a file, read at once for TLS."""
Place = tuple[str, int] | tuple[str, int, int, int]
_KEEPALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))


class Channel:
    """A connection in plain TCP."""

    has_handshake = False

    def __init__(self, sock: socket.socket, *, copies: bool = False) -> None:
        self.socket = sock
        self.copies = copies
        """Whether to have bytes of files copied by `send_many`, not sent by `send_file`."""
        self.wants_write = False
        """Whether reading has to wait until something can be written."""
        self._wakes_at = 1

    def fileno(self) -> int:
        """Return the descriptor, for selectors."""
        return self.socket.fileno()

    def handshake(self) -> bool:
        """Go on with what comes before the first byte; return whether that is done."""
        return True

    def recv_into(self, view: memoryview) -> int | None:
        """Read what there is."""
        try:
            return self.socket.recv_into(view)
        except BlockingIOError:
            return None

    def has_more(self) -> bool:
        """Return whether there are bytes that a selector does not know of."""
        return False

    def wake_at(self, num_bytes: int) -> None:
        """Let a selector wait for so many bytes before it calls a connection readable."""
        if num_bytes != self._wakes_at:
            self._wakes_at = num_bytes
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)

    def send(self, data: memoryview, *, more: bool = False) -> int | None:
        """Send what fits; `more` says that other bytes follow at once."""
        try:
            return self.socket.send(data, socket.MSG_MORE if more else 0)
        except BlockingIOError:
            return None

    def send_many(self, buffers: Sequence[memoryview]) -> int | None:
        """Send what fits of several buffers, one after another."""
        try:
            return self.socket.sendmsg(buffers)
        except BlockingIOError:
            return None

    def send_file(self, file: HeldFile, offset: int, count: int) -> int | None:
        """Send bytes of a file as far as they fit; 0: the file ends before."""
        try:
            return os.sendfile(self.socket.fileno(), file.descriptor, offset, count)
        except BlockingIOError:
            return None

    def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(OSError):
            self.socket.close()


class TlsChannel(Channel):
    """A connection in TLS."""

    has_handshake = True

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, is_server: bool) -> None:
        self._tls = context.wrap_socket(sock, server_side=is_server, do_handshake_on_connect=False)
        super().__init__(self._tls)
        self._chunk = memoryview(bytearray(0))
        self._unsent = self._chunk
        """Read from a file and not yet taken by the socket: TLS wants the same bytes again."""

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
        """Do nothing: how many bytes are to come is for TLS to know."""

    def has_more(self) -> bool:
        """Return whether bytes are decrypted but not read yet."""
        return self._tls.pending() > 0

    def send(self, data: memoryview, *, more: bool = False) -> int | None:
        """Send what fits."""
        del more
        try:
            return self._tls.send(data)
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return None

    def send_file(self, file: HeldFile, offset: int, count: int) -> int | None:
        """Send bytes of a file as far as they fit; 0: the file ends before."""
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


def tuned(sock: socket.socket) -> socket.socket:
    """Return a socket made ready for what we do with it."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return sock


def socket_address(address: Address) -> tuple[socket.AddressFamily, Place]:
    """Return how the system writes an address; no name is looked up, which could take long."""
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
                # others can, and members are told only what was bound.
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
    """Return a socket that listens; "" and "::" are every address, of both families if possible."""
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
