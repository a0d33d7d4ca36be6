"""The membership of a job, shared by the threads of one process.

`peers.members` has neither clock nor lock; this class adds both. Client and server report what they
see of other nodes, and carry the gossip.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from penstock.clock import Clock, SystemClock
from penstock.engine.peers.members import Member, Members

_log = logging.getLogger("penstock.loader")


class SharedMembers:
    """One node's view of the others; safe for threads."""

    def __init__(
        self, members: Sequence[Member], me: str, *, voice: int = 0, clock: Clock | None = None
    ) -> None:
        """`voice` tells the processes of a node apart."""
        self._members = Members(members, me=me, voice=voice)
        self._clock = clock or SystemClock()
        self._lock = threading.RLock()  # Guards the members: client, server and readers share them.
        self._latest = ""
        self.names = [member.name for member in members]
        self.me = me

    # -- state -------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """A number that changes when a node is lost or comes back."""
        return self._members.version

    @property
    def lost(self) -> frozenset[str]:
        """Nodes that are lost to the whole job."""
        with self._lock:
            return self._members.lost

    @property
    def suspects(self) -> frozenset[str]:
        """Nodes that this one cannot use now."""
        with self._lock:
            return self._members.suspects

    @property
    def was_missed(self) -> bool:
        """Whether some node reports that it could not reach this one."""
        return self._members.was_missed

    @property
    def log(self) -> list[str]:
        """Losses and returns, in sentences."""
        with self._lock:
            return self._members.log

    def member(self, name: str) -> Member:
        """Return a node as it is known now."""
        with self._lock:
            return self._members.member(name)

    def usable(self) -> list[bool]:
        """Return which nodes can be asked now; this node itself cannot."""
        with self._lock:
            now_s = self._clock.now_s()
            return [n != self.me and self._members.is_usable(n, now_s) for n in self.names]

    def is_usable(self, name: str) -> bool:
        """Return whether a node can be asked now."""
        with self._lock:
            return name != self.me and self._members.is_usable(name, self._clock.now_s())

    def due(self) -> list[Member]:
        """Return the nodes that should be tried again now, outside of steps."""
        with self._lock:
            return [self._members.member(n) for n in self._members.due(self._clock.now_s())]

    # -- called by client and server: `peers.base.Gossip` ------------------------------------

    def say(self) -> bytes:
        """Return the gossip for other nodes."""
        with self._lock:
            return self._members.say()

    def hear(self, peer: str, data: bytes) -> None:
        """Take the gossip of a peer."""
        with self._lock:
            self._members.hear(peer, data, self._clock.now_s())
            self._tell()

    def reached(self, peer: str) -> None:
        """Record that a peer has answered."""
        with self._lock:
            if peer in self.names:
                self._members.heard(peer, self._clock.now_s())
                self._tell()

    def silent(self, peer: str, kind: str) -> None:
        """Record that a peer failed."""
        with self._lock:
            if peer in self.names:
                self._members.silent(peer, kind, self._clock.now_s())
                self._tell()

    def _tell(self) -> None:
        """Log what has happened since the last call."""
        fresh = []
        for sentence in reversed(self._members.log):
            if sentence is self._latest:
                break
            fresh.append(sentence)
        for sentence in reversed(fresh):
            _log.warning("%s", sentence)
            self._latest = sentence
