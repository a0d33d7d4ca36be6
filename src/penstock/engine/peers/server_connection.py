"""One connection of a server: first the handshake, then requests in and answers out.

Nothing here blocks except a read from a disk. The connection stops reading while its unanswered
requests reach a bound, so that TCP slows the client down. A frame is sent to its end before the
next one begins, and at most `TURN_BYTES` in one turn: so connections share a loop fairly, and a
slow reader delays only itself.
"""

from __future__ import annotations

import errno
import os
import selectors
from collections import deque
from typing import TYPE_CHECKING

from penstock.engine.peers import handshake, wire
from penstock.engine.peers.base import HeldFile
from penstock.engine.peers.channel import Channel
from penstock.engine.peers.request_router import RequestRouter, ServerState
from penstock.engine.peers.requests import OutgoingFrame, PeerRequest
from penstock.engine.peers.wire import Decoder

if TYPE_CHECKING:
    from penstock.engine.peers.server_loop import ServerLoop

TURN_BYTES = 2**20
"""Bytes sent on one connection before the others have their turn."""
BUFFERS_MAX = 256
"""Buffers in one system call."""
READ_BYTES = 64 * 2**10
CONNECTION_COST_MAX = 2**18
"""A server reads no more from a connection while its unanswered requests cost this much, in
ranges."""


class GoneError(Exception):
    """The connection is over; the text says why, and is empty if the client just left."""


class ServerConnection:
    """A connection that was accepted."""

    def __init__(
        self,
        channel: Channel,
        serving: ServerState,
        router: RequestRouter,
        loop: ServerLoop,
        now_s: float,
    ) -> None:
        self.channel = channel
        self.began_s = self.moved_s = now_s
        """When it was accepted; when it last sent bytes or had none to send."""
        self.peer, self.run_id = "", b""
        self.said: bytes | None = None
        self.is_known = False
        """Whether the client has proven who it is."""
        self.cost = 0
        self.is_held_up = False
        """Whether frames that have been read wait until the bounds allow them."""
        self._hello: handshake.ServerHandshake | None = handshake.ServerHandshake(
            name=serving.name, secrets=serving.secrets, nonce=os.urandom(handshake.NONCE_BYTES)
        )
        self._is_set_up = not channel.has_handshake
        self._decoder = Decoder(self._hello.expected)
        self._hello_bytes = 0
        self._router, self._loop = router, loop
        self._served = serving.shelves.served
        self._out: deque[OutgoingFrame] = deque()

    @property
    def is_full(self) -> bool:
        """Return whether the bounds allow no more requests for now."""
        return self.cost >= CONNECTION_COST_MAX or not self._loop.has_room()

    @property
    def has_output(self) -> bool:
        """Return whether something waits to be sent."""
        return bool(self._out)

    @property
    def is_challenged(self) -> bool:
        """Return whether the client has yet to send its proof."""
        return self._hello is not None and self._hello.expected == (wire.PROOF,)

    def interest(self) -> int:
        """Return the selector events to wait for."""
        events = 0 if self.is_full else selectors.EVENT_READ
        if self._out or self.channel.wants_write:
            events |= selectors.EVENT_WRITE
        return events

    def on_readable(self, scratch: memoryview, now_s: float) -> None:
        """Read bytes and handle the frames in them."""
        if not self._is_set_up:
            self._is_set_up = self.channel.handshake()
            if not self._is_set_up:
                return
        if self.is_held_up:
            self.handle_frames(now_s)
        while not self.is_full:
            count = self.channel.recv_into(scratch)
            if count is None:
                return
            if count == 0:
                raise GoneError("left without a proof" if self.is_challenged else "")
            if self._hello is not None:
                self._hello_bytes += count  # over all reads: small frames must not add up
                if self._hello_bytes > handshake.BYTES_MAX:
                    raise wire.WireError(f"more than {handshake.BYTES_MAX} bytes before a proof")
            self._decoder.feed(scratch[:count])
            self.handle_frames(now_s)
            if count < scratch.nbytes and not self.channel.has_more():
                return

    def handle_frames(self, now_s: float) -> None:
        """Handle the frames that have been read, as far as the bounds allow."""
        while not self.is_full:
            frame = self._decoder.next()
            if frame is None:
                self.is_held_up = False
                return
            if self._hello is not None:
                self._on_hello(self._hello, frame)
            elif frame.kind == wire.ASK:
                request = self._router.asked(self, frame, now_s)
                self.cost += request.cost
                self._loop.add_cost(request.cost)
                self._router.look(request, self, now_s)
            elif frame.kind == wire.STATUS_ASK:
                self._router.status_asked(self, frame)
            else:
                raise GoneError("")
        self.is_held_up = True

    def _on_hello(self, machine: handshake.ServerHandshake, frame: wire.Frame) -> None:
        said = machine.on(frame)
        self._decoder.allowed = machine.expected
        self.put(OutgoingFrame(head=memoryview(said)))
        self.peer = machine.peer
        if machine.is_done:
            self._hello, self.is_known, self.run_id = None, True, machine.run_id
            self._decoder.allowed = wire.FROM_ASKERS

    def put(self, outgoing: OutgoingFrame) -> None:
        """Queue a frame behind those that wait to be sent."""
        for segment in outgoing.segments:
            if segment.file.is_disk:
                # For all segments at once, so that the device gets several reads at a time.
                _ask_ahead(segment.file, segment.offset, segment.length)
        self._out.append(outgoing)

    def finished(self, request: PeerRequest) -> None:
        """Free a request's share of the bounds."""
        self.cost -= request.cost
        self._loop.add_cost(-request.cost)

    def flush(self, now_s: float) -> None:
        """Send the bytes of one turn, or as much as fits."""
        left_bytes = TURN_BYTES
        while self._out and left_bytes > 0 and self._is_set_up:
            if self.channel.copies:
                sent = self._send_gathered(left_bytes)
            else:
                sent = self._send(self._out[0], left_bytes)
            if sent is None:
                return
            self.moved_s = now_s
            left_bytes -= sent
        if not self._out:
            self.moved_s = now_s

    def _send_gathered(self, limit_bytes: int) -> int | None:
        """Send heads and mapped bytes of several frames in one call."""
        buffers = _gathered(self._out, limit_bytes)
        if not buffers:
            return self._send(self._out[0], limit_bytes)
        try:
            sent = self.channel.send_many(buffers)
        except OSError as error:
            if error.errno != errno.EFAULT:
                raise
            self.channel.copies = False  # a file was truncated: `send_file` will find which one
            return 0
        if sent is not None:
            self._remove_sent(sent)
        return sent

    def _remove_sent(self, sent: int) -> None:
        """Remove bytes that have been sent from the queue."""
        while self._out:
            first = self._out[0]
            count = min(sent, len(first.head))
            first.head = first.head[count:]
            sent -= count
            while sent and first.segments:
                segment = first.segments[0]
                count = min(sent, segment.length)
                segment.offset += count
                segment.length -= count
                sent -= count
                if not segment.length:
                    first.segments.popleft()
            if first.head or first.segments:
                return
            self._sent(first)

    def _sent(self, first: OutgoingFrame) -> None:
        self._out.popleft()
        request = first.request
        if request is not None:
            self.finished(request)
            if self._served is not None:
                self._served(self.peer, request.asked_ns, first.size_bytes, len(request.ranges))

    def _send(self, first: OutgoingFrame, limit_bytes: int) -> int | None:
        """Send a part of a frame, and take the frame off the queue at its end."""
        if first.head:
            sent = self.channel.send(first.head, more=bool(first.segments))
            if sent is None:
                return None
            first.head = first.head[sent:]
        elif first.segments:
            sent = self._send_segment(first, limit_bytes)
            if sent is None:
                return None
        else:
            sent = 0
        if not first.head and not first.segments:
            self._sent(first)
        return sent

    def _send_segment(self, first: OutgoingFrame, limit_bytes: int) -> int | None:
        segment = first.segments[0]
        try:
            sent = self.channel.send_file(
                segment.file, segment.offset, min(segment.length, limit_bytes)
            )
        except OSError as error:
            # The head has announced these bytes, so the connection cannot go on without them.
            if error.errno == errno.EIO:
                self._spoil(first)
            raise
        if sent is None:
            return None
        if sent == 0:
            self._spoil(first)
            raise GoneError("a tier's file ends before the unit that it should hold")
        segment.offset += sent
        segment.length -= sent
        if not segment.length:
            first.segments.popleft()
        return sent

    def _spoil(self, outgoing: OutgoingFrame) -> None:
        """Count the units at the current position as absent: they could not be read."""
        if outgoing.request is None or outgoing.shelf is None:
            return
        at = outgoing.segments[0].offset
        ranges = outgoing.request.ranges
        offsets = ranges[:, wire.UNIT_OFFSET]
        is_hit = (offsets <= at) & (at < offsets + ranges[:, wire.UNIT_LENGTH])
        for unit in ranges[is_hit, wire.UNIT].tolist():
            outgoing.shelf.spoil(unit)

    def close(self) -> None:
        """Close the connection, and free its share of the bounds."""
        self.channel.close()
        self._loop.add_cost(-self.cost)
        self.cost = 0
        self._out.clear()


def _gathered(out: deque[OutgoingFrame], limit_bytes: int) -> list[memoryview]:
    buffers: list[memoryview] = []
    for outgoing in out:
        if outgoing.head:
            buffers.append(outgoing.head)
        for segment in outgoing.segments:
            length = min(segment.length, limit_bytes)
            # Bytes on a disk are left to `send_file`, which reads ahead.
            is_mapped = not segment.file.is_disk and length > 0
            view = segment.file.mapped(segment.offset, length) if is_mapped else None
            if view is None:
                return buffers
            buffers.append(view)
            limit_bytes -= length
            if length < segment.length or len(buffers) >= BUFFERS_MAX:
                return buffers
    return buffers


def _ask_ahead(file: HeldFile, offset: int, length: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.descriptor, offset, length, os.POSIX_FADV_WILLNEED)
