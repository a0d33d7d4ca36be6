"""The store behind the shaper: one connection to it for each client's.

Heads and uploads pass as they are. Bytes of answers are taken only as fast as the client may have
them, so a fast store is slowed down by its own full buffers.
"""

from __future__ import annotations

import os
import socket
from errno import EINPROGRESS
from typing import Protocol

from testkit.shaper_http import (
    Answer,
    BadHeadError,
    ChunkedEnd,
    Request,
    answer_of,
    end_of_head,
)
from testkit.shaper_loop import CAN_WRITE, Loop
from testkit.shaper_transfer import BrokenBodyError

BACKLOG_BYTES_MAX = 256 * 2**10
"""Bytes of an upload that wait for the store; then the client has to."""
_PIECE_BYTES = 64 * 2**10


class Asker(Protocol):
    """Receives the events of a connection to the store."""

    def on_answer(self, answer: Answer, body: UpstreamBody) -> None:
        """The head of the answer is there."""

    def on_interim(self, raw: bytes) -> None:
        """An answer before the answer, such as 100 Continue."""

    def on_more(self) -> None:
        """There may be more bytes of the body."""

    def on_room(self) -> None:
        """There is room for more of the upload."""

    def on_failure(self, why: str) -> None:
        """No answer will come."""


class Upstream:
    """A connection to the store, made on first use, kept between requests."""

    def __init__(self, loop: Loop, address: tuple[str, int], asker: Asker) -> None:
        self._loop = loop
        self._address = address
        self._asker = asker
        self._socket: socket.socket | None = None
        self._backlog = bytearray()
        self._received = bytearray()
        self._method = b""
        self._is_waiting = False

    @property
    def has_room(self) -> bool:
        """Whether more of an upload may be given."""
        return len(self._backlog) < BACKLOG_BYTES_MAX

    def ask(self, request: Request) -> None:
        """Send a request's head; `give` sends its body."""
        if self._socket is not None and self._is_stale():
            self.close()
        if self._socket is None:
            self._connect()
        self._method = request.method
        self._received.clear()
        self._is_waiting = True
        self.give(request.raw)

    def _is_stale(self) -> bool:
        """Whether the store has hung up, or sent bytes that were not requested."""
        assert self._socket is not None
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def _connect(self) -> None:
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        self._socket = socket.socket(family)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = self._socket.connect_ex(self._address)
        self._loop.watch(self._socket, self._on_event)
        if code not in (0, EINPROGRESS):
            self._fail(os.strerror(code))

    def give(self, data: bytes) -> None:
        """Send bytes of a request, now or as soon as the store takes them."""
        self._backlog += data
        self._flush()

    def _flush(self) -> None:
        if self._socket is None:
            return
        try:
            while self._backlog:
                del self._backlog[: self._socket.send(self._backlog)]
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(error.strerror or str(error))

    def _on_event(self, mask: int) -> None:
        if mask & CAN_WRITE and self._backlog:
            self._flush()
            if self.has_room and self._socket is not None:
                self._asker.on_room()
        if self._is_waiting:
            self._read_head()
        else:
            self._asker.on_more()

    def _read_head(self) -> None:
        assert self._socket is not None
        try:
            while self._is_waiting:
                piece = self._socket.recv(_PIECE_BYTES)
                if not piece:
                    self._fail("the store hung up before it had answered")
                    return
                self._received += piece
                self._take_heads()
        except BlockingIOError:
            return
        except (OSError, BadHeadError) as error:
            self._fail(str(error))

    def _take_heads(self) -> None:
        while self._is_waiting and (end := end_of_head(self._received)):
            answer = answer_of(bytes(self._received[:end]), self._method)
            del self._received[:end]
            if answer.status < 200:
                self._asker.on_interim(answer.raw)
                continue
            self._is_waiting = False
            assert self._socket is not None
            body = UpstreamBody(self._socket, answer, bytes(self._received))
            self._received.clear()
            self._asker.on_answer(answer, body)

    def _fail(self, why: str) -> None:
        was_waiting, self._is_waiting = self._is_waiting, False
        self.close()
        if was_waiting:
            self._asker.on_failure(why)

    def close(self) -> None:
        """Hang up."""
        if self._socket is not None:
            self._loop.close(self._socket)
            self._socket = None
        self._backlog.clear()


class UpstreamBody:
    """The body of an answer, as far as it has come."""

    def __init__(self, source: socket.socket, answer: Answer, first: bytes) -> None:
        self._source = source
        self._first = first
        self._left = answer.length if isinstance(answer.length, int) else None
        self._chunks = ChunkedEnd() if answer.length == "chunked" else None
        self._has_closed = False
        self.length = self._left

    @property
    def has_ended(self) -> bool:
        """Whether all bytes were taken."""
        if self._left is not None:
            return self._left == 0
        return self._chunks.has_ended if self._chunks is not None else self._has_closed

    @property
    def ends_by_close(self) -> bool:
        """Whether only a closed connection tells the client that this is all."""
        return self._left is None and self._chunks is None

    def read(self, size_max: int) -> bytes:
        """Take some bytes; none if the store has sent none yet."""
        size_max = size_max if self._left is None else min(size_max, self._left)
        if self._first:
            piece, self._first = self._first[:size_max], self._first[size_max:]
        else:
            try:
                piece = self._source.recv(min(size_max, _PIECE_BYTES))
            except BlockingIOError:
                return b""
            except OSError as error:
                raise BrokenBodyError(str(error)) from error
            if not piece:
                return self._on_close()
        if self._left is not None:
            self._left -= len(piece)
        elif self._chunks is not None:
            piece = piece[: self._chunks.feed(piece)]
        return piece

    def _on_close(self) -> bytes:
        if not self.ends_by_close:
            raise BrokenBodyError("the store hung up in the middle of a body")
        self._has_closed = True
        return b""
