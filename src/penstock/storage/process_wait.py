"""How long to wait for another process: while it gets on, and briefly where it does not.

Whoever holds a tier's opening moment, or answers for a node, needs milliseconds. It may need longer
for a reason (a full disk to clear, a machine with too much to do), or be stopped for good. The
kernel tells them apart: a process that computes, waits for a device or waits for a processor is at
work; one that is stopped or asleep is not.
"""

from __future__ import annotations

from pathlib import Path

from penstock.clock import Clock, SystemClock

IDLE_S_MAX = 2.0
"""A process that has not been at work for so long is not waited for."""
WAIT_S_MAX = 30.0
"""Nobody is waited for longer."""

_AT_WORK = ("R", "D")
_CPU_TIMES = slice(11, 13)
"""User and system time, counted from behind the name of the program."""


class ProcessWait:
    """One wait for other processes; ask `is_over` now and then."""

    def __init__(self, clock: Clock | None = None, *, wait_s_max: float | None = None) -> None:
        self._clock = clock or SystemClock()
        now_s = self._clock.now_s()
        self._end_s = now_s + (WAIT_S_MAX if wait_s_max is None else wait_s_max)
        self._moved_s = now_s
        self._seen: tuple[int | None, str] | None = None

    def is_over(self, pid: int | None) -> bool:
        """Return whether to give up on a process; None: nobody knows which one it is."""
        now_s = self._clock.now_s()
        state, times = _progress_of(pid)
        if (pid, times) != self._seen or state in _AT_WORK:
            # Another process, or the same one a little further.
            self._moved_s = now_s if self._seen is not None else self._moved_s
            self._seen = pid, times
        return now_s >= min(self._end_s, self._moved_s + IDLE_S_MAX)


def _progress_of(pid: int | None) -> tuple[str, str]:
    """Return what a process does now, and the time it has computed; empty where that is hidden."""
    if pid is None:
        return "", ""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", ""
    state, *numbers = text.rpartition(")")[2].split()
    return state, " ".join(["", *numbers][_CPU_TIMES])
