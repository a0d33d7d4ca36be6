"""Parsing untrusted bytes where a crash is an error and not the end of the job.

Native parsers abort or run into memory that is not there when a file is damaged in the right place:
one bit of a Parquet footer is enough. So what a file says of itself is parsed by a small process
beside this one (`parse_child`), which answers with plain values. Its death is a `FormatError` that
names the object.

Processes start when they are first needed and stay for the next request. One does for most sets: it
takes 0.3 s to start and less than a millisecond for a footer. More are started while callers wait.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import (
    FormatError,
    MissingPackageError,
    OptionError,
    PenstockError,
    WorkerError,
)

_PROCESSES_MAX = 4
_WAIT_S = 0.3
"""For a process that is busy, before another is started: as long as it takes to start one."""
_LENGTH = struct.Struct("<Q")
_STDERR_BYTES_MAX = 300
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)
"""How processes end that others have ended; a parser does not do so itself."""
_OURS = {"FormatError": FormatError, "OptionError": OptionError}

_START = """
import sys, types
package = types.ModuleType("penstock")
package.__path__ = [sys.argv[1]]
sys.modules["penstock"] = package
from penstock.dataset.parse_child import main
main()
"""
"""Imports the rooms that it needs and not all of Penstock, which takes as long as pyarrow."""


def parsed(
    parser: str, data: bytes, options: Mapping[str, Any], what: str, *, needs: str
) -> dict[str, Any]:
    """Return what a parser of `parse_child` finds in some bytes; errors begin with `what`.

    `needs` is the package that the parser is made of.
    """
    if importlib.util.find_spec(needs) is None:
        raise MissingPackageError("reading Parquet and Arrow", needs, "parquet")
    request = msgspec.msgpack.encode({"parser": parser, "data": data, "options": dict(options)})
    answer = msgspec.msgpack.decode(_pool.ask(request, what))
    if "error" in answer:
        kind: type[PenstockError] = _OURS.get(answer["error"], FormatError)
        if kind is OptionError:
            raise OptionError(f"{what}: {answer['message']}")
        raise kind(f"{what} cannot be read: {answer['message']}")
    facts: dict[str, Any] = answer["facts"]
    return facts


class _EndedError(Exception):
    """A parser process ended without an answer."""

    def __init__(self, code: int, stderr: str) -> None:
        super().__init__(f"exit status {code}: {stderr}")
        self.code = code
        self.stderr = stderr


class ParserProcess:
    """One parser process, for one request at a time."""

    def __init__(self) -> None:
        # Not a pipe: it would fill up, and the process stand still.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process is
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, str(Path(__file__).parents[1])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                bufsize=0,
                env={
                    **os.environ,
                    # Where this process finds its modules, wherever it has that from.
                    "PYTHONPATH": os.pathsep.join(p or str(Path.cwd()) for p in sys.path),
                    "ARROW_DEFAULT_MEMORY_POOL": "system",  # Others reserve memory ahead.
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                },
            )
            self._receive()
        except (OSError, _EndedError) as error:
            raise WorkerError(
                f"the process that parses Parquet and Arrow could not be started ({error}): "
                f"{sys.executable!r} must be a Python that can import pyarrow, and this user must "
                "be allowed another process"
            ) from error

    def ask(self, request: bytes) -> bytes:
        """Return the answer to a request, or raise `_EndedError`."""
        assert self._process.stdin is not None
        rest = memoryview(_LENGTH.pack(len(request)) + request)
        try:
            while rest:
                rest = rest[self._process.stdin.write(rest) :]
        except BrokenPipeError:
            raise self._death() from None
        return self._receive()

    def _receive(self) -> bytes:
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return self._read(length)

    def _read(self, length: int) -> bytes:
        assert self._process.stdout is not None
        data = bytearray()
        while len(data) < length:
            piece = self._process.stdout.read(length - len(data))
            if not piece:
                raise self._death()
            data += piece
        return bytes(data)

    def _death(self) -> _EndedError:
        code = self._process.wait()
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - _STDERR_BYTES_MAX))
        said = " ".join(self._stderr.read().decode(errors="replace").split())
        self.close()
        return _EndedError(code, said)

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._stderr):
            assert file is not None
            file.close()

    def forget(self) -> None:
        """Leave the process to whoever has started it: this is a fork of that one."""
        self._process.returncode = 0


class ParserPool:
    """The parser processes of this process."""

    def __init__(self) -> None:
        self._idle: list[ParserProcess] = []
        self._num_processes = 0
        self._is_starting = False
        # Guards all three; callers wait on it for a process to come back.
        self._changed = threading.Condition()

    def ask(self, request: bytes, what: str) -> bytes:
        """Return the answer of some process to a request."""
        while True:
            process, is_fresh = self._take()
            try:
                answer = process.ask(request)
            except _EndedError as death:
                self._drop()
                # One that waited may have ended meanwhile, or was killed: that proves nothing.
                if is_fresh or death.code not in (0, *_FROM_OUTSIDE):
                    raise _explained(death, what) from None
            except BaseException:
                process.close()  # Half of an exchange may be in its pipes.
                self._drop()
                raise
            else:
                self._give_back(process)
                return answer

    def _take(self) -> tuple[ParserProcess, bool]:
        """Return a process, and whether it was started for this."""
        with self._changed:
            while not self._idle and self._num_processes > 0:
                came = self._changed.wait_for(self._has_idle, timeout=_WAIT_S)
                if not came and not self._is_starting and self._num_processes < _PROCESSES_MAX:
                    break
            if self._idle:
                return self._idle.pop(), False
            self._num_processes += 1
            # One at a time: sixteen callers that begin at once need one process, not four.
            self._is_starting = True
        try:
            return ParserProcess(), True
        except BaseException:
            self._drop()
            raise
        finally:
            with self._changed:
                self._is_starting = False

    def _has_idle(self) -> bool:
        return bool(self._idle) or self._num_processes == 0

    def _give_back(self, process: ParserProcess) -> None:
        with self._changed:
            self._idle.append(process)
            self._changed.notify()

    def _drop(self) -> None:
        with self._changed:
            self._num_processes -= 1
            self._changed.notify()

    def close(self) -> None:
        """End all processes that nobody uses."""
        with self._changed:
            idle, self._idle = self._idle, []
            self._num_processes -= len(idle)
        for process in idle:
            process.close()

    def forget(self) -> None:
        """Begin anew in a fork: neither the processes nor the lock are this process's own."""
        for process in self._idle:
            process.forget()
        self._idle, self._num_processes, self._is_starting = [], 0, False
        self._changed = threading.Condition()


def _explained(death: _EndedError, what: str) -> FormatError:
    if death.code == -signal.SIGALRM:
        return FormatError(f"{what} cannot be read: parsing did not end; the file is damaged")
    ended = signal.Signals(-death.code).name if death.code < 0 else f"status {death.code}"
    said = f" ({death.stderr})" if death.stderr else ""
    way_out = "the file is damaged: copy it anew, or write it again"
    if death.code in _FROM_OUTSIDE:
        way_out = "was there memory left? If it happens again, the file is damaged"
    return FormatError(
        f"{what} cannot be read: the process that parsed it ended with {ended}{said}; {way_out}"
    )


_pool = ParserPool()
atexit.register(_pool.close)
os.register_at_fork(after_in_child=_pool.forget)
