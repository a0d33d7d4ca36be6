"""The node service on this host, as a job's process sees it.

    node = LocalNode.connect()                           # None where no service runs
    if node is not None:
        opened = node.open(dataset=shape.name, num_units=..., size_bytes=..., wishes=wishes)
        tiers = open_tiers(opened.wishes, shape)
        node.keep(shape.name)                            # memory tiers outlive this process
        node.register(run_id=..., secret=..., dataset=shape.name)
        node.progress(run_id, status)                    # now and then, off the step path
        node.close()                                     # or the end of the process

The service decides how much of which tier a data set gets, keeps memory tiers when the job is
over, and serves them to the other nodes of the run. The ranks open and fill the tiers themselves:
no sample passes through the service, and it needs no access to the store. It may be started anew
under a running job: `progress` finds that out, and asks for all of it again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import select
import socket
import threading
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from penstock.clock import Clock, SystemClock
from penstock.engine.peers.base import SHELF_BYTES
from penstock.engine.peers.node_messages import (
    Acknowledged,
    GossipHeard,
    KeepTiers,
    ListedRun,
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
    receive_answered,
    user_of,
)
from penstock.engine.peers.run_files import (
    RunFile,
    read_run_files,
    remove_run_file,
    sweep_run_files,
    write_run_file,
)
from penstock.engine.peers.status import TEXT_CHARACTERS_MAX, RunStatus
from penstock.errors import PeerError
from penstock.storage.process_wait import ProcessWait

__all__ = [
    "LocalNode",
    "TiersOpened",
    "RunFile",
    "RunMember",
    "RunsListed",
    "ListedRun",
    "WishedTier",
    "node_sockets",
    "read_run_files",
    "remove_run_file",
    "shelf_name",
    "sweep_run_files",
    "write_run_file",
]

SYSTEM_SOCKET = "/run/penstock/node.sock"
VARIABLE = "PENSTOCK_NODE"

_CONNECT_S_MAX = 2.0
_LOOK_S = 0.05
"""Between two looks whether the service gets on."""
_ANSWER_S_MAX = 60.0
"""Opening may have to remove other data sets first."""
_PROGRESS_S_MAX = 2.0
_AGAIN_AFTER_S = 5.0
"""Between two looks whether a service that went away is back."""

_T = TypeVar("_T", bound=NodeMessage)

_log = logging.getLogger("penstock.engine.peers")


def node_sockets() -> list[str]:
    """Return where a node service may listen: the user's own first, then the system's.

    `PENSTOCK_NODE` names the only one; empty or "none" stands for no service at all.
    """
    named = os.environ.get(VARIABLE)
    if named is not None:
        return [] if named.lower() in ("", "none") else [named]
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    own = [os.path.join(runtime, "penstock", "node.sock")] if runtime else []  # noqa: PTH118
    return [*own, SYSTEM_SOCKET]


def shelf_name(secret: bytes, dataset: str) -> bytes:
    """Return the name under which a run's data set is served.

    All members compute the same, and nobody else can: a service shared by several runs serves to
    each no more than it can name.
    """
    return hashlib.blake2b(dataset.encode(), key=secret, digest_size=SHELF_BYTES).digest()


class LocalNode:
    """A connection to the node service of this host; used by any thread."""

    def __init__(self, path: str, connection: socket.socket, clock: Clock | None = None) -> None:
        self.path = path
        self._clock = clock or SystemClock()
        self._mutex = threading.Lock()
        self._connection: socket.socket | None = connection
        self._again_at_s = 0.0
        self._opened: list[OpenTiers] = []
        self._kept: list[NodeMessage] = []
        """What is said again to a service that was started anew."""
        _nodes.add(self)

    @classmethod
    def connect(cls, path: str | None = None) -> LocalNode | None:
        """Return the service that this process may use; None where there is none."""
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End what was asked for here; tiers that are kept stay."""
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

        Raises `PeerError`, kind "refused", where the service will not have this user or this
        data set; then the job is better off with tiers of its own.
        """
        word = OpenTiers(
            dataset=dataset,
            num_units=num_units,
            size_bytes=size_bytes,
            wishes=tuple(wishes),
            # Only for people; the URIs of a large mixture may be longer than the service takes.
            about={name: text[:TEXT_CHARACTERS_MAX] for name, text in (about or {}).items()},
        )
        answer = self._answer(word, TiersOpened)
        with self._mutex:
            self._opened.append(msgspec.structs.replace(word, is_again=True))
        return answer

    def keep(self, dataset: str) -> None:
        """Let the service keep tiers that are open by now, also when this process is gone."""
        self._kept_word(KeepTiers(dataset=dataset))

    def register(
        self,
        *,
        run_id: bytes,
        secret: bytes,
        dataset: str,
        shelf: bytes = b"",
        members: Sequence[RunMember] = (),
    ) -> None:
        """Let the service serve tiers that are open by now to the members of a run."""
        word = RegisterRun(
            run_id=run_id,
            secret=secret,
            shelf=shelf or shelf_name(secret, dataset),
            dataset=dataset,
            members=tuple(members),
        )
        self._kept_word(word)

    def _kept_word(self, word: NodeMessage) -> None:
        self._answer(word, Acknowledged)
        with self._mutex:
            self._kept.append(word)

    def progress(
        self, run_id: bytes, status: RunStatus, said: bytes = b""
    ) -> tuple[tuple[str, bytes], ...]:
        """Tell how far this process is, and hear what other nodes have said meanwhile.

        Never raises: while the service is away there is nothing to hear. It may wait for some
        seconds then, so it belongs into a thread that does not deliver batches.
        """
        word = ReportProgress(run_id=run_id, status=status, said=said)
        with self._mutex:
            if self._connection is None and not self._is_back():
                return ()
            with contextlib.suppress(OSError, PeerError):
                return self._exchanged(word, GossipHeard, _PROGRESS_S_MAX).gossip
            return ()

    def look(self) -> RunsListed:
        """Return what the service tells of itself and of this user's runs."""
        return self._answer(ListRuns(), RunsListed)

    # -- one question at a time -----------------------------------------------------------------

    def _answer(self, word: NodeMessage, kind: type[_T]) -> _T:
        with self._mutex:
            return self._exchanged(word, kind, _ANSWER_S_MAX)

    def _exchanged(self, word: NodeMessage, kind: type[_T], timeout_s: float) -> _T:
        """Say a word and return its answer; whoever calls holds the mutex."""
        if self._connection is None:
            raise PeerError(f"the node service at {self.path} has gone away", kind="lost")
        try:
            self._connection.settimeout(timeout_s)
            self._connection.sendall(packed(word))
            _wait_for_answer(self._connection, timeout_s)
            answer = receive_answered(self._connection)
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

    def _is_back(self) -> bool:
        """Try to reach a service that went away, and say again what it has to know."""
        if self._clock.now_s() < self._again_at_s or not self._opened:
            return False
        self._again_at_s = self._clock.now_s() + _AGAIN_AFTER_S
        self._connection = _connected(self.path)
        if self._connection is None:
            return False
        try:
            for opened in self._opened:
                self._exchanged(opened, TiersOpened, _PROGRESS_S_MAX)
            for word in self._kept:
                self._exchanged(word, Acknowledged, _PROGRESS_S_MAX)
        except PeerError as error:
            _log.warning("the node service at %s is back but does not help: %s", self.path, error)
            self._drop()
            return False
        _log.info("the node service at %s is back and knows this job again", self.path)
        return True

    def _after_fork_in_child(self) -> None:
        """Leave the connection to the parent: its end must be seen when the parent ends."""
        self._mutex = threading.Lock()
        self._opened, self._kept = [], []
        self._drop()


def _connected(path: str) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_CONNECT_S_MAX)
        connection.connect(path)
        _, user, _ = user_of(connection)
    except OSError:  # nobody there, or not for us
        connection.close()
        return None
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
    """Wait until an answer begins to come; raise where the service does not get on with it."""
    pid, _, _ = user_of(connection)
    patience = ProcessWait(wait_s_max=timeout_s)
    arrival = select.poll()
    arrival.register(connection, select.POLLIN)
    while not arrival.poll(_LOOK_S * 1000):
        if patience.is_over(pid):
            raise TimeoutError(f"process {pid} does not get on; is it stopped?")


_nodes: weakref.WeakSet[LocalNode] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for node in list(_nodes):
        node._after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
