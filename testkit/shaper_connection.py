"""A connection of a client: a request, a delay, an answer, and the next request.

An answer is sent when three things have happened: the store has answered, the answer is due, and it
is the connection's turn (see `shaper_server.Pacer`).
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import TYPE_CHECKING

from testkit.shaper_draws import Treatment
from testkit.shaper_http import (
    Answer,
    BadHeadError,
    ChunkedEnd,
    Request,
    end_of_head,
    error_of,
    request_of,
)
from testkit.shaper_loop import CAN_READ, CAN_WRITE, HAS_ENDED, Timer
from testkit.shaper_pace import ByteRate
from testkit.shaper_shape import Shape
from testkit.shaper_transfer import Body, BrokenBodyError, MemoryBody, Sent, Transfer
from testkit.shaper_upstream import Upstream, UpstreamBody

if TYPE_CHECKING:
    from testkit.shaper_server import Server

_PIECE_BYTES = 64 * 2**10
_RESET = struct.pack("ii", 1, 0)
"""A linger time of zero: closing resets the connection."""
_SLOW_DOWN = error_of(503, "SlowDown", "Please reduce your request rate.")


class Connection:
    """Serves one client until either side hangs up."""

    def __init__(self, server: Server, client: socket.socket) -> None:
        self._server = server
        self._socket = client
        self._received = bytearray()
        self._has_unread = False
        self._upstream: Upstream | None = None
        self._timer: Timer | None = None
        self._is_open = True
        self._shape: Shape | None = None
        self._rate = ByteRate(None)
        self.wanted = Sent.DONE
        """What the transfer waits for."""
        self.is_queued = False
        """Whether the pacer decides when it goes on."""
        self._forget()

    def _forget(self) -> None:
        """Be ready for the next request."""
        self._request: Request | None = None
        self._treatment = Treatment(0.0)
        self._answer: tuple[bytes, Body] | None = None
        self._transfer: Transfer | None = None
        self._upload: int | ChunkedEnd = 0
        self._due_s = 0.0
        self._is_due = False
        self._hangs_up = False

    def rate_of(self, shape: Shape) -> ByteRate:
        """Return the rate of this connection; a new shape starts a new rate."""
        if shape is not self._shape:
            self._shape, self._rate = shape, ByteRate(shape.connection_bytes_s)
        return self._rate

    def on_event(self, mask: int) -> None:
        """Handle a change of the client's socket."""
        if mask & HAS_ENDED:
            self._abort()
            return
        if mask & CAN_WRITE and self.wanted is Sent.FULL:
            self._join()
        if mask & CAN_READ:
            self._has_unread = True
            if self._request is None:
                self._read_request()
            elif self._has_upload:
                self._move_upload()

    # -- the request -------------------------------------------------------------------------

    def _read_request(self) -> None:
        """Take the next request, if all of its head is there."""
        try:
            while not (end := end_of_head(self._received)):
                if not self._receive():
                    return
            request = request_of(bytes(self._received[:end]))
            del self._received[:end]
            self._begin(request)
        except (OSError, BadHeadError):
            self.close()

    def _receive(self) -> bool:
        """Receive what the client has sent; return whether there was anything."""
        if not self._has_unread:
            return False
        try:
            piece = self._socket.recv(_PIECE_BYTES)
        except BlockingIOError:
            self._has_unread = False
            return False
        if not piece:
            raise ConnectionResetError("the client hung up")
        # A piece that is not full was all there was: whatever comes later is told as an event.
        self._has_unread = len(piece) == _PIECE_BYTES
        self._received += piece
        return True

    def _begin(self, request: Request) -> None:
        length = request.upload
        assert length != "until close"
        self._request = request
        self._upload = ChunkedEnd() if length == "chunked" else length
        now_s = self._server.loop.now_s()
        self._due_s, treatment = self._server.admit(request, now_s)
        if treatment is not None:
            self._treatment = treatment
        self._ask(request, is_refused=treatment is None)
        if self._is_open and self._due_s <= now_s:
            self._is_due = True
            self._proceed()
        elif self._is_open:
            self._timer = self._server.loop.at(self._due_s, self._on_due)

    def _ask(self, request: Request, *, is_refused: bool) -> None:
        """Answer the request here, or pass it on to the store."""
        if is_refused:
            self._server.tally.unavailable += 1
            self._settle(_SLOW_DOWN[0], MemoryBody(_SLOW_DOWN[1]))
        elif self._server.folder is not None:
            self._settle(*self._server.folder.answer(request))
        else:
            if self._upstream is None:
                self._upstream = Upstream(self._server.loop, self._server.address, self)
            self._upstream.ask(request)
            self._move_upload()

    @property
    def _has_upload(self) -> bool:
        if isinstance(self._upload, ChunkedEnd):
            return not self._upload.has_ended
        return self._upload > 0

    def _move_upload(self) -> None:
        """Pass on the body of a request, or discard it if the answer is there already."""
        try:
            while self._has_upload:
                sink = self._upstream if self._answer is None else None
                if sink is not None and not sink.has_room:
                    return
                if not self._received and not self._receive():
                    return
                piece = self._take_upload()
                self._server.tally.upload_bytes += len(piece)
                if sink is not None:
                    sink.give(piece)
        except (OSError, BadHeadError):
            self._abort()
            return
        self._proceed()

    def _take_upload(self) -> bytes:
        if isinstance(self._upload, ChunkedEnd):
            count = self._upload.feed(self._received)
        else:
            count = min(self._upload, len(self._received))
            self._upload -= count
        piece = bytes(self._received[:count])
        del self._received[:count]
        return piece

    # -- the answer --------------------------------------------------------------------------

    def _settle(self, head: bytes, body: Body) -> None:
        """Keep the answer until the upload has ended."""
        assert self._request is not None
        self._answer = head, body
        if self._has_upload and b"expect" in self._request.headers:
            self._upload, self._hangs_up = 0, True  # the client waits for leave to send it
        self._move_upload()

    def on_answer(self, answer: Answer, body: UpstreamBody) -> None:
        """Handle the head of the store's answer."""
        # A store that answers before the end of an upload may or may not wait for the rest.
        self._hangs_up = body.ends_by_close or self._has_upload
        self._settle(answer.raw, body)

    def on_interim(self, raw: bytes) -> None:
        """Tell the client that the store wants the upload."""
        with contextlib.suppress(OSError):
            self._socket.send(raw)

    def on_more(self) -> None:
        """Go on sending: the store may have sent more."""
        if self.wanted is Sent.EMPTY:
            self._join()

    def on_room(self) -> None:
        """Go on with the upload: the store takes more."""
        if self._has_upload:
            self._move_upload()

    def on_failure(self, why: str) -> None:
        """Handle a store that does not answer."""
        self._server.tally.failures += 1
        head, body = error_of(502, "BadGateway", f"the store behind the shaper: {why}")
        self._settle(head, MemoryBody(body))

    def _on_due(self) -> None:
        self._is_due, self._timer = True, None
        self._server.tally.due(self._server.loop.now_s() - self._due_s)
        self._proceed()

    def _proceed(self) -> None:
        """Begin to answer when the answer is there, due, and the upload has ended."""
        is_ready = self._is_due and self._answer is not None and not self._has_upload
        if not is_ready or self._transfer is not None:
            return
        assert self._request is not None
        assert self._answer is not None
        head, body = self._answer
        if self._request.method == b"HEAD":
            body = MemoryBody(b"")
        self._transfer = Transfer(self._socket, head, body, self._applicable(head, body))
        self._join()

    def _applicable(self, head: bytes, body: Body) -> Treatment:
        """Return the treatment, without a fault that cannot happen to this answer."""
        fault = self._treatment.fault
        if fault is None:
            return self._treatment
        is_good = head[9:10] == b"2" and bool(body.length)
        if fault.kind in ("truncate", "corrupt") and not is_good:
            return Treatment(self._treatment.latency_s)
        self._server.tally.faults[fault.kind] += 1
        return self._treatment

    def _join(self) -> None:
        self.wanted = Sent.MORE
        self._server.pacer.join(self)

    def send(self, size_max: int) -> int:
        """Send at most a number of bytes of the body, and return how many were sent."""
        if self._transfer is None or not self._is_open:
            return 0
        count = 0
        try:
            self.wanted, count = self._transfer.send(size_max)
        except BrokenBodyError:
            self._server.tally.failures += 1
            self.wanted = Sent.CUT
        except OSError:
            self._abort()
            return 0
        self._server.tally.body_bytes += count
        self._after_sending()
        return count

    def _after_sending(self) -> None:
        match self.wanted:
            case Sent.STALL:
                assert self._treatment.fault is not None
                until_s = self._server.loop.now_s() + self._treatment.fault.stall_s
                self._timer = self._server.loop.at(until_s, self._join)
            case Sent.RESET:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                self.close()
            case Sent.CUT:
                self.close()
            case Sent.DONE:
                self._finish()

    def _finish(self) -> None:
        assert self._request is not None
        if self._hangs_up or self._request.wants_close:
            self.close()
            return
        self._server.tally.end()
        self._forget()
        self._read_request()

    def _abort(self) -> None:
        """Handle a client that hung up."""
        if self._request is not None and self._is_open:
            self._server.tally.aborted += 1
        self.close()

    def close(self) -> None:
        """Hang up."""
        if not self._is_open:
            return
        self._is_open, self.wanted = False, Sent.DONE
        if self._timer is not None:
            self._timer.cancel()
        if self._request is not None:
            self._server.tally.end()
        if self._upstream is not None:
            self._upstream.close()
        self._server.loop.close(self._socket)
        self._forget()
