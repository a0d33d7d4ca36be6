"""How long to wait for another process: as long as it makes progress, else only briefly.

A process that holds the opening lock of a tier, or answers for a node, needs milliseconds. It may
need longer because it clears a full disk or the machine is overloaded; or it may be stopped for
good. The kernel tells these apart: a process that computes or waits for a device or a processor is
at work, one that is stopped or asleep is not.
"""

from __future__ import annotations

from pathlib import Path

from penstock.clock import Clock, SystemClock

IDLE_S_MAX = 2.0
"""How long to wait for a process that is not at work."""
WAIT_S_MAX = 30.0
"""How long to wait at most."""

_AT_WORK = ("R", "D")
_CPU_TIMES = slice(11, 13)
"""The fields with user and system time, counted from behind the name of the program."""


class ProcessWait:
    """One wait for other processes; call `is_over` at intervals."""

    def __init__(self, clock: Clock | None = None, *, wait_s_max: float | None = None) -> None:
        self._clock = clock or SystemClock()
        now_s = self._clock.now_s()
        self._end_s = now_s + (WAIT_S_MAX if wait_s_max is None else wait_s_max)
        self._moved_s = now_s
        self._seen: tuple[int | None, list[str]] | None = None

    def is_over(self, pid: int | None) -> bool:
        """Return whether to give up waiting for a process; None: its number is not known."""
        now_s = self._clock.now_s()
        fields = process_fields(pid)
        state, times = "".join(fields[:1]), fields[_CPU_TIMES]
        if (pid, times) != self._seen or state in _AT_WORK:
            # Another process has taken over, or the same one has made progress.
            self._moved_s = now_s if self._seen is not None else self._moved_s
            self._seen = pid, times
        return now_s >= min(self._end_s, self._moved_s + IDLE_S_MAX)


def process_fields(pid: int | None) -> list[str]:
    """Return the fields of a process behind its name, its state first; empty if they are hidden."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text() if pid is not None else ""
    except OSError:
        return []
    # The program's name in parentheses may itself have parentheses and spaces: cut at the last one.
    return text.rpartition(")")[2].split()
