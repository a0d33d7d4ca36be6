"""The membership of a job, as the threads of one process share it.

`peers.members` knows neither clock nor lock; here it gets both. Client and server tell it what they
see, and carry what it has to say.
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
        self._lock = threading.RLock()
        self._latest = ""
        self.names = [member.name for member in members]
        self.me = me

    # -- what is known -----------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Changes when somebody was lost or came back."""
        return self._members.version

    @property
    def lost(self) -> frozenset[str]:
        """Nodes that the whole job goes on without."""
        with self._lock:
            return self._members.lost

    @property
    def suspects(self) -> frozenset[str]:
        """Nodes that this one cannot use now."""
        with self._lock:
            return self._members.suspects

    @property
    def was_missed(self) -> bool:
        """Whether some node has said that it could not reach this one."""
        return self._members.was_missed

    @property
    def log(self) -> list[str]:
        """What happened, in sentences."""
        with self._lock:
            return self._members.log

    def member(self, name: str) -> Member:
        """Return what is known of a node."""
        with self._lock:
            return self._members.member(name)

    def usable(self) -> list[bool]:
        """Return which nodes can be asked now; oneself cannot."""
        with self._lock:
            now_s = self._clock.now_s()
            return [n != self.me and self._members.is_usable(n, now_s) for n in self.names]

    def is_usable(self, name: str) -> bool:
        """Return whether a node can be asked now."""
        with self._lock:
            return name != self.me and self._members.is_usable(name, self._clock.now_s())

    def due(self) -> list[Member]:
        """Return the nodes that should be tried again, beside the steps."""
        with self._lock:
            return [self._members.member(n) for n in self._members.due(self._clock.now_s())]

    # -- what client and server tell: `peers.base.Gossip` ------------------------------------

    def say(self) -> bytes:
        """Return what others should know."""
        with self._lock:
            return self._members.say()

    def hear(self, peer: str, data: bytes) -> None:
        """Take what a peer tells."""
        with self._lock:
            self._members.hear(peer, data, self._clock.now_s())
            self._tell()

    def reached(self, peer: str) -> None:
        """Be told that a peer has answered."""
        with self._lock:
            if peer in self.names:
                self._members.heard(peer, self._clock.now_s())
                self._tell()

    def silent(self, peer: str, kind: str) -> None:
        """Be told that a peer failed."""
        with self._lock:
            if peer in self.names:
                self._members.silent(peer, kind, self._clock.now_s())
                self._tell()

    def _tell(self) -> None:
        """Warn of what has happened since the last time."""
        fresh = []
        for sentence in reversed(self._members.log):
            if sentence is self._latest:
                break
            fresh.append(sentence)
        for sentence in reversed(fresh):
            _log.warning("%s", sentence)
            self._latest = sentence
