"""The peer client: requests units from the tiers of other nodes.

    client.ask(peer, addresses, ask, into, parked=..., done=...)

One thread with a selector serves all connections of a process; it starts with the first request.
`ask` puts an action into the thread's inbox and never waits. The thread calls `done` exactly once,
with an `Answer` or a `PeerError`; until then the client owns `into`. Callers choose the peer, and
decide whether to try a peer again that was just lost.
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
from concurrent.futures import Future
from typing import Any

from penstock.engine.peers.base import Address, Answer, Ask, Gossip, NoGossip
from penstock.engine.peers.channel import watch
from penstock.engine.peers.client_connection import ClientConnection
from penstock.engine.peers.client_link import Identity, PeerLink
from penstock.engine.peers.forks import close_in_children
from penstock.engine.peers.handshake import check_name
from penstock.engine.peers.keys import RUN_BYTES, SECRET_BYTES
from penstock.engine.peers.pending import PendingAsk, Result
from penstock.engine.peers.wire import LENGTH, fault_in_ask
from penstock.errors import OptionError, PeerError

LOOK_S = 0.05
"""Time between two checks of deadlines while requests are outstanding."""
ASLEEP_S = 0.5
"""If the thread did not run for so long, it was stopped or starved: silence then proves nothing."""

_log = logging.getLogger("penstock.engine.peers")


class PeerClient:
    """Requests units from peers as a member of one run."""

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
        # Guards the start of the thread against `stop`. Requests need no lock: `_inbox` is a deque.
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._selector: selectors.BaseSelector | None = None
        self._woken, self._wake = socket.socketpair()
        self._is_asleep = False
        """Whether the thread may be blocked in `select`, so that an action must wake it."""
        self._is_busy = False
        """Whether anything is outstanding, so that deadlines have to be checked."""
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
        """Request ranges from a peer; their bytes are put into `into`, one range after another."""
        lengths: list[int] = ask.ranges[:, LENGTH].tolist()
        if fault := fault_in_ask(ask.ranges):
            raise OptionError(
                f"a peer cannot answer this request: {fault}; cut it into smaller ones"
            )
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
        """Return the status of a peer; waits for the answer."""
        assert threading.current_thread() is not self._thread, "this would wait for itself"
        future: Future[Result] = Future()
        pending = PendingAsk(
            ask=None,
            into=memoryview(b""),
            parked=lambda: None,
            done=future.set_result,
            asked_s=time.monotonic(),
        )
        self._submit(peer, addresses, pending)
        try:
            result = future.result(timeout_s)
        except TimeoutError:
            text = f"peer {peer}: no status within {timeout_s:g} s"
            raise PeerError(text, peer=peer) from None
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
        """Return, by peer, the bytes, requests and seconds of all answers so far."""
        # A copy, because the thread adds links meanwhile; a count may be a moment old.
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
        """Close all connections; requests without an answer fail."""
        if self._pid != os.getpid():
            return  # `close_after_fork` has closed what the child inherited
        with self._lock:
            self._stopped.set()
            thread = self._thread
        if thread is None:
            self._close_ends()
            return
        self._wake_up()
        if thread is not threading.current_thread():  # a callback in the thread may call this
            thread.join()

    def _call(self, action: Callable[[float], None]) -> bool:
        """Let the thread run an action soon; False if the thread has ended."""
        if self._stopped.is_set() or self._pid != os.getpid():
            return False
        if self._thread is None:
            self._start()
        self._inbox.append(action)
        # `_turn` sets the flag before it looks into the inbox, and this looks at the flag after the
        # action is in the inbox: so either the thread sees the action, or it is woken.
        if self._is_asleep:
            self._is_asleep = False
            self._wake_up()
        # If `stop` came meanwhile, the thread may have emptied its inbox for the last time.
        if self._stopped.is_set():
            with contextlib.suppress(ValueError):
                self._inbox.remove(action)
                return False
        return True

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # a full socket wakes the thread as well
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
        """Serve the sockets and the inbox once; return when deadlines were last checked."""
        assert self._selector is not None
        self._is_asleep = True  # before the look into the inbox: see `_call`
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
        """Register a connection with the selector for the events that it needs now."""
        assert self._selector is not None
        events = connection.interest()
        watch(self._selector, connection.channel, connection.events, events, (link, connection))
        connection.events = events

    def unwatch(self, connection: ClientConnection) -> None:
        """Take a connection off the selector."""
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
        """Close all sockets in a forked child, or the parent's peers would wait for it."""
        if self._selector is not None:
            # Parent and child share the epoll set: unregistering here would unregister there.
            self._selector.close()
        for link in self._links.values():
            link.close_descriptors()
        self._close_ends()
