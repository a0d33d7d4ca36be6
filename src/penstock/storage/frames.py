"""The messages between a cut-off process and its relay.

A frame is four bytes of length and a msgspec struct. Raw bytes of the announced size may follow;
they are received straight into their place. Both ends check each length against its bound before
they allocate memory for it.
"""

from __future__ import annotations

import socket
import struct
from typing import Literal

import msgspec

from penstock.errors import UnreachableError
from penstock.storage.base import ObjectInfo
from penstock.storage.options import StoreOptions

FRAME_BYTES_MAX = 4 * 2**20
"""Longest struct; a page of a listing is the largest of them."""
PAYLOAD_BYTES_MAX = 2**40
"""Longest object."""
_PIECE_BYTES_MAX = 2**30
"""Linux moves at most 2 GiB in one call."""

Operation = Literal["info", "list", "peek", "read", "read_range", "write", "delete"]


class RelayRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One call of a store."""

    operation: Operation
    uri: str
    options: StoreOptions
    key: str
    wanted: ObjectInfo | None = None
    """The object of which a range is read, as it was indexed."""
    offset: int = 0
    length: int = 0
    only_if_absent: bool = False
    payload_bytes: int = 0


class RelayAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result. A listing takes several frames; all but the last have `has_more`."""

    objects: list[ObjectInfo] = []
    payload_bytes: int = 0
    has_more: bool = False
    error_class: str = ""
    error_message: str = ""
    error_uri: str = ""


# Prepares the types in one thread: forked children have died with SIGSEGV when several threads
# decoded a type for the first time at once.
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
