"""The service and its process manager: waiting for SIGTERM and SIGINT, and telling systemd.

The system may deliver a signal to any thread, and libraries start threads before we could block
signals in them. So Python's own handlers are used: they do nothing, and `set_wakeup_fd` makes
Python write the number of each signal to a socket, whichever thread received it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from types import FrameType
from typing import Any, Self

AWAITED = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """A context in which `wait` returns signals instead of ending the process; main thread only."""

    def __enter__(self) -> Self:
        self._reading, self._writing = socket.socketpair()
        for end in (self._reading, self._writing):
            end.setblocking(False)
        self._woken_before = signal.set_wakeup_fd(self._writing.fileno())
        self._before: dict[signal.Signals, Any] = {
            number: signal.signal(number, _taken) for number in AWAITED
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._woken_before)
        self._reading.close()
        self._writing.close()

    def wait(self, timeout_s: float | None = None) -> signal.Signals | None:
        """Return the next signal; None where none came in time."""
        while select.select([self._reading], [], [], timeout_s)[0]:
            (number,) = self._reading.recv(1)
            if number in AWAITED:
                return signal.Signals(number)
        return None


def _taken(number: int, frame: FrameType | None) -> None:
    """Do nothing; that a handler exists keeps the signal from ending the process."""


def tell_systemd(**words: object) -> bool:
    """Send words such as READY=1 to systemd (`Type=notify`); False if it does not listen."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path.startswith(("/", "@")):
        return False
    text = "\n".join(f"{name}={value}" for name, value in words.items())
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        # "@" stands for the zero byte that begins the name of an abstract socket.
        sock.sendto(text.encode(), "\0" + path[1:] if path[0] == "@" else path)
        return True
    return False
