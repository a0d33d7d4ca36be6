"""What the nodes of a job say about each other, and how it is carried in 4,096 bytes.

Two kinds of facts are enough. A *report* is one node's last word on another: it does not answer, or
it does again; each process of a node has a view of its own, so it is one of its *voices* that
speaks. A *record* is where a node is now. Every fact has one author, who numbers what it says, so
of two words on the same thing the later one counts, whatever way they came: to merge is
commutative, associative and idempotent, and messages may be lost, doubled or late. A report that a
newer life of a node has overtaken (a higher incarnation of the reporter or of the reported) is kept
as the last word it is, but stands no more.

Only what is not said by the list of members itself is carried, the latest first; where that is too
much for one message, half of each is for the latest and the rest goes by turns. Of each node the
words of `REPORTERS_MAX` others are kept, which ones is computed: a dead node would else be reported
by thousands, where two are enough.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

GOSSIP_BYTES_MAX = 4096
"""Length of a message."""
REPORTERS_MAX = 64
"""Reports kept about one node; more come from others that need not be heard as well."""
TEXT_MAX = 64
"""Characters of a name or a host in a record."""
ADDRESSES_MAX = 8
"""Addresses in a record."""
NUMBER_MAX = 2**62
"""Largest number in a fact, so that counting on from any of them ends nowhere."""
_HEADER_BYTES = 3

_Number = Annotated[int, Meta(ge=0, le=NUMBER_MAX)]
_Text = Annotated[str, Meta(max_length=TEXT_MAX)]
_Port = Annotated[int, Meta(ge=0, le=65535)]
_Addresses = Annotated[tuple[tuple[_Text, _Port], ...], Meta(max_length=ADDRESSES_MAX)]


class MemberReport(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """One node's last word on another. On itself: "I am here", which refutes nothing by itself."""

    reporter: _Number
    voice: _Number
    """Which process of the reporter."""
    life: _Number
    """The reporter's incarnation."""
    peer: _Number
    incarnation: _Number
    """Of the peer, as far as the reporter knows."""
    sequence: _Number
    """The reporter's count of words."""
    stands: bool
    """True: it does not answer. False: it does again."""


class NodeRecord(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Where a node is, as it says itself."""

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
    """Return the facts of a message, or None where it is none.

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
    """All that is known, beginning with the list of members that everybody has."""

    def __init__(self, records: Sequence[NodeRecord]) -> None:
        self._records = list(records)
        self._reports: dict[int, dict[_Author, MemberReport]] = {}
        # What is carried, by author and subject, the latest change last.
        self._carried: dict[tuple[_Author, int], bytes] = {}
        self._carried_bytes = 0
        self._message: bytes | None = None
        self._turn = 0

    def record(self, node: int) -> NodeRecord:
        """Return the newest record of a node."""
        return self._records[node]

    def reported(self) -> Collection[int]:
        """Return all nodes that anybody had to say something on."""
        return self._reports.keys()

    def reporters(self, node: int) -> set[int]:
        """Return who says, in its present life, that a node in its present life is not there."""
        return {
            report.reporter
            for report in self._reports.get(node, {}).values()
            if report.stands
            and report.reporter != node
            and report.life >= self._records[report.reporter].incarnation
            and report.incarnation >= self._records[node].incarnation
        }

    def known(self) -> frozenset[Fact]:
        """Return everything, to compare."""
        return frozenset(self._records) | {
            report for by_author in self._reports.values() for report in by_author.values()
        }

    def put(self, fact: Fact) -> bool:
        """Take a fact in; return whether anything changed."""
        return self._put_record(fact) if isinstance(fact, NodeRecord) else self._put_report(fact)

    def carry_record(self, node: int) -> None:
        """Tell everybody where a node is, though the list of members may say so."""
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
        """Return what to tell others, in at most `GOSSIP_BYTES_MAX` bytes."""
        if self._message is not None:
            return self._message
        latest_first = list(reversed(self._carried.values()))
        if not latest_first:
            self._message = b""
        elif self._carried_bytes <= GOSSIP_BYTES_MAX - _HEADER_BYTES:
            self._message = _message_of(latest_first)
        else:  # Not kept: the next message has another part of the rest.
            return _message_of(self._share(latest_first))
        return self._message

    def _share(self, latest_first: list[bytes]) -> list[bytes]:
        """Return the latest facts, and in turns some of the rest."""
        budget = GOSSIP_BYTES_MAX - _HEADER_BYTES
        latest = _fitting(latest_first, budget // 2)
        rest = latest_first[len(latest) :]
        start = self._turn % len(rest)
        # Oldest changes come last in the list, so the turn moves the same way as the list grows.
        others = _fitting(rest[start:] + rest[:start], budget - sum(map(len, latest)))
        self._turn += max(1, len(others))  # A fact that fits in no message must not stop the turn.
        return latest + others


def _age(report: MemberReport) -> tuple[int, int, int, bool]:
    return report.life, report.sequence, report.incarnation, report.stands


def _precedence(author: _Author, peer: int) -> tuple[bool, int, _Author]:
    """Return who is heard about a node first: itself, then others as a hash draws them."""
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
