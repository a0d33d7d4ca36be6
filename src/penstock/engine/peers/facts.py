"""Gossip: facts about the nodes of a job, merged, and packed into messages of 4,096 bytes.

There are two kinds of facts. A `MemberReport` is a node's latest statement about another one: it
does not answer, or it answers again. Each process of a node has a view of its own, so the author of
a report is a node and one of its *voices*. A `NodeRecord` says where a node is now. Each author
numbers its statements, and the highest number wins. So merging is commutative, associative and
idempotent: messages may be lost, repeated or late. A restart of the reporter or of the reported
node (a higher incarnation) invalidates a report, which is kept but no longer counts.

Messages carry only facts that differ from the initial list of members, the latest first. If they
do not fit, the latest take half of the message and the others share the rest in turns. Of the
reports about one node only `REPORTERS_MAX` are kept, chosen by a hash: thousands of nodes would
report a dead one, and two reports are enough.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

GOSSIP_BYTES_MAX = 4096
"""Length of a message."""
REPORTERS_MAX = 64
"""Reports kept about one node."""
TEXT_MAX = 64
"""Characters of a name or a host in a record."""
ADDRESSES_MAX = 8
"""Addresses in a record."""
NUMBER_MAX = 2**62
"""Largest number in a fact, so that counting on from it cannot overflow."""
_HEADER_BYTES = 3

_Number = Annotated[int, Meta(ge=0, le=NUMBER_MAX)]
_Text = Annotated[str, Meta(max_length=TEXT_MAX)]
_Port = Annotated[int, Meta(ge=0, le=65535)]
_Addresses = Annotated[tuple[tuple[_Text, _Port], ...], Meta(max_length=ADDRESSES_MAX)]


class MemberReport(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """A node's latest statement about another one, or about itself: that it is there."""

    reporter: _Number
    voice: _Number
    """Which process of the reporter."""
    life: _Number
    """The reporter's incarnation."""
    peer: _Number
    incarnation: _Number
    """The peer's incarnation, as far as the reporter knows."""
    sequence: _Number
    """Numbers the statements of this reporter."""
    stands: bool
    """True: it does not answer. False: it does again."""


class NodeRecord(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Where a node is, by its own statement."""

    node: _Number
    name: _Text
    addresses: _Addresses
    capacity_bytes: _Number
    incarnation: _Number
    host: _Text


Fact = MemberReport | NodeRecord

_decoder = msgspec.msgpack.Decoder(list[Fact])
_encoder = msgspec.msgpack.Encoder()


def decoded(data: bytes) -> list[Fact] | None:
    """Return the facts of a message, or None if the bytes are not a message.

    >>> decoded(b"nonsense") is None
    True
    """
    if len(data) > GOSSIP_BYTES_MAX:
        return None
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None


_Author = tuple[int, int]
"""A node and one of its voices."""


class MembershipFacts:
    """All facts that a process knows; they begin with the list of members that all nodes have."""

    def __init__(self, records: Sequence[NodeRecord]) -> None:
        self._records = list(records)
        self._reports: dict[int, dict[_Author, MemberReport]] = {}
        # Facts to send, encoded, by author and subject; the latest change comes last.
        self._carried: dict[tuple[_Author, int], bytes] = {}
        self._carried_bytes = 0
        self._message: bytes | None = None
        self._turn = 0

    def record(self, node: int) -> NodeRecord:
        """Return the newest record of a node."""
        return self._records[node]

    def reported(self) -> Collection[int]:
        """Return all nodes that there are reports about."""
        return self._reports.keys()

    def reporters(self, node: int) -> set[int]:
        """Return the nodes whose valid reports say that a node does not answer."""
        return {
            report.reporter
            for report in self._reports.get(node, {}).values()
            if report.stands
            and report.reporter != node
            and report.life >= self._records[report.reporter].incarnation
            and report.incarnation >= self._records[node].incarnation
        }

    def put(self, fact: Fact) -> bool:
        """Merge a fact; return whether anything changed."""
        return self._put_record(fact) if isinstance(fact, NodeRecord) else self._put_report(fact)

    def carry_record(self, node: int) -> None:
        """Send the record of a node to everybody, even if the list of members has it."""
        self._carry(((node, -1), node), self._records[node])

    def _put_record(self, record: NodeRecord) -> bool:
        node = record.node
        if node >= len(self._records) or record.name != self._records[node].name:
            return False
        old = self._records[node]
        if (old.incarnation, _encoder.encode(old)) >= (record.incarnation, _encoder.encode(record)):
            return False
        self._records[node] = record
        self.carry_record(node)
        return True

    def _put_report(self, report: MemberReport) -> bool:
        if max(report.reporter, report.peer) >= len(self._records):
            return False
        author = (report.reporter, report.voice)
        by_author = self._reports.setdefault(report.peer, {})
        old = by_author.get(author)
        if old is not None and _age(old) >= _age(report):
            return False
        by_author[author] = report
        self._carry((author, report.peer), report)
        if len(by_author) <= REPORTERS_MAX:
            return True
        least = max(by_author, key=lambda each: _precedence(each, report.peer))
        del by_author[least]
        self._uncarry((least, report.peer))
        return least != author

    def _carry(self, key: tuple[_Author, int], fact: Fact) -> None:
        self._uncarry(key)
        self._carried[key] = _encoder.encode(fact)
        self._carried_bytes += len(self._carried[key])

    def _uncarry(self, key: tuple[_Author, int]) -> None:
        self._carried_bytes -= len(self._carried.pop(key, b""))
        self._message = None

    def message(self) -> bytes:
        """Return the message to send, at most `GOSSIP_BYTES_MAX` bytes."""
        if self._message is not None:
            return self._message
        latest_first = list(reversed(self._carried.values()))
        if not latest_first:
            self._message = b""
        elif self._carried_bytes <= GOSSIP_BYTES_MAX - _HEADER_BYTES:
            self._message = _message_of(latest_first)
        else:  # Not cached: the next message must carry another part of the rest.
            return _message_of(self._share(latest_first))
        return self._message

    def _share(self, latest_first: list[bytes]) -> list[bytes]:
        """Return the latest facts, and in turns some of the rest."""
        budget = GOSSIP_BYTES_MAX - _HEADER_BYTES
        latest = _fitting(latest_first, budget // 2)
        rest = latest_first[len(latest) :]
        start = self._turn % len(rest)
        # New facts enter the list at its front and the turn moves towards its end, so new facts do
        # not push older ones out of their turn.
        others = _fitting(rest[start:] + rest[:start], budget - sum(map(len, latest)))
        # At least 1, or a fact that fits in no message would block the rest for ever.
        self._turn += max(1, len(others))
        return latest + others


def _age(report: MemberReport) -> tuple[int, int, int, bool]:
    return report.life, report.sequence, report.incarnation, report.stands


def _precedence(author: _Author, peer: int) -> tuple[bool, int, _Author]:
    """Return the rank of an author among reporters of a node: the node itself, then by a hash.

    All nodes compute the same ranks, so they keep the same reports.
    """
    node, voice = author
    mixed = (node * 0x9E3779B1 + voice * 0xC2B2AE3D + peer * 0x85EBCA77) & 0xFFFFFFFF
    return node != peer, (mixed ^ mixed >> 15) * 0x2C1B3C6D & 0xFFFFFFFF, author


def _fitting(items: list[bytes], budget_bytes: int) -> list[bytes]:
    """Return the first items that fit together."""
    total = 0
    for number, item in enumerate(items):
        total += len(item)
        if total > budget_bytes:
            return items[:number]
    return items


def _message_of(items: list[bytes]) -> bytes:
    return _encoder.encode([msgspec.Raw(item) for item in items])
