"""A rank's connection to another node of a simulated cluster, with the rules of
`peers.client_link`.

A connection that owes a reply and is silent for `SILENCE_S` is given up with all its requests.
Parked requests fail when their server makes no progress for `STUCK_S`. A dead process resets its
connections at once; a dead machine does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from penstock.engine.peers.client_link import SILENCE_S, STUCK_S
from penstock.simulate.virtual import Call
from testkit.virtual_cluster.net import LATENCY_S
from testkit.virtual_cluster.node import ClusterNode, UnitReply, UnitRequest

_CHECK_S = 1.0
_EPSILON_S = 1e-6


class MembershipView(Protocol):
    """What a connection reports to: `engine.peers.members.Members`."""

    def say(self) -> bytes:
        """Return the message for other nodes."""
        ...

    def hear(self, peer: str, data: bytes, at_s: float) -> None:
        """Handle the message of another node."""
        ...

    def heard(self, peer: str, at_s: float) -> None:
        """Record that a peer has replied."""
        ...

    def silent(self, peer: str, kind: str, at_s: float) -> None:
        """Record that a peer has failed, and how."""
        ...


class ClusterLink:
    """The connection of one rank to one other node."""

    def __init__(self, node: ClusterNode, server: ClusterNode, members: MembershipView) -> None:
        self.node, self.server = node, server
        self._members = members
        self._node_life = node.life
        self.life = 0
        """Counts the times that the connection was given up."""
        self._server_life = 0
        """Life of the process at the other end."""
        self.outstanding: dict[int, UnitRequest] = {}
        self.silences_s: list[float] = []
        """Times at which requests that steps needed were given up after a silence."""
        self.served_s = -math.inf
        """When units arrived last."""
        self._heard_s = 0.0
        self._progress_mark, self._moved_s = -1, 0.0
        self._is_checking = False

    def do(self, call: Call) -> None:
        """Call a function in the process that owns this connection, if it still lives."""
        self.node.do(self._node_life, call)

    @property
    def asker_name(self) -> str:
        """The node that asks."""
        return self.node.name

    @property
    def _now_s(self) -> float:
        return self.node.time.now_s

    def ask(
        self,
        units: tuple[int, ...],
        *,
        may_wait: bool,
        parked: Call,
        answered: Callable[[UnitReply], None],
        failed: Callable[[str], None],
    ) -> None:
        """Request units; a request for none only asks whether the server is there."""
        if not self.outstanding:
            self._heard_s = self._now_s
            self._server_life = self.server.life
        asked = UnitRequest(
            link=self,
            life=self.life,
            units=units,
            may_wait=may_wait,
            gossip=self._members.say(),
            parked=parked,
            answered=answered,
            failed=failed,
        )
        self.outstanding[id(asked)] = asked
        server, server_life = self.server, self._server_life
        way = self.node.number, server.number

        def arrive() -> None:
            if server.is_up and server.life == server_life and self.life == asked.life:
                server.do(server.life, lambda: server.asked(asked))
            else:
                self.reset(asked.life)  # No process listens there, or another one than was asked.

        self.node.time.after(LATENCY_S, lambda: self.node.reachability.pass_on(*way, arrive))
        if not self._is_checking:
            self._is_checking = True
            self.node.after(_CHECK_S, self._check)

    def take(self, asked: UnitRequest, call: Call) -> None:
        """Handle a message that belongs to a request."""
        if asked.is_over:
            return
        if call is asked.parked:
            asked.parked_s = self._now_s
        else:
            asked.is_over = True
            del self.outstanding[id(asked)]
            self._members.heard(self.server.name, self._now_s)
            if asked.units:
                self.served_s = self._now_s
        call()

    def reset(self, life: int) -> None:
        """Handle a reset from the other end."""

        def fail() -> None:
            if life == self.life:
                self._fail("lost")

        self.do(fail)

    def _check(self) -> None:
        """Check every second, while a reply is owed, whether the server is silent or stuck.

        As long as the path is open and the process that was asked lives, a heartbeat has just come.
        """
        if not self.outstanding:
            self._is_checking = False
            return
        now_s, way = self._now_s, (self.node.number, self.server.number)
        wait_s = _CHECK_S
        is_same = self.server.life == self._server_life
        # The time in which the client itself was frozen is no silence of the server.
        self._heard_s = max(self._heard_s, self.node.thawed_s)
        if is_same and self.node.reachability.is_open(*way):
            self._heard_s = now_s
            self._look_for_stuck()
        else:
            if is_same:
                self._heard_s = max(self._heard_s, self.node.reachability.closed_since_s(*way))
            wait_s = self._heard_s + SILENCE_S - now_s
            if wait_s <= _EPSILON_S:
                if any(asked.units for asked in self.outstanding.values()):
                    self.silences_s.append(now_s)
                self._fail("lost")
        if self.outstanding:
            self.node.after(max(min(wait_s, _CHECK_S), _EPSILON_S), self._check)
        else:
            self._is_checking = False

    def _look_for_stuck(self) -> None:
        now_s = self._now_s
        if (progress_mark := self.server.progress_mark()) != self._progress_mark:
            self._progress_mark, self._moved_s = progress_mark, now_s
        stuck = [
            asked
            for asked in self.outstanding.values()
            if asked.parked_s is not None and now_s - max(asked.parked_s, self._moved_s) > STUCK_S
        ]
        if stuck:
            self._finish(stuck, "stuck")

    def _fail(self, kind: str) -> None:
        self.life += 1
        self._finish(list(self.outstanding.values()), kind)

    def _finish(self, due: list[UnitRequest], kind: str) -> None:
        if not due:
            return
        self._members.silent(self.server.name, kind, self._now_s)
        # All are over before the first call, which may ask on this connection again.
        for asked in due:
            asked.is_over = True
            del self.outstanding[id(asked)]
        for asked in due:
            asked.failed(kind)
