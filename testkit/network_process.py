"""Programs of the kit that run inside a namespace, with a pipe to their owner.

A program is a module with `main(pipe)`. It ends with its pipe, and with its owner, however that
one ends.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection as Pipe
from typing import Any

from penstock.testing.servers import ServerError
from testkit import search_path
from testkit.network_namespaces import program_of

_END_TIMEOUT_S = 10.0
"""How long a program may take to notice that its pipe is closed."""


def inside(namespace: str) -> list[str]:
    """Return the words before a command that let it run in a namespace, as the same process."""
    return [program_of("ip") or "ip", "netns", "exec", namespace]


def dies_with_us() -> list[str]:
    """Return the words that let the kernel end a program even when its owner is killed."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL"] if setpriv else []


class Program:
    """A program of the kit, from `start` to `stop`."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Pipe | None = None
        self._owner = 0
        self._lock = threading.Lock()

    def start(self, namespace: str) -> None:
        """Run it in a namespace."""
        assert self._process is None, "a program is started once at a time"
        ours, theirs = socket.socketpair()
        path = search_path()
        with theirs:
            python = [
                sys.executable,
                "-P",
                "-m",
                "testkit.network_process",
                self._module,
                str(theirs.fileno()),
            ]
            self._process = subprocess.Popen(
                [*dies_with_us(), *inside(namespace), *python, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
            )
        self._pipe = Pipe(ours.detach())
        self._owner = os.getpid()

    @property
    def pid(self) -> int:
        """The process's number."""
        assert self._process is not None
        return self._process.pid

    def ask(self, what: object) -> Any:
        """Send something and return the answer; raise it if it is an error."""
        with self._lock:
            self._check()
            assert self._pipe is not None
            try:
                self._pipe.send(what)
                answer = self._pipe.recv()
            except (EOFError, OSError) as error:
                assert self._process is not None
                code = self._process.wait(_END_TIMEOUT_S)
                raise ServerError(f"{self._module} has ended (exit code {code})") from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _check(self) -> None:
        if self._pipe is None:
            raise ServerError(f"{self._module} is not running; use it inside its with block")
        if os.getpid() != self._owner:
            raise ServerError(
                f"{self._module} belongs to process {self._owner}, this is {os.getpid()}: ask there"
            )

    def stop(self) -> None:
        """End the process that was started here."""
        if self._process is None or self._pipe is None:
            return
        self._pipe.close()
        self._pipe = None
        if os.getpid() == self._owner:
            try:
                self._process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = None


def run(module: str, descriptor: int) -> None:
    """Be the process: hand the pipe to the module's `main`."""
    with contextlib.suppress(KeyboardInterrupt):
        importlib.import_module(f"testkit.{module}").main(Pipe(descriptor))


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]))
