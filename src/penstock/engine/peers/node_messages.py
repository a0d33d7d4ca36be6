"""What a job's process and the node service on its host say to each other.

Frames over a unix socket: four bytes of length, little-endian, then msgpack. A process asks, the
service answers each ask once, in order. The kernel tells the service which user asks, so no word
here says who somebody is. The end of the connection, however it comes, is the end of what was
asked for on it. Both ends check every word against these types; unknown fields are passed over, so
a job and a service of neighbouring versions understand each other.
"""

from __future__ import annotations

import socket
import struct
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.engine.peers.base import SHELF_BYTES, Address
from penstock.engine.peers.facts import ADDRESSES_MAX
from penstock.engine.peers.keys import RUN_BYTES, SECRET_BYTES, shown
from penstock.engine.peers.status import TEXT_CHARACTERS_MAX, NodeStatus, RunStatus
from penstock.errors import PeerError
from penstock.storage.tier_sizes import Disk, Memory, Wish

FORMAT = 1
FRAME_BYTES_MAX = 4 * 2**20
FRAME_S_MAX = 10.0
"""From the first byte of an ask to its last: its sender is on the same host."""
SMALL_FRAME_BYTES = 2**16
"""Asks up to this size are read at once; a larger one waits for the place that its user has."""
MEMBERS_MAX = 8192
GOSSIP_BYTES_MAX = 4096

# The service keeps what it is told, so every text and list has a bound.
_Text = Annotated[str, Meta(max_length=TEXT_CHARACTERS_MAX)]
_Addresses = Annotated[tuple[tuple[_Text, int], ...], Meta(max_length=ADDRESSES_MAX)]
_About = Annotated[dict[_Text, _Text], Meta(max_length=16)]

_LENGTH = struct.Struct("<I")


class NodeMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="word"):
    """One message."""


class WishedTier(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a job wants of one kind of tier."""

    kind: Literal["memory", "disk"]
    size_bytes: int


class OpenTiers(NodeMessage, tag="open", frozen=True, kw_only=True):
    """I want tiers for a data set."""

    format: int = FORMAT
    dataset: _Text
    """The name of the tiers' shape: the same for all who want the same units."""
    num_units: int
    size_bytes: int
    """Where the layout ends."""
    wishes: Annotated[tuple[WishedTier, ...], Meta(max_length=64)] = ()
    """None at all: as much of everything as may be."""
    about: _About = {}
    """For people: the URI."""
    is_again: bool = False
    """The tiers are open; only the service was started anew."""


class KeepTiers(NodeMessage, tag="keep", frozen=True, kw_only=True):
    """My tiers are open: keep them when I am gone."""

    dataset: _Text


class RunMember(msgspec.Struct, frozen=True, kw_only=True):
    """One node of a run, for those who look at it from outside."""

    name: _Text
    host: _Text = ""
    node: int = 0
    addresses: _Addresses = ()


class RegisterRun(NodeMessage, tag="register", frozen=True, kw_only=True):
    """Serve a data set's tiers to the members of a run."""

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
    """How far I am, and what I have to tell other nodes."""

    run_id: bytes
    status: RunStatus
    said: bytes = b""
    """Gossip for those who ask this node."""

    def __post_init__(self) -> None:
        if len(self.said) > GOSSIP_BYTES_MAX:
            raise ValueError(f"gossip of {len(self.said)} bytes, at most {GOSSIP_BYTES_MAX}")


class ListRuns(NodeMessage, tag="look", frozen=True, kw_only=True):
    """Tell me about yourself and about runs of mine."""


class GrantedTier(msgspec.Struct, frozen=True, kw_only=True):
    """A tier that a job may open."""

    kind: Literal["memory", "disk"]
    path: str
    """The folder to open it in."""
    size_bytes: int
    is_shared: bool = False
    """Whether files of other users may lie there."""


class TiersOpened(NodeMessage, tag="opened", frozen=True, kw_only=True):
    """These tiers you may open, and this is where their bytes will be served."""

    name: str
    """The node's identity, by which its server calls itself."""
    host: str
    tiers: tuple[GrantedTier, ...]
    served_at: tuple[tuple[str, int], ...]

    @property
    def wishes(self) -> list[Wish]:
        """What to give to `open_tiers`."""
        return [
            Memory(tier.size_bytes, folder=tier.path)
            if tier.kind == "memory"
            else Disk(tier.path, tier.size_bytes)
            for tier in self.tiers
        ]

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Where the peer server is reached."""
        return tuple(Address(host=host, port=port) for host, port in self.served_at)


class Acknowledged(NodeMessage, tag="done", frozen=True, kw_only=True):
    """So it is."""


class GossipHeard(NodeMessage, tag="heard", frozen=True, kw_only=True):
    """What other nodes have said since you last asked: names, and gossip of each."""

    gossip: tuple[tuple[str, bytes], ...] = ()


class ListedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run, with all that is needed to speak to its members."""

    run_id: bytes
    secret: bytes
    members: tuple[RunMember, ...] = ()
    dataset: str = ""
    """Its URI, for people."""
    is_left: bool = False
    """Whether no process of it is connected to the service that tells of it."""

    def __repr__(self) -> str:
        return shown(self)


class RunsListed(NodeMessage, tag="seen", frozen=True, kw_only=True):
    """This is me, and these are your runs."""

    status: NodeStatus
    served_at: tuple[tuple[str, int], ...]
    runs: tuple[ListedRun, ...] = ()


class RequestRefused(NodeMessage, tag="refused", frozen=True, kw_only=True):
    """No, and why."""

    message: str


Asked = OpenTiers | KeepTiers | RegisterRun | ReportProgress | ListRuns
Answered = TiersOpened | Acknowledged | GossipHeard | RunsListed | RequestRefused

_asked = msgspec.msgpack.Decoder(Asked)
_answered = msgspec.msgpack.Decoder(Answered)
_encoder = msgspec.msgpack.Encoder()


def packed(word: NodeMessage) -> bytes:
    """Return a word as a frame."""
    data = _encoder.encode(word)
    assert len(data) <= FRAME_BYTES_MAX, f"a frame of {len(data)} bytes"
    return _LENGTH.pack(len(data)) + data


def receive_asked(connection: socket.socket, large: AbstractContextManager[Any]) -> Asked | None:
    """Return what a process asks; None where it has gone.

    A process may be silent as long as it likes, but an ask that has begun must arrive within
    `FRAME_S_MAX`. While one of more than `SMALL_FRAME_BYTES` is read, `large` is held: so a user's
    unfinished asks take no more memory than one of them may, and no user keeps out another.
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


def receive_answered(connection: socket.socket) -> Answered | None:
    """Return what the service answers; None where it has gone."""
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
    """Return so many bytes, None where the other end has gone before; `until_s` is monotonic."""
    data = bytearray(length)
    rest = memoryview(data)
    while rest.nbytes:
        if until_s is not None:
            # Each byte must not win a time-out of its own: the sum of them has no bound.
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
