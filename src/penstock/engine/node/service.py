"""The whole service: places, data sets, runs, the listener for jobs and the server for peers.

    with Signals() as signals, NodeService(options) as service:
        service.wait(signals)       # until SIGTERM or SIGINT, then it drains

Draining: the service accepts no new jobs, finishes answers that are being sent within
`DRAIN_S_MAX`, and gives back memory that no job uses; disks stay as they are. Jobs go on with their
tiers, and other nodes read from the store what they had read from here.
"""

from __future__ import annotations

import logging
import os
import resource
import socket
import threading
import time
from functools import partial
from typing import Any, Self

from penstock.engine.node.folders import check_dataset
from penstock.engine.node.grants import DatasetKey
from penstock.engine.node.job_listener import JobConnection, JobListener
from penstock.engine.node.options import NodeOptions
from penstock.engine.node.places import TierPlace, identity_of, take_places
from penstock.engine.node.report import metrics_of, node_status
from penstock.engine.node.runs import ServedRuns
from penstock.engine.node.sets import DatasetRegistry, KnownSet
from penstock.engine.node.signals import Signals, tell_systemd
from penstock.engine.peers.addresses import addresses_here
from penstock.engine.peers.base import Address, Shelves
from penstock.engine.peers.node_messages import (
    FORMAT,
    Acknowledged,
    GossipHeard,
    KeepTiers,
    ListRuns,
    NodeAnswer,
    NodeRequest,
    OpenTiers,
    RegisterRun,
    ReportProgress,
    RunsListed,
    TiersOpened,
)
from penstock.engine.peers.server import PeerServer
from penstock.engine.peers.status import NodeStatus, as_dict
from penstock.engine.peers.tls import server_context
from penstock.engine.prometheus import text_of
from penstock.engine.web import WebPages
from penstock.errors import OptionError, PeerError
from penstock.trace import Kind, Recorder
from penstock.trace.recorder import TRACE_VARIABLE, close_recorders
from penstock.units import show_bytes

DRAIN_S_MAX = 30.0
TICK_S = 1.0

_log = logging.getLogger("penstock.engine.node")


class NodeService:
    """One node service; a context that drains it at the end."""

    def __init__(self, options: NodeOptions) -> None:
        self.options = options
        self._began_s = time.monotonic()
        self._places: list[TierPlace] = []
        self._draining = ""
        """Why the service is being stopped; empty while it is not."""
        self._draining_since_s = 0.0
        self._has_ended = threading.Event()
        self.known: list[KnownSet] = []
        """The data sets at the last `look`."""

    # -- beginning and end -----------------------------------------------------------------------

    def __enter__(self) -> Self:
        _raise_limit_of_files()
        self.listener = JobListener(self.options.socket, self._answer, self._left)
        self.listener.take()  # before anything is changed: another service may be running
        self._places = take_places(self.options.wishes)
        self.name = identity_of(self._places, self.options.socket)
        self.sets = DatasetRegistry(self._places, self.options.limits)
        self.sets.sweep()
        recorder = _recorder()
        shelves = Shelves(None if recorder is None else partial(self._served, recorder))
        self.runs = ServedRuns(shelves)
        self.server = PeerServer(
            name=self.name,
            shelves=shelves,
            secrets=self.runs.secret_of,
            bind=self.options.listen,
            gossip=self.runs.gossip_of,
            tls=server_context(),
            status=self._status,
            may_read=self.runs.may_read,
        )
        self.look()
        self.server.start()
        threading.Thread(target=self._watch, name="penstock-watch", daemon=True).start()
        self.web = self._web()
        self.listener.start()  # last, because its threads use all of the above
        tell_systemd(READY=1, STATUS=f"serving at {self.server.address}")
        return self

    def _served(
        self, recorder: Recorder, peer: str, asked_ns: int, size_bytes: int, num_ranges: int
    ) -> None:
        """Record an answer to another node."""
        if num_ranges:  # A request for nothing only checks that this node answers.
            recorder.span(
                Kind.PEER_SERVE,
                asked_ns,
                time.perf_counter_ns(),
                source_id=recorder.name(f"peer:{self.runs.node_of(peer)}"),
                size_bytes=size_bytes,
                count=num_ranges,
            )

    def _web(self) -> WebPages | None:
        if self.options.http is None:
            return None
        address = self.options.http
        try:
            web = WebPages(address, lambda: text_of(metrics_of(self)), self.health)
        except OSError as error:
            raise OptionError(
                f"no HTTP at {address}: {error.strerror}; give another address with --http, or "
                "--http none"
            ) from error
        web.start()
        return web

    def wait(self, signals: Signals) -> int:
        """Serve until a signal comes, drain, and return the exit code."""
        told = signals.wait()
        assert told is not None
        drained = threading.Thread(target=self.drain, args=(told.name,), daemon=True)
        drained.start()
        while drained.is_alive():
            if signals.wait(0.1) is not None:
                _log.warning("a second signal: ending at once")
                return 128 + told
        return 0

    def _watch(self) -> None:
        """Do what has to be done at intervals; runs in a thread of its own."""
        while not self._has_ended.wait(TICK_S):
            try:
                for key in self.runs.end_idle():
                    self.sets.end_run(key)
                self.look()
            except Exception:
                _log.exception("the data sets could not be looked after")

    def look(self) -> None:
        """Update `known`, which the status and the metrics are made from.

        They use this copy because a look waits while room is made for a job, and the threads that
        serve peers must not wait.
        """
        self.known = self.sets.known()

    def drain(self, why: str) -> None:
        """Accept no more jobs, and finish the answers that are being sent."""
        self._draining_since_s = time.monotonic()
        self._draining = why
        _log.info("%s: draining, at most %g s", why, DRAIN_S_MAX)
        tell_systemd(STOPPING=1, STATUS="draining")
        self.listener.close()
        self.server.stop(drain_s=DRAIN_S_MAX)

    def __exit__(self, *_: object) -> None:
        if not self._draining:
            self.drain("the end")
        self._has_ended.set()
        self.listener.stop()  # before the data sets, which its threads use
        self.sets.close()
        if self.web is not None:
            self.web.stop()
        for place in self._places:
            place.close()
        close_recorders()
        _log.info("stopped; %s were served", show_bytes(self.server.counts()["bytes"]))

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Where other nodes reach the server."""
        bound = self.server.address
        if bound.host not in ("", "::", "0.0.0.0"):
            return self.server.addresses
        found = addresses_here(bound.port)
        return tuple(each for each in found if bound.host != "0.0.0.0" or ":" not in each.host)

    @property
    def uptime_s(self) -> float:
        """How long the service runs."""
        return time.monotonic() - self._began_s

    # -- requests of jobs ------------------------------------------------------------------------

    def _answer(self, client: JobConnection, message: NodeRequest) -> NodeAnswer:
        if isinstance(message, ListRuns):
            return self._seen(client)
        if isinstance(message, ReportProgress):
            return GossipHeard(gossip=self.runs.progress(client.number, message))
        if self._draining:
            raise PeerError(f"the node service is being stopped ({self._draining})", kind="refused")
        owner = self.options.owner_of(client.user, client.group)
        check_dataset(message.dataset)
        if isinstance(message, OpenTiers):
            return self._opened(client, message)
        key = DatasetKey(owner.name, message.dataset)
        tiers = self.sets.keep(client.number, key)
        if isinstance(message, KeepTiers):
            return Acknowledged()
        assert isinstance(message, RegisterRun)
        uri = self.sets.uri_of(key)
        if self.runs.register(client.number, client.user, key, message, tiers, uri=uri):
            self.sets.begin_run(key)
            _log.info("serving %s to the run %s", uri or message.dataset, message.run_id.hex()[:8])
        return Acknowledged()

    def _opened(self, client: JobConnection, message: OpenTiers) -> TiersOpened:
        if message.format > FORMAT:
            raise PeerError(
                f"this node service speaks format {FORMAT}, the job {message.format}; restart it "
                "with the job's version of penstock",
                kind="refused",
            )
        owner = self.options.owner_of(client.user, client.group)
        tiers = self.sets.open(client.number, owner, message)
        granted = " + ".join(f"{show_bytes(tier.size_bytes)} {tier.kind}" for tier in tiers)
        _log.info(
            "process %d of user %d opened %s (%s): %s",
            client.pid,
            client.user,
            message.about.get("uri") or message.dataset,
            show_bytes(message.size_bytes),
            granted or "no room",
        )
        return TiersOpened(
            name=self.name,
            host=socket.gethostname(),
            tiers=tiers,
            served_at=tuple((each.host, each.port) for each in self.addresses),
        )

    def _seen(self, client: JobConnection) -> RunsListed:
        mine = os.geteuid() in (0, client.user)
        return RunsListed(
            status=self.status(lambda _, user: mine and client.user in (0, user)),
            served_at=tuple((each.host, each.port) for each in self.addresses),
            runs=self.runs.seen(client.user) if mine else (),
        )

    def _left(self, client: JobConnection) -> None:
        self.runs.leave(client.number)
        self.sets.leave(client.number)

    # -- status ----------------------------------------------------------------------------------

    def _status(self, run_id: bytes = b"") -> dict[str, Any]:
        return as_dict(self.status(lambda run, _: run == run_id))

    def status(self, may_see: Any) -> NodeStatus:
        """Return the node's status, with the runs for which `may_see(run_id, user)` is true."""
        return node_status(self, self.runs.status(may_see))

    def health(self) -> tuple[int, str]:
        """Return 200 while serving or 503 while draining, and a line of text."""
        if not self._draining:
            return 200, "ok"
        since_s = time.monotonic() - self._draining_since_s
        parked = self.server.counts()["connections"]
        return 503, f"draining: {self._draining} {since_s:.0f} s ago, {parked} connections left"

    @property
    def is_draining(self) -> bool:
        """Whether the service is being stopped."""
        return bool(self._draining)


def _raise_limit_of_files() -> None:
    """Allow as many open files as possible: each tier takes five, each connection one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _recorder() -> Recorder | None:
    """Return a recorder of answers, if the environment names a trace."""
    folder = os.environ.get(TRACE_VARIABLE)
    if not folder:
        return None
    # The service must also run if the trace cannot be written.
    return Recorder(os.path.abspath(folder), role="node", must_open=False)  # noqa: PTH100
