"""The peer client: asks other nodes for what lies in their tiers.

    client.ask(peer, addresses, ask, into, parked=..., done=...)

One thread with a selector carries all connections of a process; it starts with the first ask.
`ask` only puts a note into its box, so it never waits; `done` comes from the thread, exactly once,
with an `Answer` or a `PeerError`, and until then `into` belongs to the client. Whom to ask, and
whether to ask somebody who was just lost, is for others to decide.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from penstock.engine.peers.base import Address, Answer, Ask, Gossip, NoGossip
from penstock.engine.peers.client_connection import ClientConnection
from penstock.engine.peers.client_link import Identity, PeerLink
from penstock.engine.peers.forks import close_in_children
from penstock.engine.peers.handshake import check_name
from penstock.engine.peers.keys import RUN_BYTES, SECRET_BYTES
from penstock.engine.peers.pending import PendingAsk, Result
from penstock.engine.peers.wire import LENGTH, fault_in
from penstock.errors import OptionError, PeerError

LOOK_S = 0.05
"""Between two looks at what is due, while anything is."""
ASLEEP_S = 0.5
"""A thread that did not run for so long was stopped or starved: it cannot tell who was silent."""

_log = logging.getLogger("penstock.engine.peers")


class PeerClient:
    """Asks peers in the name of one run."""

    def __init__(
        self,
        *,
        name: str,
        run_id: bytes,
        secret: bytes,
        gossip: Gossip | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        check_name(name)
        assert (len(run_id), len(secret)) == (RUN_BYTES, SECRET_BYTES)
        self._identity = Identity(
            name=name, run_id=run_id, secret=secret, gossip=gossip or NoGossip(), tls=tls
        )
        self._links: dict[str, PeerLink] = {}
        self._inbox: deque[Callable[[float], None]] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._selector: selectors.BaseSelector | None = None
        self._woken, self._wake = socket.socketpair()
        self._is_asleep = False
        self._is_busy = False
        self._stopped = threading.Event()
        self._pid = os.getpid()

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
        """Ask a peer for ranges; the bytes of each lie in `into` after those of the ones before."""
        lengths: list[int] = ask.ranges[:, LENGTH].tolist()
        if fault := fault_in(ask.ranges):
            raise OptionError(f"a peer cannot be asked that: {fault}; ask in smaller parts")
        if into.nbytes < sum(lengths) or into.readonly:
            raise OptionError(f"{sum(lengths)} bytes do not fit into the {into.nbytes} given")
        pending = PendingAsk(
            ask=ask,
            into=into.cast("B"),
            parked=parked,
            done=done,
            asked_s=time.monotonic(),
            lengths=lengths,
        )
        self._submit(peer, addresses, pending)

    def status(
        self, peer: str, addresses: Sequence[Address], timeout_s: float = 5.0
    ) -> dict[str, Any]:
        """Return what a peer says about itself; waits for it."""
        assert threading.current_thread() is not self._thread, "this would wait for itself"
        results: list[Result] = []
        has_come = threading.Event()

        def done(result: Result) -> None:
            results.append(result)
            has_come.set()

        pending = PendingAsk(
            ask=None,
            into=memoryview(b""),
            parked=lambda: None,
            done=done,
            asked_s=time.monotonic(),
        )
        self._submit(peer, addresses, pending)
        if not has_come.wait(timeout_s):
            raise PeerError(f"peer {peer}: no status within {timeout_s:g} s", peer=peer)
        (result,) = results
        if isinstance(result, PeerError):
            raise result
        assert isinstance(result, dict)
        return result

    def _submit(self, peer: str, addresses: Sequence[Address], pending: PendingAsk) -> None:
        def submit(now_s: float) -> None:
            link = self._links.get(peer)
            if link is None:
                link = self._links[peer] = PeerLink(peer, self._identity, self)
            self._is_busy = True
            link.submit(pending, addresses, now_s)

        if not self._call(submit):
            text = f"peer {peer}: the client has been stopped, or was made before a fork"
            pending.finish(PeerError(text, peer=peer))

    def counts(self) -> dict[str, dict[str, float]]:
        """Return, by peer, what has come: bytes, requests, and the seconds of all answers."""
        return {
            peer: {
                "bytes": link.num_bytes,
                "requests": link.num_requests,
                "seconds": link.seconds,
                "parked": link.num_parked,
                "failed": link.num_failed,
            }
            for peer, link in list(self._links.items())
        }

    def stop(self) -> None:
        """Hang up on all; what was asked and not answered fails."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self._stopped.set()
            thread = self._thread
        if thread is None:
            self._close_ends()
            return
        self._wake_up()
        if thread is not threading.current_thread():
            thread.join()

    def _call(self, action: Callable[[float], None]) -> bool:
        """Let the thread do something soon; False where there is none any more."""
        if self._stopped.is_set() or self._pid != os.getpid():
            return False
        if self._thread is None:
            self._start()
        self._inbox.append(action)
        if self._is_asleep:
            self._is_asleep = False
            self._wake_up()
        # Stopped in between, the thread may have looked into its box for the last time.
        if self._stopped.is_set():
            with contextlib.suppress(ValueError):
                self._inbox.remove(action)
                return False
        return True

    def _wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake.send(b"!")

    def _start(self) -> None:
        with self._lock:
            if self._thread is not None or self._stopped.is_set():
                return
            for end in (self._woken, self._wake):
                end.setblocking(False)
            self._selector = selectors.DefaultSelector()
            self._selector.register(self._woken, selectors.EVENT_READ)
            close_in_children(self)
            self._thread = threading.Thread(target=self._run, name="penstock-ask", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            looked_s = time.monotonic()
            while not self._stopped.is_set():
                looked_s = self._turn(looked_s)
        except Exception:
            _log.exception("the peer client failed; all is read from the store from now on")
            self._stopped.set()
        finally:
            self._end()

    def _turn(self, looked_s: float) -> float:
        """Do what can be done; return when what is due was last looked at."""
        assert self._selector is not None
        self._is_asleep = True
        timeout_s = 0.0 if self._inbox else LOOK_S if self._is_busy else None
        events = self._selector.select(timeout_s)
        self._is_asleep = False
        now_s = time.monotonic()
        for key, _ in events:
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
            else:
                link, connection = key.data
                link.on_event(connection, now_s)
        while self._inbox:
            self._inbox.popleft()(now_s)
        if now_s - looked_s < LOOK_S:
            return looked_s
        self._look_after(now_s, now_s - looked_s if timeout_s is not None else 0.0)
        return time.monotonic()

    def _look_after(self, now_s: float, slept_s: float) -> None:
        links = list(self._links.values())
        for link in links:
            if slept_s > ASLEEP_S:
                link.forgive(slept_s)
            link.look_after(now_s)
        self._is_busy = any(link.is_busy for link in links)

    def watch(self, connection: ClientConnection, link: PeerLink) -> None:
        """Wait for what a connection wants to wait for."""
        assert self._selector is not None
        events = connection.interest()
        if events == connection.events:
            return
        if connection.events:
            self._selector.modify(connection.channel, events, (link, connection))
        else:
            self._selector.register(connection.channel, events, (link, connection))
        connection.events = events

    def unwatch(self, connection: ClientConnection) -> None:
        """Wait no more."""
        if connection.events:
            assert self._selector is not None
            self._selector.unregister(connection.channel)
            connection.events = 0

    def _end(self) -> None:
        while self._inbox:
            with contextlib.suppress(Exception):
                self._inbox.popleft()(time.monotonic())
        for link in self._links.values():
            link.close("the client has been stopped")
        if self._selector is not None:
            self._selector.close()
        self._close_ends()

    def _close_ends(self) -> None:
        self._woken.close()
        self._wake.close()

    def close_after_fork(self) -> None:
        """Let go of everything in a forked child: the parent's peers must not wait for it."""
        if self._selector is not None:
            self._selector.close()  # the parent has it too, so nothing may be taken off it
        for link in self._links.values():
            link.close_descriptors()
        self._close_ends()
