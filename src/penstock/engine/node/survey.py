"""Finds the runs of this user and asks their nodes for their status.

Runs are listed by the node service of this host and by the files that ranks write
(`peers.run_files`). With the run's secret, all nodes are asked at the same time; a node that does
not answer is part of the result.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

import msgspec

from penstock.engine.peers.base import Address, NoGossip, unnamed
from penstock.engine.peers.client import PeerClient
from penstock.engine.peers.local import LocalNode
from penstock.engine.peers.node_messages import ListedRun, RunMember, RunsListed
from penstock.engine.peers.run_files import read_run_files, sweep_run_files
from penstock.engine.peers.status import NodeStatus, RunStatus, status_of
from penstock.engine.peers.tls import client_context
from penstock.errors import PeerError

_ANSWER_S_MAX = 3.0
_AT_ONCE_MAX = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One node of a run, with its answer."""

    member: RunMember
    status: NodeStatus | None
    run: RunStatus
    """The state of the run on this node; empty if the node did not report it."""
    error: str = ""
    """Why there is no status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTraffic:
    """The bytes that one node has received from another."""

    source: str
    """A node's name."""
    to: str
    size_bytes: int
    bytes_per_s: float = 0.0
    """Since the previous look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run at one moment."""

    run: ListedRun
    nodes: tuple[NodeView, ...]
    links: tuple[NodeTraffic, ...]
    at_s: float

    @property
    def dataset(self) -> str:
        """The URI of its data, if any node reports it."""
        told = [node.run.dataset for node in self.nodes if node.run.dataset]
        return self.run.dataset or (told[0] if told else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsFound:
    """This user's runs that can be found from this host."""

    live: list[ListedRun]
    """The newest first."""
    silent: list[ListedRun]
    """Runs of which no node answers: they have ended, or cannot be reached from here."""
    service: RunsListed | None
    """The answer of this host's node service."""


def found_here() -> RunsFound:
    """Find this user's runs; those that may have ended are asked for an answer."""
    sweep_run_files()
    seen: RunsListed | None = None
    node = LocalNode.connect()
    if node is not None:
        with node:
            seen = node.look()
    runs = dict[bytes, ListedRun]()
    is_sure = dict[bytes, bool]()
    for file in read_run_files():
        run_id = file.run.run_id
        runs.setdefault(run_id, file.run)
        is_sure[run_id] = is_sure.get(run_id, False) or bool(file.is_alive)
    if seen is not None:
        here = RunMember(name=seen.status.name, host=seen.status.host, addresses=seen.served_at)
        for run in reversed(seen.runs):
            is_sure[run.run_id] = is_sure.get(run.run_id, False) or not run.is_left
            if run.run_id not in runs:  # the file of a rank would say more
                members = run.members or (here,)
                runs[run.run_id] = msgspec.structs.replace(run, members=members)
    # The service here still answers for runs that have ended, so its answer proves nothing.
    places = set(seen.served_at) if seen is not None else set()
    unsure = [run for run_id, run in runs.items() if not is_sure[run_id]]
    with ThreadPoolExecutor(_AT_ONCE_MAX, thread_name_prefix="penstock-survey") as pool:
        answers = list(pool.map(lambda run: _is_answered(run, places), unsure))
    silent = [run for run, answered in zip(unsure, answers, strict=True) if not answered]
    over = {run.run_id for run in silent}
    live = [run for run_id, run in runs.items() if run_id not in over]
    return RunsFound(live=live, silent=silent, service=seen)


def _is_answered(run: ListedRun, but: set[tuple[str, int]]) -> bool:
    """Return whether a member of a run answers, other than at these addresses."""
    members = tuple(member for member in run.members if not but & set(member.addresses))
    with RunSurvey(msgspec.structs.replace(run, members=members)) as survey:
        return any(node.status is not None for node in survey.look().nodes)


class RunSurvey:
    """Asks the nodes of one run, repeatedly; a context."""

    def __init__(self, run: ListedRun, only: Sequence[Address] = ()) -> None:
        """Ask all members, or `only` these addresses, even if no member has them."""
        self._run = run
        self._members = _members(run, only)
        self._before: RunView | None = None
        self._pool = ThreadPoolExecutor(_AT_ONCE_MAX, thread_name_prefix="penstock-survey")
        self._client = PeerClient(
            name=f"survey-{os.getpid()}",
            run_id=run.run_id,
            secret=run.secret,
            gossip=NoGossip(),
            tls=client_context(),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.stop()
        self._pool.shutdown(cancel_futures=True)

    def look(self) -> RunView:
        """Ask all nodes; rates are since the previous look."""
        nodes = tuple(self._pool.map(self._asked, self._members))
        at_s = time.monotonic()
        view = RunView(
            run=self._run, nodes=nodes, links=_links(nodes, at_s, self._before), at_s=at_s
        )
        self._before = view
        return view

    def _asked(self, member: RunMember) -> NodeView:
        addresses = [Address(host=host, port=port) for host, port in member.addresses]
        try:
            plain = self._client.status(member.name, addresses, _ANSWER_S_MAX)
            status = status_of(plain, peer=member.host or member.name)
        except PeerError as error:
            text = str(error).removeprefix(f"peer {member.name}: ")
            return NodeView(member=member, status=None, run=RunStatus(), error=text)
        run = self._run.run_id.hex()
        mine = [each for each in status.runs if each.run in ("", run)]
        if not member.host:  # only an address was given
            member = msgspec.structs.replace(member, name=status.name, host=status.host)
        return NodeView(member=member, status=status, run=mine[0] if mine else RunStatus())


def _members(run: ListedRun, only: Sequence[Address]) -> list[RunMember]:
    if not only:
        return sorted(run.members, key=lambda member: member.node)
    by_address = {place: member for member in run.members for place in member.addresses}
    chosen = [
        by_address.get((each.host, each.port))
        or RunMember(name=unnamed(each), node=-1, addresses=((each.host, each.port),))
        for each in only
    ]
    return list({member.name: member for member in chosen}.values())


def _links(
    nodes: Sequence[NodeView], at_s: float, before: RunView | None
) -> tuple[NodeTraffic, ...]:
    known = {(link.source, link.to): link for link in before.links} if before is not None else {}
    found = []
    for node in nodes:
        for link in node.run.links:
            last = known.get((link.peer, node.member.name))
            per_s = 0.0
            if last is not None and before is not None and at_s > before.at_s:
                per_s = max(0, link.in_bytes - last.size_bytes) / (at_s - before.at_s)
            found.append(
                NodeTraffic(
                    source=link.peer,
                    to=node.member.name,
                    size_bytes=link.in_bytes,
                    bytes_per_s=per_s,
                )
            )
    return tuple(found)
