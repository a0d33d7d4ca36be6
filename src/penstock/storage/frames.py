"""What a cut-off process and its relay say to each other.

A frame is four bytes of length and a msgspec struct; raw bytes of the announced size may follow,
and are received straight into their place. Both ends bound every length they read before they make
room for it.
"""

from __future__ import annotations

import socket
import struct
from typing import Literal

import msgspec

from penstock.errors import UnreachableError
from penstock.storage.base import ObjectInfo

FRAME_BYTES_MAX = 4 * 2**20
"""Longest struct; a page of a listing is the largest of them."""
PAYLOAD_BYTES_MAX = 2**40
"""Longest object."""
_PIECE_BYTES_MAX = 2**30
"""Linux moves at most 2 GiB in one call."""

Operation = Literal["info", "list", "peek", "read", "read_range", "write", "delete"]


class RelayedObject(msgspec.Struct, frozen=True, array_like=True):
    """An `ObjectInfo` on the wire."""

    key: str
    size_bytes: int
    etag: str
    mtime_ns: int


def object_of(info: ObjectInfo) -> RelayedObject:
    """Return an `ObjectInfo` as it travels."""
    return RelayedObject(info.key, info.size_bytes, info.etag, info.mtime_ns)


def info_of(found: RelayedObject) -> ObjectInfo:
    """Return what has travelled."""
    return ObjectInfo(
        key=found.key, size_bytes=found.size_bytes, etag=found.etag, mtime_ns=found.mtime_ns
    )


class RelayRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One call of a store. The options are a plain dictionary of `StoreOptions`."""

    operation: Operation
    uri: str
    options: dict[str, str | float | bool | None]
    key: str
    wanted: RelayedObject | None = None
    """The object of which a range is read, as it was indexed."""
    offset: int = 0
    length: int = 0
    only_if_absent: bool = False
    payload_bytes: int = 0


class RelayAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What came of it. A listing is answered in several frames; all but the last say `has_more`."""

    objects: list[RelayedObject] = []
    keys: list[str] = []
    payload_bytes: int = 0
    has_more: bool = False
    error_class: str = ""
    error_message: str = ""
    error_uri: str = ""


# Made once, by the thread that imports this: a type that several threads decode for the first time
# at once has ended forked children with SIGSEGV.
_requests = msgspec.msgpack.Decoder(RelayRequest)
_answers = msgspec.msgpack.Decoder(RelayAnswer)


class HungUpError(UnreachableError):
    """The other end is gone."""


def send_frame(connection: socket.socket, frame: RelayRequest | RelayAnswer) -> None:
    """Send a struct."""
    body = msgspec.msgpack.encode(frame)
    assert len(body) <= FRAME_BYTES_MAX, f"{len(body)=}"
    connection.sendall(struct.pack("<I", len(body)) + body)


def receive_request(connection: socket.socket) -> RelayRequest:
    """Receive a struct of the calling end."""
    return _requests.decode(_body(connection))


def receive_answer(connection: socket.socket) -> RelayAnswer:
    """Receive a struct of the answering end."""
    return _answers.decode(_body(connection))


def _body(connection: socket.socket) -> bytearray:
    head = bytearray(4)
    receive_into(connection, memoryview(head))
    (length,) = struct.unpack("<I", head)
    if length > FRAME_BYTES_MAX:
        raise HungUpError(f"a frame of {length} bytes is longer than {FRAME_BYTES_MAX}")
    body = bytearray(length)
    receive_into(connection, memoryview(body))
    return body


def receive_into(connection: socket.socket, target: memoryview) -> None:
    """Fill `target` from the connection."""
    rest = target.cast("B") if target.nbytes else target
    while rest.nbytes:
        count = connection.recv_into(rest[:_PIECE_BYTES_MAX])
        if count == 0:
            raise HungUpError(f"the other end is gone, {rest.nbytes} bytes were still to come")
        rest = rest[count:]
