"""The runs that the service serves, and the reports of their ranks on this node.

A run is identified by its id; clients prove membership to the peer server with its secret. A run is
served while any of its processes is connected here, and for `LINGER_S` more: if a rank has died,
other nodes can still read what its node holds.

The service relays gossip and does not interpret it. The gossip of a run's ranks goes to the members
that read from this node, and the gossip of those members goes to the ranks at their next report.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.engine.node.grants import DatasetKey
from penstock.engine.node.kept import KeptShelf, KeptTier, RunProgress
from penstock.engine.peers.base import Gossip, NoGossip, Shelves
from penstock.engine.peers.node_messages import (
    MEMBERS_MAX,
    ListedRun,
    RegisterRun,
    ReportProgress,
    RunMember,
)
from penstock.engine.peers.status import SENTENCES_MAX, LinkStatus, ReadCounts, RunStatus
from penstock.errors import PeerError

LINGER_S = 60.0
"""How long a run is served after its last process has disconnected."""
RUNS_MAX = 1024
RUNS_OF_USER_MAX = 128
MEMBERS_OF_USER_MAX = 4 * MEMBERS_MAX
"""Members in all runs of a user together; they are kept in memory."""
_SHELVES_MAX = 65536


@dataclass(slots=True, kw_only=True)
class _ServedRun:
    """What the service knows of one run."""

    run_id: bytes
    secret: bytes
    user: int
    progress: RunProgress
    members: tuple[RunMember, ...] = ()
    dataset: str = ""
    shelves: dict[DatasetKey, KeptShelf] = field(default_factory=dict)
    clients: set[int] = field(default_factory=set)
    reports: dict[int, RunStatus] = field(default_factory=dict)
    past: RunStatus = field(default_factory=RunStatus)
    """The merged reports of ranks that have disconnected."""
    said: bytes = b""
    heard: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    """By node: its latest gossip, and the number of that message."""
    num_heard: int = 0
    told: dict[int, int] = field(default_factory=dict)
    """By process: the number of the last message that it was given."""
    left_at_s: float | None = None


class ServedRuns:
    """All runs of a service; used by its threads and those of the peer server."""

    def __init__(self, shelves: Shelves) -> None:
        self._shelves = shelves
        # Guards all runs. The peer server looks up secrets and shelves without it: each is one read
        # of a mapping, and a server loop must not wait for a registration.
        self._mutex = threading.Lock()
        self._runs: dict[bytes, _ServedRun] = {}
        self._keys: dict[bytes, tuple[bytes, DatasetKey]] = {}
        """By shelf: the run, and the data set."""
        self._ever: dict[bytes, DatasetKey] = {}
        """Data sets by shelf, also of runs that have ended: their bytes stay in the counters."""
        self.num_registered = 0

    # -- for the peer server ---------------------------------------------------------------------

    def secret_of(self, run_id: bytes) -> bytes | None:
        """Return a run's secret; None if the run is not served here."""
        run = self._runs.get(run_id)
        return None if run is None else run.secret

    def may_read(self, run_id: bytes, shelf: bytes) -> bool:
        """Return whether a shelf is one of a run's own."""
        return self._keys.get(shelf, (b"", None))[0] == run_id

    def gossip_of(self, run_id: bytes) -> Gossip:
        """Return the gossip of a run, relayed from and to its ranks here."""
        run = self._runs.get(run_id)
        return NoGossip() if run is None else _RunGossip(run, self._mutex)

    def datasets_by_shelf(self) -> dict[bytes, DatasetKey]:
        """Return the data set of each shelf, present and past."""
        with self._mutex:
            return dict(self._ever)

    def node_of(self, name: str) -> int:
        """Return the number of a node in its run, by its name; -1 if no run has that name."""
        with self._mutex:
            members = (m for run in self._runs.values() for m in run.members if m.name == name)
            return next((member.node for member in members), -1)

    # -- for the ranks ---------------------------------------------------------------------------

    def register(
        self,
        client: int,
        user: int,
        key: DatasetKey,
        message: RegisterRun,
        tiers: tuple[KeptTier, ...],
        *,
        uri: str = "",
    ) -> bool:
        """Serve a data set to a run; return whether that is new."""
        with self._mutex:
            run = self._run(user, message)
            self._check_room(run, len(message.members))
            served_to, _ = self._keys.get(message.shelf, (run.run_id, key))
            if served_to != run.run_id:
                raise PeerError("another run is served under this name", kind="refused")
            self._runs[message.run_id] = run
            run.clients.add(client)
            run.left_at_s = None
            run.members = message.members or run.members
            run.dataset = run.dataset or uri or key.dataset
            _update_progress(run)
            is_new = key not in run.shelves
            if is_new:
                shelf = KeptShelf(message.shelf, tiers, run.progress)
                run.shelves[key] = shelf
                self._keys[message.shelf] = (run.run_id, key)
                if len(self._ever) < _SHELVES_MAX:
                    self._ever[message.shelf] = key
                self._shelves.add(shelf)
                self.num_registered += 1
            return is_new

    def _check_room(self, run: _ServedRun, num_members: int) -> None:
        """Refuse a run if its user has too many runs or members here."""
        others = [r for r in self._runs.values() if r.user == run.user and r is not run]
        members = sum(len(other.members) for other in others) + num_members
        if len(others) >= RUNS_OF_USER_MAX or members > MEMBERS_OF_USER_MAX:
            raise PeerError(
                f"user {run.user} has {len(others)} runs with {members} members here, at most "
                f"{RUNS_OF_USER_MAX} and {MEMBERS_OF_USER_MAX} are kept; end some",
                kind="refused",
            )

    def _run(self, user: int, message: RegisterRun) -> _ServedRun:
        run = self._runs.get(message.run_id)
        if run is None:
            if len(self._runs) >= RUNS_MAX:
                raise PeerError(
                    f"{len(self._runs)} runs are served here, and no more can be", kind="refused"
                )
            return _ServedRun(
                run_id=message.run_id, secret=message.secret, user=user, progress=RunProgress()
            )
        if (run.user, run.secret) != (user, message.secret):
            raise PeerError(
                f"the run {message.run_id.hex()} is registered with another secret or by another "
                "user",
                kind="refused",
            )
        return run

    def progress(self, client: int, message: ReportProgress) -> tuple[tuple[str, bytes], ...]:
        """Take a report; return the gossip of other nodes that this process has not seen."""
        with self._mutex:
            run = self._runs.get(message.run_id)
            if run is None or client not in run.clients:
                raise PeerError("this run was not registered on this connection", kind="refused")
            run.reports[client] = message.status
            run.said = message.said or run.said
            _update_progress(run)
            known = run.told.get(client, 0)
            run.told[client] = run.num_heard
            return tuple((name, said) for name, (at, said) in run.heard.items() if at > known)

    def leave(self, client: int) -> None:
        """Forget a process; its runs are served for a while longer."""
        with self._mutex:
            for run in self._runs.values():
                if client not in run.clients:
                    continue
                run.clients.remove(client)
                run.told.pop(client, None)
                report = run.reports.pop(client, None)
                if report is not None:
                    run.past = _merged([run.past, report])
                _update_progress(run)
                if not run.clients:
                    run.left_at_s = time.monotonic()

    def end_idle(self) -> list[DatasetKey]:
        """End the runs without a process for `LINGER_S`; return the keys of their shelves."""
        now_s = time.monotonic()
        ended: list[DatasetKey] = []
        with self._mutex:
            for run in list(self._runs.values()):
                if run.left_at_s is None or now_s < run.left_at_s + LINGER_S:
                    continue
                del self._runs[run.run_id]
                for key, shelf in run.shelves.items():
                    self._shelves.remove(shelf.name)
                    del self._keys[shelf.name]
                    ended.append(key)
        return ended

    # -- for reports -----------------------------------------------------------------------------

    @property
    def num_runs(self) -> int:
        """How many runs are served."""
        return len(self._runs)

    def seen(self, user: int) -> tuple[ListedRun, ...]:
        """Return the runs of a user, secrets included; root sees all."""
        with self._mutex:
            return tuple(
                ListedRun(
                    run_id=run.run_id,
                    secret=run.secret,
                    members=run.members,
                    dataset=run.dataset,
                    is_left=not run.clients,
                )
                for run in self._runs.values()
                if user in (0, run.user)
            )

    def status(self, may_see: Callable[[bytes, int], bool]) -> tuple[RunStatus, ...]:
        """Return the states of the runs for which `may_see(run_id, user)` is true."""
        with self._mutex:
            return tuple(
                _status(run) for run in self._runs.values() if may_see(run.run_id, run.user)
            )


class _RunGossip:
    """Relays the gossip of a run from and to its ranks on this node."""

    def __init__(self, run: _ServedRun, mutex: threading.Lock) -> None:
        self._run = run
        self._mutex = mutex

    def say(self) -> bytes:
        return self._run.said

    def hear(self, peer: str, data: bytes) -> None:
        run = self._run
        with self._mutex:
            known = run.heard.get(peer)
            if (known is None and len(run.heard) >= MEMBERS_MAX) or (known and known[1] == data):
                return
            run.num_heard += 1
            run.heard[peer] = (run.num_heard, data)

    def reached(self, peer: str) -> None:
        """Do nothing: the service reads from no peer."""

    def silent(self, peer: str, kind: str) -> None:
        """Do nothing: the service reads from no peer."""


def _update_progress(run: _ServedRun) -> None:
    """Compute a node's progress: it is as far as its slowest rank, and fills while any rank does.

    A process that has registered and not reported yet is about to fill.
    """
    filling = [report for report in run.reports.values() if report.is_filling]
    run.progress.is_filling = bool(filling) or bool(run.clients - set(run.reports))
    marks = [report.cursor for report in filling or run.reports.values()]
    run.progress.progress_mark = max(run.progress.progress_mark, min(marks, default=0))


def _status(run: _ServedRun) -> RunStatus:
    reports = list(run.reports.values())
    return msgspec.structs.replace(
        _merged([run.past, *reports]),
        run=run.run_id.hex(),
        dataset=run.dataset,
        cursor=run.progress.progress_mark,
        is_filling=run.progress.is_filling,
        suspects=_union(report.suspects for report in reports),
    )


def _merged(reports: Sequence[RunStatus]) -> RunStatus:
    return RunStatus(
        reads=sum((report.reads for report in reports), ReadCounts()),
        links=_links(link for report in reports for link in report.links),
        lost=_union(report.lost for report in reports),
        log=_union(report.log for report in reports)[-SENTENCES_MAX:],
    )


def _links(links: Iterable[LinkStatus]) -> tuple[LinkStatus, ...]:
    total: dict[str, LinkStatus] = {}
    for link in links:
        before = total.get(link.peer, LinkStatus(peer=link.peer))
        total[link.peer] = msgspec.structs.replace(
            before,
            in_bytes=before.in_bytes + link.in_bytes,
            requests=before.requests + link.requests,
        )
    return tuple(total.values())


def _union(names: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for each in names for name in each))
