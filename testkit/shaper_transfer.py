"""An answer in flight to the client, with its fault.

Bodies come from a file (sent by the kernel, no byte passes through here), from memory, or from the
store behind the shaper. A transfer sends some bytes on request, and returns what to do next.
"""

from __future__ import annotations

import enum
import os
import socket
from typing import Protocol

from testkit.shaper_draws import Treatment


class Sent(enum.Enum):
    """What to do after some bytes were sent."""

    MORE = enum.auto()
    """There is more to send."""
    FULL = enum.auto()
    """Wait until the client has read."""
    EMPTY = enum.auto()
    """Wait until the store has sent."""
    STALL = enum.auto()
    """Be silent for a while."""
    DONE = enum.auto()
    """The answer is out."""
    CUT = enum.auto()
    """Nothing more comes: hang up."""
    RESET = enum.auto()
    """Nothing more comes: break the connection."""


class BrokenBodyError(Exception):
    """The body ended before its length."""


class Body(Protocol):
    """Where the bytes of an answer come from."""

    @property
    def length(self) -> int | None:
        """How many in all; None where only the end will tell."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether all were taken."""
        ...

    def read(self, size_max: int) -> bytes:
        """Take some bytes; none if there are none yet."""
        ...


class MemoryBody:
    """Bytes that are there."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def length(self) -> int:
        """How many in all."""
        return len(self._data)

    @property
    def has_ended(self) -> bool:
        """Whether all were taken."""
        return self._at >= len(self._data)

    def read(self, size_max: int) -> bytes:
        """Take some bytes."""
        piece = self._data[self._at : self._at + size_max]
        self._at += len(piece)
        return piece


class OpenFile:
    """A file's descriptor; closed when nobody holds it any more."""

    __slots__ = ("descriptor",)

    def __init__(self, path: str) -> None:
        self.descriptor = -1  # what `__del__` finds when the next line fails
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


class FileBody:
    """A part of a file."""

    def __init__(self, file: OpenFile, start: int, stop: int) -> None:
        self._file = file
        self._at = start
        self._stop = stop
        self.length = stop - start
        # A cold file is read while the answer waits to be due, not when it is sent.
        os.posix_fadvise(file.descriptor, start, self.length, os.POSIX_FADV_WILLNEED)

    @property
    def has_ended(self) -> bool:
        """Whether all were taken."""
        return self._at >= self._stop

    def read(self, size_max: int) -> bytes:
        """Take some bytes."""
        size_max = min(size_max, self._stop - self._at)
        data = os.pread(self._file.descriptor, size_max, self._at)
        return self._moved(len(data), data)

    def send(self, target: socket.socket, size_max: int) -> int:
        """Have the kernel send some bytes, and return how many."""
        size_max = min(size_max, self._stop - self._at)
        count = os.sendfile(target.fileno(), self._file.descriptor, self._at, size_max)
        self._moved(count, b"")
        return count

    def _moved(self, count: int, data: bytes) -> bytes:
        if count == 0:
            raise BrokenBodyError(f"the file ends at {self._at}, it had {self._stop} bytes")
        self._at += count
        return data


class Transfer:
    """Sends one answer."""

    def __init__(
        self, target: socket.socket, head: bytes, body: Body, treatment: Treatment
    ) -> None:
        self._target = target
        self._head = memoryview(head)
        self._body = body
        self._pending = memoryview(b"")
        self._fault = treatment.fault
        length = body.length or 0
        # The last byte at the latest: after it, nothing would be missing.
        self._fault_at = min(int(treatment.place * length), max(length - 1, 0))
        self.size_bytes = 0
        """Bytes of the body that have been sent."""

    def send(self, size_max: int) -> tuple[Sent, int]:
        """Send at most so many bytes of the body; return how it went and how many they were."""
        before = self.size_bytes
        try:
            state = self._at_fault() or self._send_head() or self._send_body(size_max)
        except BlockingIOError:
            state = Sent.FULL
        return state, self.size_bytes - before

    def _at_fault(self) -> Sent | None:
        """Do what shall go wrong, when its place is reached."""
        if self._fault is None or self.size_bytes < self._fault_at:
            return None
        match self._fault.kind:
            case "stall":
                self._fault = None
                return Sent.STALL
            case "reset":
                return Sent.RESET
            case "truncate":
                return self._send_head() or Sent.CUT
        return None

    def _send_head(self) -> Sent | None:
        if not self._head:
            return None
        # The first bytes of the body leave with it, in one packet.
        flag = 0 if self._body.has_ended or self._is_cut else socket.MSG_MORE
        self._head = self._head[self._target.send(self._head, flag) :]
        return Sent.MORE if self._head else None

    @property
    def _is_cut(self) -> bool:
        return self._fault is not None and self._fault_at == 0

    def _send_body(self, size_max: int) -> Sent:
        if not self._pending and not self._body.has_ended:
            if self._fault is not None:
                size_max = self._until_fault(size_max)
            elif isinstance(self._body, FileBody):
                self.size_bytes += self._body.send(self._target, size_max)
                return self._state()
            piece = self._body.read(size_max)
            if not piece and not self._body.has_ended:
                return Sent.EMPTY
            self._pending = memoryview(self._changed(piece))
        if self._pending:
            count = self._target.send(self._pending)
            self._pending = self._pending[count:]
            self.size_bytes += count
        return Sent.MORE if self._pending else self._state()

    def _state(self) -> Sent:
        return Sent.DONE if self._body.has_ended else Sent.MORE

    def _until_fault(self, size_max: int) -> int:
        assert self._fault is not None
        left = self._fault_at - self.size_bytes
        return 1 if left == 0 else min(size_max, left)

    def _changed(self, piece: bytes) -> bytes:
        """Return the piece, with one byte changed if it is the one that shall be wrong."""
        if self._fault is None or self._fault.kind != "corrupt":
            return piece
        if self.size_bytes < self._fault_at:
            return piece
        self._fault = None
        return bytes([piece[0] ^ 0xFF])
