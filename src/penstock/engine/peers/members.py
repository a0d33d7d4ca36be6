"""Membership: one node's view of all others, as a state machine without clock or socket.

*Suspicion* is local. A node does not let a step wait for a peer that it suspects. It tries the peer
again off the path of the steps, and one answer ends the suspicion. The wait between tries grows
with the silence, so a peer that was away briefly is used again soon; until then both sides read
from the store what the other one holds. A peer that fails repeatedly is tried less and less often.

A node is *lost* for the whole job while two other nodes report it (one, if only one is left).
Reports travel as gossip in requests and answers (`facts`). A report holds until its author reaches
the node again or the node comes back as a new incarnation. A node that learns of a report about
itself goes on serving and announces that it is there; those who suspect it then try it at once.

Reports by lost nodes do not count, or the last report of a dead node would hold for ever. So the
lost are computed in rounds: start with nobody lost, count the reports, drop those of the lost, and
repeat. If two halves of a job report each other, some nodes are lost in every other round; these
count as not lost. A wrong view costs extra bytes from the store, never a sample.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from penstock.engine.peers.base import Address
from penstock.engine.peers.facts import (
    ADDRESSES_MAX,
    NUMBER_MAX,
    TEXT_MAX,
    Fact,
    MemberReport,
    MembershipFacts,
    NodeRecord,
    decoded,
)
from penstock.errors import OptionError
from penstock.units import show_seconds

QUORUM = 2
"""Nodes whose reports make another one lost."""
FORGIVEN_AFTER_S = 60.0
"""After so long without a failure, the next one counts as the first."""
_WAITS_S = {"refused": (30.0, 300.0)}
"""First and longest wait before a peer is tried again. A peer that refused us seldom changes its
mind."""
RETRY_MAX_S = 30.0
_WAIT_S = (1.0, RETRY_MAX_S)
_SHARE_OF_SILENCE = 1 / 8
"""A peer that is back is noticed after at most this share of the time that it was silent."""
_DOUBLINGS_MAX = 16
_SENTENCES_MAX = 64
_KINDS = {
    "lost": "did not answer",
    "refused": "refused this node",
    "stuck": "made no progress",
    "broken": "sent invalid bytes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A node that takes part."""

    name: str
    """Its identity, which is stored with its data (`storage.tier_identity`)."""
    node: int
    """Its number in the job."""
    addresses: tuple[Address, ...]
    """The addresses of its server, the best first."""
    capacity_bytes: int
    """The capacity of all its tiers together."""
    incarnation: int
    """Grows with each start of the node's server."""
    host: str
    """A name for people."""

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > TEXT_MAX:
            raise OptionError(f"the name of a node has 1 to {TEXT_MAX} letters, got {self.name!r}")
        if len(self.addresses) > ADDRESSES_MAX:
            raise OptionError(
                f"node {self.node} has {len(self.addresses)} addresses, {ADDRESSES_MAX} can be "
                "told to others; choose the interfaces that peers use"
            )
        for what in ("node", "capacity_bytes", "incarnation"):
            if not 0 <= getattr(self, what) <= NUMBER_MAX:
                raise OptionError(f"{what} of a member is out of bounds: {getattr(self, what)}")
        object.__setattr__(self, "host", self.host[:TEXT_MAX])

    def __str__(self) -> str:
        return f"node {self.node} ({self.host})"


@dataclass(slots=True)
class _Peer:
    """What this node has observed of another one."""

    kind: str = ""
    """Why it is suspected; empty when it is not."""
    num_failures: int = 0
    """How often it failed; a silence counts once, however many requests failed in it."""
    heard_at_s: float = -math.inf
    silent_at_s: float = -math.inf
    """When suspicion began."""
    retry_at_s: float = -math.inf
    cleared_at_s: float = -math.inf


class Members:
    """The nodes of a job as one of them sees them. Not thread-safe: the holder has a lock."""

    def __init__(self, members: Sequence[Member], *, me: str, voice: int = 0) -> None:
        """Begin with all members present; `voice` tells the processes of one node apart."""
        self._members = sorted(members, key=lambda member: member.node)
        assert [m.node for m in self._members] == list(range(len(members))), members
        self._numbers = {member.name: member.node for member in self._members}
        assert len(self._numbers) == len(members), "two members of one name"
        self._me = self._numbers[me]
        self._voice = voice
        self._facts = MembershipFacts([record_of(member) for member in self._members])
        self._peers = [_Peer() for _ in self._members]
        self._suspected: set[int] = set()
        self._sequence = 0
        self._lost: frozenset[int] = frozenset()
        self._heard_last: dict[str, int] = {}
        self._log: deque[str] = deque(maxlen=_SENTENCES_MAX)
        self.version = 0
        """Changes when `lost` does."""
        self.was_missed = False
        """Whether others have reported this node: they may have taken over its share."""

    # -- state --------------------------------------------------------------------------------

    @property
    def lost(self) -> frozenset[str]:
        """Nodes that the job goes on without; this node may be among them."""
        return self._names(self._lost)

    @property
    def suspects(self) -> frozenset[str]:
        """Nodes that this one cannot use now, whatever others say."""
        return self._names([node for node, peer in enumerate(self._peers) if peer.kind])

    @property
    def log(self) -> list[str]:
        """The latest events, as sentences."""
        return list(self._log)

    def member(self, name: str) -> Member:
        """Return a node's newest record."""
        return self._members[self._numbers[name]]

    def is_usable(self, peer: str, at_s: float) -> bool:
        """Return whether a step may wait for this peer.

        A suspect must first answer a try off the path of the steps. A peer that is merely stuck
        would answer every try, so it becomes usable when its wait has passed.
        """
        node = self._numbers.get(peer)
        if node is None or node in self._lost:
            return False
        state = self._peers[node]
        return not state.kind or (state.kind == "stuck" and at_s >= state.retry_at_s)

    def due(self, at_s: float) -> tuple[str, ...]:
        """Return the suspects to try now; the caller reports the result to `heard` or `silent`."""
        return tuple(
            self._members[node].name
            for node in sorted(self._suspected)
            if self._peers[node].retry_at_s <= at_s
        )

    # -- events -------------------------------------------------------------------------------

    def heard(self, peer: str, at_s: float) -> None:
        """Note that a peer has answered."""
        node = self._numbers.get(peer)
        if node is None or node == self._me:
            return
        state = self._peers[node]
        state.heard_at_s = at_s
        # An answer disproves only silence; after another failure the wait must pass as well.
        if state.kind and (state.kind == "lost" or at_s >= state.retry_at_s):
            was_reported = node in self._suspected
            self._clear(node, at_s)
            if was_reported:
                self._report(node, stands=False)
                self._update_lost(at_s)

    def silent(self, peer: str, kind: str, at_s: float) -> None:
        """Note that a peer failed; `kind` is one of those of `PeerError`."""
        node = self._numbers.get(peer)
        if node is None or node == self._me:
            return
        state = self._peers[node]
        if state.kind and at_s < state.retry_at_s:
            return  # All outstanding requests fail at once; that counts as one failure.
        is_silent_still = state.kind == kind == "lost"
        if not state.kind:
            if at_s - state.cleared_at_s > FORGIVEN_AFTER_S:
                state.num_failures = 0
            state.silent_at_s = at_s
            self._note_suspected(node, kind, at_s)
        if not is_silent_still:
            state.num_failures += 1
        state.kind = kind
        state.retry_at_s = at_s + _wait_s(state, at_s)
        # A stuck peer still answers, so it is not reported: others can go on using it.
        if kind != "stuck" and node not in self._suspected:
            self._suspected.add(node)
            self._report(node, stands=True)
            self._update_lost(at_s)

    def announce(self, mine: Member, at_s: float) -> None:
        """Announce that this node has restarted, perhaps at other addresses."""
        assert mine.node == self._me, mine
        self._take_record(record_of(mine), at_s)
        self._facts.carry_record(self._me)
        self._update_lost(at_s)

    def say(self) -> bytes:
        """Return the gossip to send; empty while nothing has changed."""
        return self._facts.message()

    def hear(self, peer: str, data: bytes, at_s: float) -> None:
        """Take the gossip of another node; it may hold any bytes."""
        mark = hash(data)
        if not data or self._heard_last.get(peer) == mark:
            return
        facts = decoded(data)
        if facts is None:
            return
        if peer in self._numbers:  # Names that are not members must not fill the memory.
            self._heard_last[peer] = mark
        taken = [self._take(fact, at_s) for fact in facts]
        if any(taken):
            self._update_lost(at_s)

    # -- decisions ----------------------------------------------------------------------------

    def _take(self, fact: Fact, at_s: float) -> bool:
        if isinstance(fact, NodeRecord):
            return self._take_record(fact, at_s)
        mine = self._facts.record(self._me)
        if (fact.reporter, fact.voice) == (self._me, self._voice):
            return False  # Only this process makes these reports, so it has them all.
        if fact.peer == self._me and fact.incarnation < mine.incarnation:
            self._facts.carry_record(self._me)  # The report is about an earlier incarnation.
        if not self._facts.put(fact):
            return False
        self.was_missed = self.was_missed or fact.peer == self._me
        if fact.peer == self._me and fact.stands:
            self._note(f"{self._members[fact.reporter]} cannot reach this node, which goes on")
            if self._voice == 0:  # Only the process that serves can say that the node is there.
                self._report(self._me, stands=False)
        state = self._peers[fact.peer]
        if fact.reporter == fact.peer and state.kind == "lost":
            state.retry_at_s = min(state.retry_at_s, at_s)
        return True

    def _take_record(self, record: NodeRecord, at_s: float) -> bool:
        if not self._facts.put(record):
            return False
        self._members[record.node] = member_of(record)
        if record.node == self._me:
            for node in sorted(self._suspected):  # A new incarnation invalidates old reports.
                self._report(node, stands=True)
        if self._peers[record.node].kind:
            # The suspicion was about its earlier incarnation, like the report, which is now void.
            self._clear(record.node, at_s)
        return True

    def _report(self, node: int, *, stands: bool) -> None:
        self._sequence += 1
        report = MemberReport(
            reporter=self._me,
            voice=self._voice,
            life=self._facts.record(self._me).incarnation,
            peer=node,
            incarnation=self._facts.record(node).incarnation,
            sequence=self._sequence,
            stands=stands,
        )
        self._facts.put(report)

    def _clear(self, node: int, at_s: float) -> None:
        state = self._peers[node]
        self._note(f"{self._members[node]} is back after {show_seconds(at_s - state.silent_at_s)}")
        state.kind, state.retry_at_s, state.cleared_at_s = "", -math.inf, at_s
        self._suspected.discard(node)

    def _update_lost(self, at_s: float) -> None:
        """Compute again who is lost, and note the changes."""
        lost = self._voted_out()
        if lost == self._lost:
            return
        for node in sorted(lost - self._lost):
            silence_s = at_s - self._peers[node].heard_at_s
            since = f" after {show_seconds(silence_s)} of silence" if silence_s < math.inf else ""
            self._note(f"{self._members[node]} was lost{since}; its share comes from the store")
        for node in sorted(self._lost - lost):
            self._note(f"{self._members[node]} takes part again")
        self._lost = lost
        self.version += 1

    def _voted_out(self) -> frozenset[int]:
        """Return the nodes that are lost in every round, once the rounds repeat themselves."""
        low: frozenset[int] = frozenset()
        for _ in range(len(self._members) + 1):
            high = self._voted(low)
            lower = self._voted(high)
            if lower == low:
                break
            low = lower
        return low

    def _voted(self, without: Collection[int]) -> frozenset[int]:
        """Return the nodes that enough others report; reporters in `without` do not count."""
        gone = {node for node in {*self._suspected, *without} if node != self._me}
        out = set()
        for node in {*self._suspected, *self._facts.reported()}:
            voices = self._facts.reporters(node)
            if node in self._suspected:
                voices.add(self._me)  # Of many reports only some are kept; ours may be missing.
            num_left = len(self._members) - len(gone | {node})
            if len(voices - gone) >= max(1, min(QUORUM, num_left)):
                out.add(node)
        return frozenset(out)

    def _names(self, nodes: Collection[int]) -> frozenset[str]:
        return frozenset(self._members[node].name for node in nodes)

    def _note_suspected(self, node: int, kind: str, at_s: float) -> None:
        silence_s = at_s - self._peers[node].heard_at_s
        is_known = kind == "lost" and silence_s < math.inf
        since = f" for {show_seconds(silence_s)}" if is_known else ""
        what = _KINDS.get(kind, "failed")
        self._note(f"{self._members[node]} {what}{since}; its data comes from the store")

    def _note(self, sentence: str) -> None:
        self._log.append(sentence)


def _wait_s(peer: _Peer, at_s: float) -> float:
    """Return how long to wait before a suspect is tried again."""
    first_s, most_s = _WAITS_S.get(peer.kind, _WAIT_S)
    doubled_s = first_s * 2.0 ** min(peer.num_failures - 1, _DOUBLINGS_MAX)
    return min(most_s, max(doubled_s, _SHARE_OF_SILENCE * (at_s - peer.silent_at_s)))


def record_of(member: Member) -> NodeRecord:
    """Return the record of a member."""
    return NodeRecord(
        node=member.node,
        name=member.name,
        addresses=tuple((address.host, address.port) for address in member.addresses),
        capacity_bytes=member.capacity_bytes,
        incarnation=member.incarnation,
        host=member.host,
    )


def member_of(record: NodeRecord) -> Member:
    """Return the member of a record."""
    return Member(
        node=record.node,
        name=record.name,
        addresses=tuple(Address(host=host, port=port) for host, port in record.addresses),
        capacity_bytes=record.capacity_bytes,
        incarnation=record.incarnation,
        host=record.host,
    )
