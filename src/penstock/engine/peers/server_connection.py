"""One connection of a server: hello first, then asks in and answers out.

Nothing here blocks. Reading stops while as much is unanswered as the bounds allow, which stops the
asker in its turn; a frame that has begun is sent to its end before the next, at most a turn's bytes
at a time, so that connections share a loop fairly and a slow reader costs nobody else anything.
"""

from __future__ import annotations

import errno
import os
import selectors
from collections import deque
from typing import Protocol

from penstock.engine.peers import handshake, wire
from penstock.engine.peers.base import HeldFile
from penstock.engine.peers.channel import Channel
from penstock.engine.peers.request_router import RequestRouter, ServerState
from penstock.engine.peers.requests import OutgoingFrame, PeerRequest
from penstock.engine.peers.wire import Decoder

TURN_BYTES = 2**20
"""Sent on one connection before others have their turn."""
BUFFERS_MAX = 256
"""Given to one system call."""
READ_BYTES = 64 * 2**10
COST_MAX = 2**18
"""Of the unanswered requests of one connection: about as many ranges."""


class ConnectionBounds(Protocol):
    """What is left of the bounds that all connections of a loop share."""

    def has_room(self) -> bool:
        """Return whether another request may be taken in."""
        ...

    def took(self, cost: int) -> None:
        """Count a request; negative: one that is gone."""
        ...


class GoneError(Exception):
    """The connection is over; the text says why, empty where there is nothing to say."""


class ServerConnection:
    """A connection that was accepted."""

    def __init__(
        self,
        channel: Channel,
        serving: ServerState,
        router: RequestRouter,
        bounds: ConnectionBounds,
        now_s: float,
    ) -> None:
        self.channel = channel
        self.began_s = self.moved_s = now_s
        """When it came; when it last sent or had nothing to send."""
        self.peer, self.run_id = "", b""
        self.said: bytes | None = None
        self.is_known = False
        """Whether it has proven who it is."""
        self.cost = 0
        self.is_held_up = False
        """Whether frames that have been read wait for room."""
        self._hello: handshake.ServerHandshake | None = handshake.ServerHandshake(
            name=serving.name, secrets=serving.secrets, nonce=os.urandom(handshake.NONCE_BYTES)
        )
        self._is_shaken = not channel.has_handshake
        self._decoder = Decoder(self._hello.expected)
        self._hello_bytes = 0
        self._router, self._bounds = router, bounds
        self._served = serving.shelves.served
        self._out: deque[OutgoingFrame] = deque()

    @property
    def is_full(self) -> bool:
        """Return whether no more is taken in for now."""
        return self.cost >= COST_MAX or not self._bounds.has_room()

    @property
    def has_output(self) -> bool:
        """Return whether something waits to be sent."""
        return bool(self._out)

    @property
    def is_challenged(self) -> bool:
        """Return whether a proof is due."""
        return self._hello is not None and self._hello.expected == (wire.PROOF,)

    def interest(self) -> int:
        """Return what to wait for, as selectors say it."""
        events = 0 if self.is_full else selectors.EVENT_READ
        if self._out or self.channel.wants_write:
            events |= selectors.EVENT_WRITE
        return events

    def on_readable(self, scratch: memoryview, now_s: float) -> None:
        """Read and take in what has come."""
        if not self._is_shaken:
            self._is_shaken = self.channel.handshake()
            if not self._is_shaken:
                return
        if self.is_held_up:
            self.take_in(now_s)
        while not self.is_full:
            count = self.channel.recv_into(scratch)
            if count is None:
                return
            if count == 0:
                raise GoneError("left without a proof" if self.is_challenged else "")
            if self._hello is not None:
                self._hello_bytes += count
                if self._hello_bytes > handshake.BYTES_MAX:
                    raise wire.WireError(f"more than {handshake.BYTES_MAX} bytes before a proof")
            self._decoder.feed(scratch[:count])
            self.take_in(now_s)
            if count < scratch.nbytes and not self.channel.has_more():
                return

    def take_in(self, now_s: float) -> None:
        """Take in the frames that are there, as far as the bounds allow."""
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
                self._bounds.took(request.cost)
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
        """Send a frame after those that wait."""
        for segment in outgoing.segments:
            if segment.file.is_disk:
                # All at once, so that the device sees more than one read at a time.
                _ask_ahead(segment.file, segment.offset, segment.length)
        self._out.append(outgoing)

    def finished(self, request: PeerRequest) -> None:
        """Take a request off the bounds."""
        self.cost -= request.cost
        self._bounds.took(-request.cost)

    def flush(self, now_s: float) -> None:
        """Send a turn's bytes, or as much as fits."""
        left_bytes = TURN_BYTES
        while self._out and left_bytes > 0 and self._is_shaken:
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
        """Send frames with their bytes in one call, as far as files can be mapped."""
        buffers = _gathered(self._out, limit_bytes)
        if not buffers:
            return self._send(self._out[0], limit_bytes)
        try:
            sent = self.channel.send_many(buffers)
        except OSError as error:
            if error.errno != errno.EFAULT:
                raise
            self.channel.copies = False  # a file was cut short: the other way tells which
            return 0
        if sent is not None:
            self._take_off(sent)
        return sent

    def _take_off(self, sent: int) -> None:
        """Forget bytes that have been sent."""
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
        """Send some of a frame, and take it off when it is done."""
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
            if error.errno == errno.EIO:  # the bytes were promised, so the connection is lost
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
        """Let nobody be promised again what could not be read."""
        if outgoing.request is None or outgoing.shelf is None:
            return
        at = outgoing.segments[0].offset
        ranges = outgoing.request.ranges
        offsets = ranges[:, wire.UNIT_OFFSET]
        is_hit = (offsets <= at) & (at < offsets + ranges[:, wire.UNIT_LENGTH])
        for unit in ranges[is_hit, wire.UNIT].tolist():
            outgoing.shelf.spoil(unit)

    def close(self) -> None:
        """Hang up; what was unanswered is off the bounds."""
        self.channel.close()
        self._bounds.took(-self.cost)
        self.cost = 0
        self._out.clear()


def _gathered(out: deque[OutgoingFrame], limit_bytes: int) -> list[memoryview]:
    buffers: list[memoryview] = []
    for outgoing in out:
        if outgoing.head:
            buffers.append(outgoing.head)
        for segment in outgoing.segments:
            length = min(segment.length, limit_bytes)
            # From a disk the other way reads ahead.
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
