"""Messages between the processes of one loader: whole frames over a socket pair, with descriptors.

Both ends run the same code of ours, so the messages need no version and no schema. A frame is a
length and as many bytes. Open files travel with the first bytes of a frame.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
from array import array
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

_HEADER = struct.Struct("<QHH")
"""Bytes that follow, files that come with this frame, and whether it brings nothing but files."""
_FILES_MAX = 128
"""Files with one frame; the kernel takes 253."""
_FILES_ROOM = socket.CMSG_SPACE(_FILES_MAX * array("i").itemsize)


class ChannelClosed(ConnectionError):  # noqa: N818
    """The other end is gone."""


class FrameChannel:
    """One end of a socket pair. Any thread may send; one at a time may receive."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._poll = select.poll()  # Not `select`, which knows no descriptor above 1,023.
        self._poll.register(end, select.POLLIN)
        # Held for a whole frame: it takes several calls, and frames of two threads must not mix.
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """Return the descriptor, to wait on."""
        return self._end.fileno()

    def is_ready(self, wait_s: float = 0.0) -> bool:
        """Return whether a frame, or the end of the channel, can be received within some time."""
        if self._end.fileno() < 0:
            return True  # Closed in this process: the number may be another file's by now.
        return bool(self._poll.poll(1000 * wait_s))

    def wait(self) -> None:
        """Return when a frame, or the end of the channel, can be received."""
        with suppress(OSError):  # Who receives next gets the error.
            self._end.recv(1, socket.MSG_PEEK)

    def send(self, data: bytes, files: Sequence[int] = ()) -> None:
        """Send a frame, and wait while the other end has no room for it."""
        with self._sending:
            for start in range(0, max(0, len(files) - _FILES_MAX), _FILES_MAX):
                self._send(b"", files[start : start + _FILES_MAX], more=True)
            rest = len(files) - (len(files) - 1) // _FILES_MAX * _FILES_MAX if files else 0
            self._send(data, files[len(files) - rest :], more=False)

    def _send(self, data: bytes, files: Sequence[int], *, more: bool) -> None:
        header = _HEADER.pack(len(data), len(files), more)
        beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", files))] if files else []
        try:
            sent = self._end.sendmsg([header, data], beside)
            if sent < len(header):
                self._end.sendall(header[sent:])
                sent = len(header)
            if sent < len(header) + len(data):
                self._end.sendall(memoryview(data)[sent - len(header) :])
        except (BrokenPipeError, ConnectionResetError, OSError) as error:
            raise ChannelClosed(f"the other process is gone: {error}") from error

    def receive(self) -> tuple[bytearray, list[int]]:
        """Return the next frame and the files that came with it."""
        files: list[int] = []
        while True:
            size_bytes, more, found = self._header()
            files += found
            data = bytearray(size_bytes)
            self._fill(memoryview(data))
            if not more:
                return data, files

    def _header(self) -> tuple[int, bool, list[int]]:
        try:
            data, beside, _, _ = self._end.recvmsg(_HEADER.size, _FILES_ROOM)
        except (ConnectionResetError, OSError) as error:
            raise ChannelClosed(f"the other process is gone: {error}") from error
        files: list[int] = []
        for level, kind, content in beside:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                numbers = array("i")
                numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
                files += numbers
        if not data:
            raise ChannelClosed("the other process has closed its end")
        header = bytearray(data) + bytes(_HEADER.size - len(data))
        self._fill(memoryview(header)[len(data) :])
        size_bytes, num_files, more = _HEADER.unpack(header)
        assert num_files == len(files), (num_files, files)
        return size_bytes, bool(more), files

    def _fill(self, view: memoryview) -> None:
        while view:
            try:
                count = self._end.recv_into(view)
            except (ConnectionResetError, OSError) as error:
                raise ChannelClosed(f"the other process is gone: {error}") from error
            if not count:
                raise ChannelClosed("the other process ended inside of a message")
            view = view[count:]

    def shut_down(self) -> None:
        """End the connection; threads that wait at either end get `ChannelClosed`."""
        with suppress(OSError):  # The other end is gone, or this one is closed.
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end; a process that waits at the other end gets `ChannelClosed`."""
        self._end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def channel_pair() -> tuple[FrameChannel, socket.socket]:
    """Return an end for this process, and one to hand to another process."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return FrameChannel(mine), theirs
