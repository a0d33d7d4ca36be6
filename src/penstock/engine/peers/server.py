"""The peer server: sends units of this node's tiers to clients that prove to be members of a run.

    server = PeerServer(name=identity, shelves=shelves, secrets=secrets.get, bind=[...])
    server.start()
    ...
    server.stop(drain_s=5)

Each loader has a server on each node, or all loaders of a host share that of `penstock node`. A
server has two threads (`server_loop`); only disk reads can block them. The
server knows no data sets: a range is a place in a tier's file (`shelf`). A client that has not
proven itself costs a descriptor and a few hundred bytes, for a few seconds at most.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from penstock.engine.peers.base import Address, Gossip, NoGossip, Shelves
from penstock.engine.peers.channel import listening_at
from penstock.engine.peers.forks import close_in_children
from penstock.engine.peers.handshake import check_name
from penstock.engine.peers.request_router import LeftoverChecker, ServerCounts, ServerState
from penstock.engine.peers.server_loop import ServerLoop
from penstock.errors import PeerError

NUM_LOOPS = 2
BACKLOG = 1024
_END_S = 10.0
"""After this time `stop` no longer waits for a thread that should have ended."""

_log = logging.getLogger("penstock.engine.peers")


class PeerServer:
    """Serves shelves to members of the runs whose secrets it knows."""

    def __init__(
        self,
        *,
        name: str,
        shelves: Shelves,
        secrets: Callable[[bytes], bytes | None],
        bind: Sequence[Address],
        gossip: Gossip | Callable[[bytes], Gossip] | None = None,
        tls: ssl.SSLContext | None = None,
        status: Callable[[bytes], dict[str, Any]] | None = None,
        may_read: Callable[[bytes, bytes], bool] | None = None,
    ) -> None:
        """Assign only; `start` opens sockets and starts threads.

        `secrets` returns the secret of a run. `may_read` says whether a run may read a shelf;
        without it every run may read every shelf. For a server of several runs, `gossip` is a
        function that returns the gossip of a run.
        """
        check_name(name)
        self.name = name
        self._bind = tuple(bind)
        self._tls = tls
        self._serving = ServerState(
            name=name,
            shelves=shelves,
            secrets=secrets,
            gossip=gossip if callable(gossip) else lambda run_id: gossip or NoGossip(),
            status=status,
            may_read=may_read,
            settler=LeftoverChecker(),
        )
        self._loops: list[ServerLoop] = []
        self.addresses: tuple[Address, ...] = ()
        """Where the server listens, once it is started."""
        self._pid = 0

    def start(self) -> None:
        """Listen and serve, until `stop`."""
        assert not self._loops, "the server has been started"
        self._pid = os.getpid()
        try:
            listeners = listening_at(self._bind, BACKLOG)
        except OSError as error:
            where = ", ".join(map(str, self._bind))
            raise PeerError(
                f"no peer server at {where}: {error.strerror or error}; name another address or "
                "interface, or port 0 for any free one",
                peer=self.name,
            ) from None
        names = [listener.getsockname() for listener in listeners]
        self.addresses = tuple(Address(host=_scoped(*name), port=name[1]) for name in names)
        turns = itertools.count()  # only the first loop accepts, so only its thread counts

        def deal(sock: socket.socket) -> None:
            self._loops[next(turns) % NUM_LOOPS].adopt(sock)

        self._loops = [ServerLoop(self._serving, self._tls, deal) for _ in range(NUM_LOOPS)]
        close_in_children(self)
        for number, loop in enumerate(self._loops):
            loop.start(listeners if number == 0 else [])

    @property
    def address(self) -> Address:
        """Return the first address where the server listens."""
        assert self.addresses, "the server has not been started"
        return self.addresses[0]

    def stop(self, drain_s: float = 0.0) -> None:
        """Stop accepting, answer outstanding requests for `drain_s` at most, close connections."""
        if self._pid != os.getpid() or not self._loops:
            return  # in a forked child, the server is the parent's
        at_s = time.monotonic() + drain_s
        for loop in self._loops:  # all of them first, so that they drain at the same time
            loop.leave(at_s)
        for loop in self._loops:
            if not loop.join(drain_s + _END_S):
                _log.warning("a loop of the peer server hangs, perhaps in a read from a disk")
        if not self._serving.settler.stop(_END_S):
            _log.warning(
                "the peer server is stopped while it checks a unit, perhaps on a slow disk"
            )

    def counts(self) -> dict[str, int]:
        """Return the counters so far, and the numbers of connections and parked requests now."""
        # Without a lock: only the loops' threads change these, and a count may be a moment old.
        total = ServerCounts()
        for loop in self._loops:
            total.add(loop.router.counts)
        return {
            **asdict(total),
            "connections": sum(loop.num_connections for loop in self._loops),
            "parked": sum(loop.num_parked for loop in self._loops),
        }

    def bytes_by_shelf(self) -> dict[bytes, int]:
        """Return how many bytes of each shelf have been served."""
        total: dict[bytes, int] = {}
        for loop in self._loops:
            for shelf, count in list(loop.router.bytes_by_shelf.items()):
                total[shelf] = total.get(shelf, 0) + count
        return total

    def close_after_fork(self) -> None:
        """Close all sockets in a forked child, or the parent's clients would wait for it."""
        for loop in self._loops:
            loop.close_descriptors()
        self._loops = []


def _scoped(host: str, _port: int, _flow: int = 0, scope: int = 0) -> str:
    """Return a host as others write it: a link-local address has its interface."""
    return f"{host.partition('%')[0]}%{socket.if_indextoname(scope)}" if scope else host
