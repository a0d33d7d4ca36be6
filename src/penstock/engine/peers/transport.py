"""The seam below which bytes travel between nodes.

Everything above asks through `AskingSide` and serves through `ServingSide`; `TcpTransport` is the
one way there is. A transport over RDMA would implement the same three: `into` is memory that could
be registered, a `HeldFile` or its map what is read from, and `done` the completion. Nothing above
knows of sockets.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.engine.peers.base import Address, Answer, Ask, Gossip, Shelves
from penstock.engine.peers.client import PeerClient
from penstock.engine.peers.server import PeerServer
from penstock.errors import PeerError


class AskingSide(Protocol):
    """The side that wants bytes."""

    def ask(
        self,
        peer: str,
        addresses: Sequence[Address],
        ask: Ask,
        into: memoryview,
        *,
        parked: Callable[[], None],
        done: Callable[[Answer | PeerError], None],
    ) -> None:
        """Ask; never waits. `done` is called exactly once, `into` is the transport's till then."""
        ...

    def status(
        self, peer: str, addresses: Sequence[Address], timeout_s: float = 5.0
    ) -> dict[str, Any]:
        """Return what a peer says about itself."""
        ...

    def counts(self) -> dict[str, dict[str, float]]:
        """Return, by peer, what has come."""
        ...

    def stop(self) -> None:
        """Hang up on all."""
        ...


class ServingSide(Protocol):
    """The side that has bytes."""

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Where it can be reached, once it is started."""
        ...

    def start(self) -> None:
        """Begin."""
        ...

    def stop(self, drain_s: float = 0.0) -> None:
        """Finish what is under way and end."""
        ...

    def counts(self) -> dict[str, int]:
        """Return what has been done."""
        ...


class Transport(Protocol):
    """A way for bytes between nodes."""

    def client(self, *, name: str, run_id: bytes, secret: bytes, gossip: Gossip) -> AskingSide:
        """Return the side that asks."""
        ...

    def server(
        self,
        *,
        name: str,
        shelves: Shelves,
        secrets: Callable[[bytes], bytes | None],
        bind: Sequence[Address],
        gossip: Gossip,
        status: Callable[[bytes], dict[str, Any]] | None = None,
    ) -> ServingSide:
        """Return the side that serves; it begins with `start`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpTransport:
    """Plain TCP, or TLS where there are contexts for it."""

    server_tls: ssl.SSLContext | None = None
    client_tls: ssl.SSLContext | None = None

    def client(self, *, name: str, run_id: bytes, secret: bytes, gossip: Gossip) -> PeerClient:
        """Return the side that asks."""
        return PeerClient(
            name=name, run_id=run_id, secret=secret, gossip=gossip, tls=self.client_tls
        )

    def server(
        self,
        *,
        name: str,
        shelves: Shelves,
        secrets: Callable[[bytes], bytes | None],
        bind: Sequence[Address],
        gossip: Gossip,
        status: Callable[[bytes], dict[str, Any]] | None = None,
    ) -> PeerServer:
        """Return the side that serves."""
        return PeerServer(
            name=name,
            shelves=shelves,
            secrets=secrets,
            bind=bind,
            gossip=gossip,
            tls=self.server_tls,
            status=status,
        )
