"""Waiting for SIGTERM and SIGINT, whichever thread the system gives them to.

Libraries start threads before anybody could block signals there, so one may take what was meant for
the main thread. A handler of Python's is run whatever thread that was; it does nothing here, and
the number of the signal is read from a socket that Python writes it to.
"""

from __future__ import annotations

import select
import signal
import socket
from types import FrameType, TracebackType
from typing import Any, Self

AWAITED = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """A context in which signals are waited for instead of ending the process; main thread only."""

    def __enter__(self) -> Self:
        self._reading, self._writing = socket.socketpair()
        for end in (self._reading, self._writing):
            end.setblocking(False)
        self._woken_before = signal.set_wakeup_fd(self._writing.fileno())
        self._before: dict[signal.Signals, Any] = {
            number: signal.signal(number, _taken) for number in AWAITED
        }
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
    """Be there, so that the signal does not end the process."""
