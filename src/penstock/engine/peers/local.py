"""A job process's connection to the node service of its host.

    node = LocalNode.connect()                           # None where no service runs
    if node is not None:
        opened = node.open(dataset=shape.name, num_units=..., size_bytes=..., wishes=wishes)
        tiers = open_tiers(opened.wishes, shape)
        node.keep(shape.name)                            # memory tiers outlive this process
        node.register(run_id=..., secret=..., dataset=shape.name)
        node.progress(run_id, status)                    # at intervals, off the step path
        node.close()                                     # or the end of the process

The service grants each data set a share of the node's tiers, keeps memory tiers after the job has
ended, and serves tiers to the other nodes of the run. The ranks open and fill the tiers themselves:
no sample passes through the service, and it needs no access to the store. If the service restarts
under a running job, `progress` connects again and repeats what this process had asked for.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Self, TypeVar

import msgspec

from penstock.engine.peers.node_messages import (
    Acknowledged,
    GossipHeard,
    KeepTiers,
    ListRuns,
    NodeMessage,
    OpenTiers,
    RegisterRun,
    ReportProgress,
    RequestRefused,
    RunMember,
    RunsListed,
    TiersOpened,
    WishedTier,
    packed,
    receive_answer,
    user_of,
)
from penstock.engine.peers.status import TEXT_CHARACTERS_MAX, RunStatus
from penstock.engine.peers.wire import SHELF_BYTES
from penstock.errors import PeerError
from penstock.storage.process_wait import ProcessWait

SYSTEM_SOCKET = "/run/penstock/node.sock"
VARIABLE = "PENSTOCK_NODE"

_CONNECT_S_MAX = 2.0
_LOOK_S = 0.05
"""Time between two checks whether the service still makes progress."""
_ANSWER_S_MAX = 60.0
"""Opening may have to remove other data sets first."""
_PROGRESS_S_MAX = 2.0
_AGAIN_AFTER_S = 5.0
"""Time between two attempts to reach a service that went away."""

_T = TypeVar("_T", bound=NodeMessage)

_log = logging.getLogger("penstock.engine.peers")


def node_sockets() -> list[str]:
    """Return the sockets where a node service may listen: the user's first, then the system's.

    `PENSTOCK_NODE` names the only one; empty or "none" means no service at all.
    """
    named = os.environ.get(VARIABLE)
    if named is not None:
        return [] if named.lower() in ("", "none") else [named]
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    own = [os.path.join(runtime, "penstock", "node.sock")] if runtime else []  # noqa: PTH118
    return [*own, SYSTEM_SOCKET]


def shelf_name(secret: bytes, dataset: str) -> bytes:
    """Return the name under which a run's data set is served.

    Its members compute the same name, and nobody else can: a service that several runs share
    serves to each run only the shelves that it can name.
    """
    return hashlib.blake2b(dataset.encode(), key=secret, digest_size=SHELF_BYTES).digest()


class LocalNode:
    """A connection to the node service of this host; any thread may use it."""

    def __init__(self, path: str, connection: socket.socket) -> None:
        self.path = path
        # Held for a whole exchange: requests and answers alternate on the one connection.
        self._mutex = threading.Lock()
        self._connection: socket.socket | None = connection
        self._again_at_s = 0.0
        self._opened: list[OpenTiers] = []
        self._kept: list[NodeMessage] = []
        """Requests to repeat after the service has restarted, like those in `_opened`."""
        _nodes.add(self)

    @classmethod
    def connect(cls, path: str | None = None) -> LocalNode | None:
        """Return a connection to the service that this process may use; None if there is none."""
        paths = node_sockets() if path is None else [path]
        for each in paths:
            connection = _connected(each)
            if connection is not None:
                return cls(each, connection)
        if paths and (path is not None or VARIABLE in os.environ):
            _log.warning(
                "no node service answers at %s; the job keeps tiers of its own and serves them "
                "itself. Start `penstock node` there, or unset %s",
                paths[0],
                VARIABLE,
            )
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the service keeps the tiers that it was told to keep."""
        with self._mutex:
            self._opened, self._kept = [], []
            self._drop()

    def open(
        self,
        *,
        dataset: str,
        num_units: int,
        size_bytes: int,
        wishes: Sequence[WishedTier] = (),
        about: Mapping[str, str] | None = None,
    ) -> TiersOpened:
        """Return which tiers to open, with `open_tiers(opened.wishes, …)`.

        Raises `PeerError`, kind "refused", if the service refuses this user or this data set; then
        the job can open tiers of its own.
        """
        message = OpenTiers(
            dataset=dataset,
            num_units=num_units,
            size_bytes=size_bytes,
            wishes=tuple(wishes),
            # For people only, so it may be cut: a mixture's URIs can exceed what the service takes.
            about={name: text[:TEXT_CHARACTERS_MAX] for name, text in (about or {}).items()},
        )
        answer = self._answer(message, TiersOpened)
        with self._mutex:
            self._opened.append(msgspec.structs.replace(message, is_again=True))
        return answer

    def keep(self, dataset: str) -> None:
        """Let the service keep tiers that this process has opened, also after it has ended."""
        self._send_and_keep(KeepTiers(dataset=dataset))

    def register(
        self,
        *,
        run_id: bytes,
        secret: bytes,
        dataset: str,
        shelf: bytes = b"",
        members: Sequence[RunMember] = (),
    ) -> None:
        """Let the service serve tiers that this process has opened to the members of a run."""
        message = RegisterRun(
            run_id=run_id,
            secret=secret,
            shelf=shelf or shelf_name(secret, dataset),
            dataset=dataset,
            members=tuple(members),
        )
        self._send_and_keep(message)

    def _send_and_keep(self, message: NodeMessage) -> None:
        self._answer(message, Acknowledged)
        with self._mutex:
            self._kept.append(message)

    def progress(
        self, run_id: bytes, status: RunStatus, said: bytes = b""
    ) -> tuple[tuple[str, bytes], ...]:
        """Report how far this process is; return the gossip that has come from other nodes.

        Never raises: without the service there is no gossip. It may then block for some seconds, so
        call it in a thread that does not deliver batches.
        """
        message = ReportProgress(run_id=run_id, status=status, said=said)
        with self._mutex:
            if self._connection is None and not self._has_reconnected():
                return ()
            with contextlib.suppress(OSError, PeerError):
                return self._exchanged(message, GossipHeard, _PROGRESS_S_MAX).gossip
            return ()

    def look(self) -> RunsListed:
        """Return the status of the service and this user's runs."""
        return self._answer(ListRuns(), RunsListed)

    # -- one request at a time ------------------------------------------------------------------

    def _answer(self, message: NodeMessage, kind: type[_T]) -> _T:
        with self._mutex:
            return self._exchanged(message, kind, _ANSWER_S_MAX)

    def _exchanged(self, message: NodeMessage, kind: type[_T], timeout_s: float) -> _T:
        """Send a message and return the answer; the caller holds the mutex."""
        if self._connection is None:
            raise PeerError(f"the node service at {self.path} has gone away", kind="lost")
        try:
            self._connection.settimeout(timeout_s)
            self._connection.sendall(packed(message))
            _wait_for_answer(self._connection, timeout_s)
            answer = receive_answer(self._connection)
        except (OSError, ValueError, PeerError) as error:
            self._drop()
            raise PeerError(
                f"the node service at {self.path} did not answer ({error})", kind="lost"
            ) from error
        if isinstance(answer, RequestRefused):
            raise PeerError(answer.message, kind="refused")
        if not isinstance(answer, kind):
            self._drop()
            raise PeerError(f"the node service at {self.path} has gone away", kind="lost")
        return answer

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _has_reconnected(self) -> bool:
        """Try to reach a service that went away, and repeat the requests that it must know."""
        if time.monotonic() < self._again_at_s or not self._opened:
            return False
        self._again_at_s = time.monotonic() + _AGAIN_AFTER_S
        self._connection = _connected(self.path)
        if self._connection is None:
            return False
        try:
            for opened in self._opened:
                self._exchanged(opened, TiersOpened, _PROGRESS_S_MAX)
            for message in self._kept:
                self._exchanged(message, Acknowledged, _PROGRESS_S_MAX)
        except PeerError as error:
            _log.warning(
                "the node service at %s is back but did not take this job: %s", self.path, error
            )
            self._drop()
            return False
        _log.info("the node service at %s is back and knows this job again", self.path)
        return True

    def _after_fork_in_child(self) -> None:
        """Close the child's copy, or the service would not notice that the parent has ended."""
        self._mutex = threading.Lock()
        self._opened, self._kept = [], []
        self._drop()


def _connected(path: str) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_CONNECT_S_MAX)
        connection.connect(path)
        _, user, _ = user_of(connection)
    except OSError:  # no service listens there, or this user may not connect
        connection.close()
        return None
    # A socket of another user could be a trap, which would learn the secrets of our runs.
    if user in (0, os.geteuid()):
        return connection
    connection.close()
    _log.warning(
        "the service at %s runs as user %d, and we are user %d: only root's or one's own is used",
        path,
        user,
        os.geteuid(),
    )
    return None


def _wait_for_answer(connection: socket.socket, timeout_s: float) -> None:
    """Wait until an answer begins to arrive; raise if the service makes no progress."""
    pid, _, _ = user_of(connection)
    patience = ProcessWait(wait_s_max=timeout_s)
    arrival = select.poll()
    arrival.register(connection, select.POLLIN)
    while not arrival.poll(_LOOK_S * 1000):
        if patience.is_over(pid):
            raise TimeoutError(f"process {pid} makes no progress; is it stopped?")


_nodes: weakref.WeakSet[LocalNode] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for node in list(_nodes):
        node._after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
