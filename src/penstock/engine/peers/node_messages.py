"""The messages between a job's process and the node service on its host.

A frame on the unix socket is four bytes of length, little-endian, and a msgpack struct. The process
sends requests, and the service answers each one once, in order. The kernel tells the service which
user is connected, so no message states an identity. When the connection ends, for whatever reason,
so does everything that was requested on it. Both ends check every message against these types and
ignore unknown fields, so a job and a service of neighbouring versions understand each other.
"""

from __future__ import annotations

import socket
import struct
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.engine.peers.base import Address
from penstock.engine.peers.facts import ADDRESSES_MAX
from penstock.engine.peers.keys import RUN_BYTES, SECRET_BYTES, shown
from penstock.engine.peers.status import TEXT_CHARACTERS_MAX, NodeStatus, RunStatus
from penstock.engine.peers.wire import SHELF_BYTES
from penstock.errors import PeerError
from penstock.storage.tier_sizes import Disk, Memory, Wish

FORMAT = 1
FRAME_BYTES_MAX = 4 * 2**20
FRAME_S_MAX = 10.0
"""From the first byte of a request to its last: the sender is on the same host."""
SMALL_FRAME_BYTES = 2**16
"""Requests up to this size are read at once; a larger one waits for its user's turn."""
MEMBERS_MAX = 8192
GOSSIP_BYTES_MAX = 4096

# The service keeps these values in memory, so every text and list has a bound.
_Text = Annotated[str, Meta(max_length=TEXT_CHARACTERS_MAX)]
_Addresses = Annotated[tuple[tuple[_Text, int], ...], Meta(max_length=ADDRESSES_MAX)]
_About = Annotated[dict[_Text, _Text], Meta(max_length=16)]

_LENGTH = struct.Struct("<I")


class NodeMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="word"):
    """One message."""


class WishedTier(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a job can use of one kind of tier."""

    kind: Literal["memory", "disk"]
    size_bytes: int


class OpenTiers(NodeMessage, tag="open", frozen=True, kw_only=True):
    """Request: grant tiers for a data set."""

    format: int = FORMAT
    dataset: _Text
    """The name of the tiers' shape: the same for all jobs with the same units."""
    num_units: int
    size_bytes: int
    """The length of the layout."""
    wishes: Annotated[tuple[WishedTier, ...], Meta(max_length=64)] = ()
    """Empty: as much of every kind as possible."""
    about: _About = {}
    """For people: the data set's URI."""
    is_again: bool = False
    """Whether the tiers are open already, and only the service has restarted."""


class KeepTiers(NodeMessage, tag="keep", frozen=True, kw_only=True):
    """Request: keep the tiers that I have opened when I am gone."""

    dataset: _Text


class RunMember(msgspec.Struct, frozen=True, kw_only=True):
    """One node of a run, for commands that show it from outside."""

    name: _Text
    host: _Text = ""
    node: int = 0
    addresses: _Addresses = ()


class RegisterRun(NodeMessage, tag="register", frozen=True, kw_only=True):
    """Request: serve a data set's tiers to the members of a run."""

    run_id: bytes
    secret: bytes
    shelf: bytes
    dataset: _Text
    members: Annotated[tuple[RunMember, ...], Meta(max_length=MEMBERS_MAX)] = ()

    def __post_init__(self) -> None:
        sizes = (len(self.run_id), len(self.secret), len(self.shelf))
        if sizes != (RUN_BYTES, SECRET_BYTES, SHELF_BYTES):
            raise ValueError(f"run id, secret and shelf of {sizes} bytes, not 16, 32 and 16")

    def __repr__(self) -> str:
        return shown(self)


class ReportProgress(NodeMessage, tag="progress", frozen=True, kw_only=True):
    """Request: take my progress, and return the gossip of other nodes."""

    run_id: bytes
    status: RunStatus
    said: bytes = b""
    """Gossip to send to the members that read from this node."""

    def __post_init__(self) -> None:
        if len(self.said) > GOSSIP_BYTES_MAX:
            raise ValueError(f"gossip of {len(self.said)} bytes, at most {GOSSIP_BYTES_MAX}")


class ListRuns(NodeMessage, tag="look", frozen=True, kw_only=True):
    """Request: return the status of the service and of this user's runs."""


class GrantedTier(msgspec.Struct, frozen=True, kw_only=True):
    """A tier that a job may open."""

    kind: Literal["memory", "disk"]
    path: str
    """The folder to open it in."""
    size_bytes: int
    is_shared: bool = False
    """Whether files of other users may lie there."""


class TiersOpened(NodeMessage, tag="opened", frozen=True, kw_only=True):
    """Answer: the tiers to open, and where the service will serve them."""

    name: str
    """The node's identity, which is the name of its server."""
    host: str
    tiers: tuple[GrantedTier, ...]
    served_at: tuple[tuple[str, int], ...]

    @property
    def wishes(self) -> list[Wish]:
        """The wishes to pass to `open_tiers`."""
        return [
            Memory(tier.size_bytes, folder=tier.path)
            if tier.kind == "memory"
            else Disk(tier.path, tier.size_bytes)
            for tier in self.tiers
        ]

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The addresses of the peer server."""
        return tuple(Address(host=host, port=port) for host, port in self.served_at)


class Acknowledged(NodeMessage, tag="done", frozen=True, kw_only=True):
    """Answer: done."""


class GossipHeard(NodeMessage, tag="heard", frozen=True, kw_only=True):
    """Answer: the gossip that came since the last report, by name of the sending node."""

    gossip: tuple[tuple[str, bytes], ...] = ()


class ListedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run, and what it takes to connect to its members."""

    run_id: bytes
    secret: bytes
    members: tuple[RunMember, ...] = ()
    dataset: str = ""
    """Its URI, for people."""
    is_left: bool = False
    """Whether no process of the run is connected to the service that lists it."""

    def __repr__(self) -> str:
        return shown(self)


class RunsListed(NodeMessage, tag="seen", frozen=True, kw_only=True):
    """Answer: the status of the service and the user's runs."""

    status: NodeStatus
    served_at: tuple[tuple[str, int], ...]
    runs: tuple[ListedRun, ...] = ()


class RequestRefused(NodeMessage, tag="refused", frozen=True, kw_only=True):
    """Answer: the request was refused, and why."""

    message: str


NodeRequest = OpenTiers | KeepTiers | RegisterRun | ReportProgress | ListRuns
NodeAnswer = TiersOpened | Acknowledged | GossipHeard | RunsListed | RequestRefused

_asked = msgspec.msgpack.Decoder(NodeRequest)
_answered = msgspec.msgpack.Decoder(NodeAnswer)
_encoder = msgspec.msgpack.Encoder()


def packed(message: NodeMessage) -> bytes:
    """Return a message as a frame."""
    data = _encoder.encode(message)
    assert len(data) <= FRAME_BYTES_MAX, f"a frame of {len(data)} bytes"
    return _LENGTH.pack(len(data)) + data


def receive_request(
    connection: socket.socket, large: AbstractContextManager[Any]
) -> NodeRequest | None:
    """Return the next request of a process; None if it has disconnected.

    A process may be silent as long as it likes, but a request that has begun must arrive within
    `FRAME_S_MAX`. A request of more than `SMALL_FRAME_BYTES` is read while `large` is held. So the
    unfinished requests of one user take the memory of one, and no user can delay another.
    """
    connection.settimeout(None)
    first = connection.recv(1)
    if not first:
        return None
    connection.settimeout(FRAME_S_MAX)
    until_s = time.monotonic() + FRAME_S_MAX
    head = _receive_all(connection, _LENGTH.size - 1, until_s)
    if head is None:
        return None
    length = _length_in(first + head)
    with large if length > SMALL_FRAME_BYTES else nullcontext():
        data = _receive_all(connection, length, until_s)
        return None if data is None else _asked.decode(data)


def receive_answer(connection: socket.socket) -> NodeAnswer | None:
    """Return the answer of the service; None if it has disconnected."""
    head = _receive_all(connection, _LENGTH.size)
    data = None if head is None else _receive_all(connection, _length_in(head))
    return None if data is None else _answered.decode(data)


def _length_in(head: bytes | bytearray) -> int:
    (length,) = _LENGTH.unpack(head)
    if length > FRAME_BYTES_MAX:
        raise PeerError(
            f"a frame of {length} bytes on the node's socket, at most {FRAME_BYTES_MAX} are read; "
            "is something else speaking there?",
            kind="broken",
        )
    return int(length)


def _receive_all(
    connection: socket.socket, length: int, until_s: float | None = None
) -> bytearray | None:
    """Return so many bytes; None if the other end closes before. `until_s` is monotonic."""
    data = bytearray(length)
    rest = memoryview(data)
    while rest.nbytes:
        if until_s is not None:
            # One deadline for all bytes: with a time-out each, a slow sender could go on for ever.
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"{rest.nbytes} of {length} bytes did not come in time")
            connection.settimeout(left_s)
        count = connection.recv_into(rest)
        if count == 0:
            return None
        rest = rest[count:]
    return data


def user_of(connection: socket.socket) -> tuple[int, int, int]:
    """Return the process, user and group at the other end, as the kernel knows them."""
    size = struct.calcsize("3i")
    values = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, _PEERCRED, size))
    return int(values[0]), int(values[1]), int(values[2])


_PEERCRED: Any = getattr(socket, "SO_PEERCRED", 17)
