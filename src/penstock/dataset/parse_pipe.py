"""Messages between a process and its parser process: a head of plain values, then raw bytes.

Both ends use this class. Heads are msgpack and nothing is ever unpickled from a parser: it has read
bytes of strangers.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.storage.base import Buffer

_FRAME = struct.Struct("<BQQ")
_PIPE_BYTES = 1 << 20
_JOINED_BYTES_MAX = 1 << 16
"""Buffers up to this size are copied together: a call of the kernel takes as long."""

CALL, ANSWER, STORE = range(3)
"""Kinds of messages: what is to be parsed; what came of it; a question to the store of the caller,
and its answer."""
PROGRESS_BYTES = 8
"""Of memory that both ends share: the number of samples that were begun. What a process has written
there is read after its death."""


class ParserPipe:
    """Two pipes, one for each direction."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd, self._write_fd = read_fd, write_fd
        for descriptor in (read_fd, write_fd):
            # Slower, but as good, where a user or a system may not.
            with contextlib.suppress(OSError, AttributeError):
                fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def send(self, kind: int, head: Any = None, buffers: Sequence[Buffer] = ()) -> None:
        """Write one message."""
        text = b"" if head is None else msgspec.msgpack.encode(head)
        size_bytes = sum(memoryview(buffer).nbytes for buffer in buffers)
        pending = bytearray(_FRAME.pack(kind, len(text), size_bytes) + text)
        for buffer in buffers:
            if memoryview(buffer).nbytes <= _JOINED_BYTES_MAX:
                pending += buffer
            if len(pending) > _JOINED_BYTES_MAX or memoryview(buffer).nbytes > _JOINED_BYTES_MAX:
                self._write(pending)
                pending = bytearray()
            if memoryview(buffer).nbytes > _JOINED_BYTES_MAX:
                self._write(buffer)
        self._write(pending)

    def _write(self, data: Buffer) -> None:
        rest = memoryview(data).cast("B")
        while rest:
            rest = rest[os.write(self._write_fd, rest) :]

    def receive(self) -> tuple[int, Any, memoryview]:
        """Return kind, head and bytes of the next message; `EOFError` when there is none."""
        kind, head_bytes, body_bytes = _FRAME.unpack(self._read(_FRAME.size))
        head = msgspec.msgpack.decode(self._read(head_bytes)) if head_bytes else None
        return kind, head, self._read(body_bytes)

    def _read(self, length: int) -> memoryview:
        data = bytearray(length)
        rest = memoryview(data)
        while rest:
            count = os.readv(self._read_fd, [rest])
            if not count:
                raise EOFError
            rest = rest[count:]
        return memoryview(data).toreadonly()


def cut(data: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    """Return the buffers that a message was made of.

    >>> [bytes(piece) for piece in cut(memoryview(b"abc"), [1, 0, 2])]
    [b'a', b'', b'bc']
    """
    out, at = [], 0
    for size in sizes:
        out.append(data[at : at + size])
        at += size
    return out
