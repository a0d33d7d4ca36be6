"""Starts training processes, reads their events from one pipe, and leaves none behind.

Each process has a session of its own, so Ctrl-C reaches only the story, which then ends them. If
the story itself is killed, the pipe breaks and they end at their next step.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import msgspec
from examples.demo.messages import DemoJob, Event, decode_event, encode

from penstock.errors import WorkerError

_CHECKOUT = Path(__file__).parents[2]
_LOG_LINES_MAX = 12


class DemoRanks:
    """The processes of one training run."""

    def __init__(self, jobs: Sequence[DemoJob], log: Path) -> None:
        self._jobs = jobs
        self._log = log
        self._processes: list[subprocess.Popen[bytes]] = []
        self._reader: BinaryIO | None = None
        self._was_killed = False

    def __enter__(self) -> Self:
        readable, writable = os.pipe()
        self._reader = os.fdopen(readable, "rb")
        try:
            with self._log.open("ab") as log:
                for job in self._jobs:
                    self._processes.append(_start(job, writable, log))
        except BaseException:
            self.kill()
            raise
        finally:
            os.close(writable)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        if self._reader is not None:
            self._reader.close()

    def events(self) -> Iterator[Event]:
        """Yield the events of the processes until all have ended; raise if one failed."""
        assert self._reader is not None
        for line in self._reader:
            yield decode_event(line)
        codes = [process.wait() for process in self._processes]
        if any(codes) and not self._was_killed:
            raise WorkerError(
                f"a training process of the demo ended with code {next(filter(None, codes))}; "
                f"its last words:\n{self._last_words()}"
            )

    def kill(self) -> None:
        """End all processes with SIGKILL: they get no chance to tidy up."""
        self._was_killed = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_LINES_MAX:])


def _start(job: DemoJob, writable: int, log: BinaryIO) -> subprocess.Popen[bytes]:
    own = msgspec.structs.replace(job, events=writable)
    return subprocess.Popen(
        [sys.executable, "-m", "examples.demo.trainer", encode(own).decode()],
        cwd=_CHECKOUT,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=(writable,),
        start_new_session=True,
    )
