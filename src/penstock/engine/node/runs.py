"""The runs that have data sets served here, and what their ranks tell.

A run is known by its id; its secret proves membership to the peer server. It lives as long as any
process of it is connected here, and a while longer: a rank that has died takes nothing away from
the other nodes, which may go on reading what lies here.

The service is deaf to gossip itself. What ranks of a run say here is told to the members that ask
this node, and what those say is handed to the ranks when they report next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.clock import Clock, SystemClock
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
"""A run whose last process has gone is still served so long."""
RUNS_MAX = 1024
RUNS_OF_USER_MAX = 128
MEMBERS_OF_USER_MAX = 4 * MEMBERS_MAX
"""Of all runs of a user together: they are kept in memory."""
_SHELVES_MAX = 65536


@dataclass(slots=True, kw_only=True)
class _ServedRun:
    """One run, as far as this node is concerned."""

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
    """What ranks told that are gone."""
    said: bytes = b""
    heard: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    """By node, the last it said, with the number of that saying."""
    num_heard: int = 0
    told: dict[int, int] = field(default_factory=dict)
    """Up to which saying each process knows."""
    left_at_s: float | None = None


class ServedRuns:
    """All runs of a service; used by its threads and those of the peer server."""

    def __init__(self, shelves: Shelves, clock: Clock | None = None) -> None:
        self._shelves = shelves
        self._clock = clock or SystemClock()
        self._mutex = threading.Lock()
        self._runs: dict[bytes, _ServedRun] = {}
        self._keys: dict[bytes, tuple[bytes, DatasetKey]] = {}
        """By shelf: the run, and the data set."""
        self._ever: dict[bytes, DatasetKey] = {}
        """Data sets by shelf, of runs that are over too: counters must not lose what they had."""
        self.num_registered = 0

    # -- for the peer server ---------------------------------------------------------------------

    def secret_of(self, run_id: bytes) -> bytes | None:
        """Return a run's secret; None where it is not served here."""
        run = self._runs.get(run_id)
        return None if run is None else run.secret

    def may_read(self, run_id: bytes, shelf: bytes) -> bool:
        """Return whether a shelf is one of a run's own."""
        return self._keys.get(shelf, (b"", None))[0] == run_id

    def gossip_of(self, run_id: bytes) -> Gossip:
        """Return who speaks and listens for a run's ranks here."""
        run = self._runs.get(run_id)
        return NoGossip() if run is None else _RunGossip(run, self._mutex)

    def datasets_by_shelf(self) -> dict[bytes, DatasetKey]:
        """Return which data set lies, or lay, on which shelf."""
        with self._mutex:
            return dict(self._ever)

    def node_of(self, name: str) -> int:
        """Return the number of a node in its run, by its name; -1 where no run knows it."""
        with self._mutex:
            members = (m for run in self._runs.values() for m in run.members if m.name == name)
            return next((member.node for member in members), -1)

    # -- for the ranks ---------------------------------------------------------------------------

    def register(
        self,
        client: int,
        user: int,
        key: DatasetKey,
        word: RegisterRun,
        tiers: tuple[KeptTier, ...],
        *,
        uri: str = "",
    ) -> bool:
        """Serve a data set to a run; return whether it was not served to it before."""
        with self._mutex:
            run = self._run(user, word)
            self._check_room(run, len(word.members))
            served_to, _ = self._keys.get(word.shelf, (run.run_id, key))
            if served_to != run.run_id:
                raise PeerError("another run is served under this name", kind="refused")
            self._runs[word.run_id] = run
            run.clients.add(client)
            run.left_at_s = None
            run.members = word.members or run.members
            run.dataset = run.dataset or uri or key.dataset
            _reckon(run)
            is_new = key not in run.shelves
            if is_new:
                shelf = KeptShelf(word.shelf, tiers, run.progress)
                run.shelves[key] = shelf
                self._keys[word.shelf] = (run.run_id, key)
                if len(self._ever) < _SHELVES_MAX:
                    self._ever[word.shelf] = key
                self._shelves.add(shelf)
                self.num_registered += 1
            return is_new

    def _check_room(self, run: _ServedRun, num_members: int) -> None:
        """Refuse what one user would keep too much of."""
        others = [r for r in self._runs.values() if r.user == run.user and r is not run]
        members = sum(len(other.members) for other in others) + num_members
        if len(others) >= RUNS_OF_USER_MAX or members > MEMBERS_OF_USER_MAX:
            raise PeerError(
                f"user {run.user} has {len(others)} runs with {members} members here, at most "
                f"{RUNS_OF_USER_MAX} and {MEMBERS_OF_USER_MAX} are kept; end some",
                kind="refused",
            )

    def _run(self, user: int, word: RegisterRun) -> _ServedRun:
        run = self._runs.get(word.run_id)
        if run is None:
            if len(self._runs) >= RUNS_MAX:
                raise PeerError(
                    f"{len(self._runs)} runs are served here, and no more can be", kind="refused"
                )
            return _ServedRun(
                run_id=word.run_id, secret=word.secret, user=user, progress=RunProgress()
            )
        if (run.user, run.secret) != (user, word.secret):
            raise PeerError(
                f"the run {word.run_id.hex()} is registered with another secret or by another user",
                kind="refused",
            )
        return run

    def progress(self, client: int, word: ReportProgress) -> tuple[tuple[str, bytes], ...]:
        """Take a report; return what other nodes have said that this process does not know."""
        with self._mutex:
            run = self._runs.get(word.run_id)
            if run is None or client not in run.clients:
                raise PeerError("this run was not registered on this connection", kind="refused")
            run.reports[client] = word.status
            run.said = word.said or run.said
            _reckon(run)
            known = run.told.get(client, 0)
            run.told[client] = run.num_heard
            return tuple((name, said) for name, (at, said) in run.heard.items() if at > known)

    def leave(self, client: int) -> None:
        """Forget a process; its runs live on for a while."""
        with self._mutex:
            for run in self._runs.values():
                if client not in run.clients:
                    continue
                run.clients.remove(client)
                run.told.pop(client, None)
                report = run.reports.pop(client, None)
                if report is not None:
                    run.past = _merged([run.past, report])
                _reckon(run)
                if not run.clients:
                    run.left_at_s = self._clock.now_s()

    def take_over(self, linger_s: float = LINGER_S) -> list[DatasetKey]:
        """End the runs whose time is over; return a key for each data set that each was served."""
        now_s = self._clock.now_s()
        ended: list[DatasetKey] = []
        with self._mutex:
            for run in list(self._runs.values()):
                if run.left_at_s is None or now_s < run.left_at_s + linger_s:
                    continue
                del self._runs[run.run_id]
                for key, shelf in run.shelves.items():
                    self._shelves.remove(shelf.name)
                    del self._keys[shelf.name]
                    ended.append(key)
        return ended

    # -- for those who look ----------------------------------------------------------------------

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
        """Return how the runs do that somebody may see, given a run's id and user."""
        with self._mutex:
            return tuple(
                _status(run) for run in self._runs.values() if may_see(run.run_id, run.user)
            )


class RelayedGossip:
    """The gossip of a server for several runs: called with a run, it gives that of its ranks.

    For all runs together there is nothing to say.
    """

    def __init__(self, runs: ServedRuns) -> None:
        self._runs = runs

    def __call__(self, run_id: bytes) -> Gossip:
        """Return who speaks and listens for a run."""
        return self._runs.gossip_of(run_id)

    def say(self) -> bytes:
        """Return nothing."""
        return b""

    def hear(self, peer: str, data: bytes) -> None:
        """Forget it."""

    def reached(self, peer: str) -> None:
        """Forget it."""

    def silent(self, peer: str, kind: str) -> None:
        """Forget it."""


class _RunGossip:
    """A run's gossip: said by its ranks here, heard for them."""

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
        """Nothing is asked from here."""

    def silent(self, peer: str, kind: str) -> None:
        """Nothing is asked from here."""


def _reckon(run: _ServedRun) -> None:
    """A node is as far as the slowest of its ranks, and fills while any of them does.

    Who has registered and not said anything yet is about to fill.
    """
    filling = [report for report in run.reports.values() if report.is_filling]
    run.progress.is_filling = bool(filling) or bool(run.clients - set(run.reports))
    cursors = [report.cursor for report in filling or run.reports.values()]
    run.progress.cursor = max(run.progress.cursor, min(cursors, default=0))


def _status(run: _ServedRun) -> RunStatus:
    reports = list(run.reports.values())
    return msgspec.structs.replace(
        _merged([run.past, *reports]),
        run=run.run_id.hex(),
        dataset=run.dataset,
        cursor=run.progress.cursor,
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
