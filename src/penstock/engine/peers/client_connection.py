"""One connection of a client: first the handshake, then requests out and answers in.

The payload of an answer goes straight into the caller's memory: after the head of an answer, the
connection reads only its payload, directly to where it belongs, and then frames again. Heads are
read in small pieces, so that few payload bytes come along and have to be copied.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.engine.peers import handshake, wire
from penstock.engine.peers.base import Address, Answer
from penstock.engine.peers.channel import Channel
from penstock.engine.peers.pending import PendingAsk
from penstock.engine.peers.wire import AnswerFrame, Decoder, Frame, WireError

if TYPE_CHECKING:
    from penstock.engine.peers.client_link import PeerLink

HEAD_BYTES = 512
"""Bytes read at once while a head is awaited."""
TURN_BYTES = 4 * 2**20
"""Bytes read from one connection before the others have their turn."""
WAKE_BYTES = 64 * 2**10
"""While a payload arrives, the kernel wakes the thread only when so many bytes are there, or the
rest of the payload. So a link that brings fewer within `SILENCE_S` counts as silent."""
ASKS_MAX = 4096
ASKER_COST_MAX = 2**17
"""A client has at most so many requests, and requests of at most this cost (in ranges), outstanding
on one connection. Further requests wait in the `PeerLink`. A server accepts twice this cost
(`server_connection.CONNECTION_COST_MAX`), so our clients do not reach its bound."""
_WASTE_BYTES = 64 * 2**10


@dataclass(slots=True)
class _ArrivingAnswer:
    """An answer whose payload is being read."""

    pending: PendingAsk
    answer: AnswerFrame
    began_s: float
    targets: deque[memoryview]
    waste_bytes: int = 0
    """Bytes still to be read and discarded: nobody waits for this answer any more."""


class LostError(Exception):
    """The connection is over."""


class ClientConnection:
    """A connection to one address of a peer."""

    def __init__(
        self,
        channel: Channel,
        address: Address,
        asker: handshake.ClientHandshake,
        link: PeerLink,
        now_s: float,
    ) -> None:
        self.channel = channel
        self.address = address
        self.heard_s = now_s
        """When bytes last came, or the first outstanding request was sent."""
        self.is_ready = False
        self.is_leaving = False
        """Whether the server has said that it takes no more requests."""
        self.peer = ""
        """The server's name, once it is proven."""
        self.progress_marks: dict[bytes, tuple[int, float]] = {}
        """By shelf: how far it is filled, and when that last changed."""
        self.outstanding: dict[int, PendingAsk] = {}
        self.cost = 0
        self.events = 0
        """The selector events that it is registered for."""
        self._link = link
        self._asker: handshake.ClientHandshake | None = asker
        self._is_connected = self._is_set_up = False
        self._decoder = Decoder(asker.expected)
        self._arriving: _ArrivingAnswer | None = None
        self._out: deque[memoryview] = deque()
        self._number = 0
        self._said: bytes | None = None
        self._scratch = memoryview(bytearray(_WASTE_BYTES))

    @property
    def has_room(self) -> bool:
        """Return whether another request may be sent now."""
        return len(self.outstanding) < ASKS_MAX and self.cost < ASKER_COST_MAX

    def interest(self) -> int:
        """Return the selector events to wait for."""
        if not self._is_connected or self._out or self.channel.wants_write:
            return selectors.EVENT_READ | selectors.EVENT_WRITE
        return selectors.EVENT_READ

    def ask(self, pending: PendingAsk, now_s: float) -> None:
        """Queue a request, if `has_room`; `flush` sends it."""
        assert self.is_ready, "no request may precede the end of the handshake"
        if not self.outstanding:
            self.heard_s = now_s  # silence counts only while an answer is due
        self._number += 1
        self.outstanding[self._number] = pending
        self.cost += pending.cost
        if pending.ask is None:
            data = wire.framed(wire.STATUS_ASK, self._number)
        else:
            ask, said = pending.ask, self._link.say()  # gossip is sent only if it is news here
            news = said if said != self._said else b""
            self._said = said
            data = wire.pack_ask(self._number, ask.shelf, ask.ranges, ask.wait_s, news)
        self._out.append(memoryview(data))

    def flush(self) -> None:
        """Send as much as fits."""
        while self._out and self._is_set_up:
            sent = self.channel.send(self._out[0])
            if sent is None:
                return
            if sent < len(self._out[0]):
                self._out[0] = self._out[0][sent:]
            else:
                self._out.popleft()

    def on_event(self, now_s: float) -> None:
        """Read and send as much as is possible now."""
        if not self._is_set_up and not self._finish_connecting(now_s):
            return
        left_bytes = TURN_BYTES
        while left_bytes > 0:
            count = self._read(now_s)
            if count == 0:
                break
            left_bytes -= count
        self.flush()

    def _finish_connecting(self, now_s: float) -> bool:
        """Finish connecting and the TLS handshake; return whether both are done."""
        if not self._is_connected:
            fault = self.channel.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if fault:
                raise OSError(fault, os.strerror(fault))
            self._is_connected = True
            self.heard_s = now_s
        self._is_set_up = self.channel.handshake()
        if self._is_set_up and self._asker is not None:
            self._out.append(memoryview(self._asker.opening))
            self.flush()
        return self._is_set_up

    def _read(self, now_s: float) -> int:
        """Read once; return the number of bytes, or 0 if more are not likely to be there now."""
        arriving = self._arriving
        if arriving is None:
            target = self._scratch[: max(HEAD_BYTES, self._decoder.missing_bytes)]
        elif arriving.targets:
            target = arriving.targets[0]
        else:
            target = self._scratch[: arriving.waste_bytes]
        count = self.channel.recv_into(target)
        if count is None:
            return 0
        if count == 0:
            raise LostError("it hung up")
        self.heard_s = now_s
        if arriving is None:
            self._decoder.feed(target[:count])
            self._take_frames(now_s)
        else:
            self._take_payload(arriving, count)
        # A read that did not fill the target took all there was: save the call that would say so.
        return count if count == target.nbytes or self.channel.has_more() else 0

    def _take_payload(self, arriving: _ArrivingAnswer, count: int) -> None:
        if not arriving.targets:
            arriving.waste_bytes -= count
        elif count < arriving.targets[0].nbytes:
            arriving.targets[0] = arriving.targets[0][count:]
        else:
            arriving.targets.popleft()
        if not arriving.targets and not arriving.waste_bytes:
            self._arriving = None
            self.channel.wake_at(1)  # the next frame may be short
            self._arrived(arriving)
            self._take_frames(time.monotonic())
        elif arriving.targets:
            # Fewer wake-ups for a long payload; a short rest is read as soon as it is complete.
            self.channel.wake_at(min(WAKE_BYTES, arriving.targets[0].nbytes))

    def _take_frames(self, now_s: float) -> None:
        """Handle the frames that are there, until an answer whose payload is still to come."""
        while self._arriving is None:
            frame = self._decoder.next()
            if frame is None:
                return
            if self._asker is not None:
                self._on_hello(self._asker, frame)
            elif frame.kind == wire.ANSWER:
                self._on_answer(frame, now_s)
            else:
                self._on_frame(frame, now_s)

    def _on_hello(self, asker: handshake.ClientHandshake, frame: Frame) -> None:
        said = asker.on(frame)
        self._decoder.allowed = asker.expected
        self.peer = asker.peer
        if said:
            self._out.append(memoryview(said))
        if asker.is_done:
            self._asker, self.is_ready = None, True
            self._decoder.allowed = wire.FROM_SERVERS

    def _on_frame(self, frame: Frame, now_s: float) -> None:
        if frame.kind == wire.BEAT:
            for shelf, progress_mark in wire.parse_beat(frame.body).items():
                self._moved(shelf, progress_mark, now_s)
        elif frame.kind == wire.PARKED:
            pending = self._pending(frame.number)
            if pending.ask is None:
                raise WireError("a status request was parked")
            pending.park(now_s)
        elif frame.kind == wire.STATUS:
            if self._pending(frame.number).ask is not None:
                raise WireError("a request for ranges was answered with a status")
            status = wire.parse_status(frame.body)
            self._taken(frame.number).finish(status)
        elif frame.kind == wire.BYE:
            self.is_leaving = True
        else:
            raise handshake.RefusedError(handshake.reason_in(frame))

    def _moved(self, shelf: bytes, progress_mark: int, now_s: float) -> None:
        before = self.progress_marks.get(shelf)
        if before is None or before[0] != progress_mark:
            self.progress_marks[shelf] = (progress_mark, now_s)

    def _pending(self, number: int) -> PendingAsk:
        pending = self.outstanding.get(number)
        if pending is None:
            raise WireError(f"an answer to {number}, which was not asked")
        return pending

    def _taken(self, number: int) -> PendingAsk:
        pending = self._pending(number)
        del self.outstanding[number]
        self.cost -= pending.cost
        return pending

    def _on_answer(self, frame: Frame, now_s: float) -> None:
        pending = self._pending(frame.number)
        answer = wire.parse_answer(frame.body)
        if pending.ask is None:
            raise WireError("a status request was answered with ranges")
        if fault := wire.fault_in_answer(answer, pending.lengths):
            raise WireError(fault)
        if answer.gossip:
            self._link.hear(answer.gossip)
        self._moved(pending.ask.shelf, answer.progress_mark, now_s)
        began_s = pending.asked_s if pending.parked_s is None else now_s
        arriving = _ArrivingAnswer(pending, answer, began_s, deque())
        self._arriving, self._arriving_number = arriving, frame.number
        if pending.is_finished:
            arriving.waste_bytes = answer.payload_bytes
        else:
            arriving.targets = targets_of(pending, answer)
        self._take_buffered(arriving)

    def _take_buffered(self, arriving: _ArrivingAnswer) -> None:
        """Take the payload bytes that were read together with the head."""
        while arriving.targets:
            count = self._decoder.take(arriving.targets[0])
            if count < arriving.targets[0].nbytes:
                arriving.targets[0] = arriving.targets[0][count:]
                return
            arriving.targets.popleft()
        while arriving.waste_bytes:
            count = self._decoder.take(self._scratch[: arriving.waste_bytes])
            if not count:
                return
            arriving.waste_bytes -= count
        self._arriving = None
        self._arrived(arriving)

    def _arrived(self, arriving: _ArrivingAnswer) -> None:
        pending, answer = self._taken(self._arriving_number), arriving.answer
        seconds = time.monotonic() - arriving.began_s
        self._link.answered(pending, answer.payload_bytes, seconds)
        absent: tuple[int, ...] = ()
        if 0 in answer.is_here:
            absent = tuple(n for n, is_here in enumerate(answer.is_here) if not is_here)
        pending.finish(
            Answer(
                absent=absent,
                sums=answer.sums,
                progress_mark=answer.progress_mark,
                was_parked=pending.parked_s is not None,
                seconds=seconds,
            )
        )


def targets_of(pending: PendingAsk, answer: AnswerFrame) -> deque[memoryview]:
    """Return where the payload goes; absent ranges leave gaps, ranges between gaps are joined."""
    if 0 not in answer.is_here:
        return deque([pending.into[: answer.payload_bytes]] if answer.payload_bytes else [])
    targets: deque[memoryview] = deque()
    begin = end = 0
    for length, is_here in zip(pending.lengths, answer.is_here, strict=True):
        if not is_here:
            if begin < end:
                targets.append(pending.into[begin:end])
            begin = end = end + length
        else:
            end += length
    if begin < end:
        targets.append(pending.into[begin:end])
    return targets
