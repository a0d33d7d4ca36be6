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
from typing import Any, Literal

import msgspec

from penstock.errors import PeerError
from penstock.peers.base import SHELF_BYTES, Address
from penstock.peers.keys import RUN_BYTES, SECRET_BYTES, shown
from penstock.peers.status import NodeStatus, RunStatus
from penstock.storage.tier_sizes import Disk, Memory, Wish

FORMAT = 1
FRAME_BYTES_MAX = 4 * 2**20
MEMBERS_MAX = 8192
GOSSIP_BYTES_MAX = 4096

_LENGTH = struct.Struct("<I")


class Word(msgspec.Struct, frozen=True, kw_only=True, tag_field="word"):
    """One message."""


class WishedTier(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a job wants of one kind of tier."""

    kind: Literal["memory", "disk"]
    size_bytes: int


class Open(Word, tag="open", frozen=True, kw_only=True):
    """I want tiers for a data set."""

    format: int = FORMAT
    dataset: str
    """The name of the tiers' shape: the same for all who want the same units."""
    num_units: int
    size_bytes: int
    """Where the layout ends."""
    wishes: tuple[WishedTier, ...] = ()
    """None at all: as much of everything as may be."""
    about: dict[str, str] = {}
    """For people: the URI."""
    is_again: bool = False
    """The tiers are open; only the service was started anew."""


class Keep(Word, tag="keep", frozen=True, kw_only=True):
    """My tiers are open: keep them when I am gone."""

    dataset: str


class RunMember(msgspec.Struct, frozen=True, kw_only=True):
    """One node of a run, for those who look at it from outside."""

    name: str
    host: str = ""
    node: int = 0
    addresses: tuple[tuple[str, int], ...] = ()


class Register(Word, tag="register", frozen=True, kw_only=True):
    """Serve a data set's tiers to the members of a run."""

    run_id: bytes
    secret: bytes
    shelf: bytes
    dataset: str
    members: tuple[RunMember, ...] = ()

    def __post_init__(self) -> None:
        sizes = (len(self.run_id), len(self.secret), len(self.shelf))
        if sizes != (RUN_BYTES, SECRET_BYTES, SHELF_BYTES):
            raise ValueError(f"run id, secret and shelf of {sizes} bytes, not 16, 32 and 16")
        if len(self.members) > MEMBERS_MAX:
            raise ValueError(f"{len(self.members)} members, at most {MEMBERS_MAX} can be had")

    def __repr__(self) -> str:
        return shown(self)


class Progress(Word, tag="progress", frozen=True, kw_only=True):
    """How far I am, and what I have to tell other nodes."""

    run_id: bytes
    status: RunStatus
    said: bytes = b""
    """Gossip for those who ask this node."""

    def __post_init__(self) -> None:
        if len(self.said) > GOSSIP_BYTES_MAX:
            raise ValueError(f"gossip of {len(self.said)} bytes, at most {GOSSIP_BYTES_MAX}")


class Look(Word, tag="look", frozen=True, kw_only=True):
    """Tell me about yourself and about runs of mine."""


class Granted(msgspec.Struct, frozen=True, kw_only=True):
    """A tier that a job may open."""

    kind: Literal["memory", "disk"]
    path: str
    """The folder to open it in."""
    size_bytes: int
    is_shared: bool = False
    """Whether files of other users may lie there."""


class Opened(Word, tag="opened", frozen=True, kw_only=True):
    """These tiers you may open, and this is where their bytes will be served."""

    name: str
    """The node's identity, by which its server calls itself."""
    host: str
    tiers: tuple[Granted, ...]
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


class Done(Word, tag="done", frozen=True, kw_only=True):
    """So it is."""


class Heard(Word, tag="heard", frozen=True, kw_only=True):
    """What other nodes have said since you last asked: names, and gossip of each."""

    gossip: tuple[tuple[str, bytes], ...] = ()


class SeenRun(msgspec.Struct, frozen=True, kw_only=True):
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


class Seen(Word, tag="seen", frozen=True, kw_only=True):
    """This is me, and these are your runs."""

    status: NodeStatus
    served_at: tuple[tuple[str, int], ...]
    runs: tuple[SeenRun, ...] = ()


class Refused(Word, tag="refused", frozen=True, kw_only=True):
    """No, and why."""

    message: str


Asked = Open | Keep | Register | Progress | Look
Answered = Opened | Done | Heard | Seen | Refused

_asked = msgspec.msgpack.Decoder(Asked)
_answered = msgspec.msgpack.Decoder(Answered)
_encoder = msgspec.msgpack.Encoder()


def packed(word: Word) -> bytes:
    """Return a word as a frame."""
    data = _encoder.encode(word)
    assert len(data) <= FRAME_BYTES_MAX, f"a frame of {len(data)} bytes"
    return _LENGTH.pack(len(data)) + data


def receive_asked(connection: socket.socket) -> Asked | None:
    """Return what a process asks; None where it has gone."""
    data = _receive(connection)
    return None if data is None else _asked.decode(data)


def receive_answered(connection: socket.socket) -> Answered | None:
    """Return what the service answers; None where it has gone."""
    data = _receive(connection)
    return None if data is None else _answered.decode(data)


def _receive(connection: socket.socket) -> bytearray | None:
    head = _receive_all(connection, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > FRAME_BYTES_MAX:
        raise PeerError(
            f"a frame of {length} bytes on the node's socket, at most {FRAME_BYTES_MAX} are read; "
            "is something else speaking there?",
            kind="broken",
        )
    return _receive_all(connection, length)


def _receive_all(connection: socket.socket, length: int) -> bytearray | None:
    data = bytearray(length)
    rest = memoryview(data)
    while rest.nbytes:
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
