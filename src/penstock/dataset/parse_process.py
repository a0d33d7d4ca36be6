"""Parsing untrusted bytes in another process, so that a crash there is an error of one file.

Native parsers abort or run into memory that is not there when a file is damaged in the right place:
one bit of a Parquet footer is enough. So such bytes are parsed by a small process beside this one
(`parse_child`), which answers with plain values. Its death is a `FormatError` that names the
object. `docs/decisions/0014-parser-process.md` says which bytes are parsed there.

Processes start when they are first needed and stay for the next request. One does for most sets: it
takes 0.3 s to start with what it imports, and less than a millisecond for a footer. More are
started while callers wait.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock import errors
from penstock.dataset.parse_pipe import ANSWER, CALL, PROGRESS_BYTES, STORE, ParserPipe
from penstock.dataset.parse_values import UnsendableError
from penstock.errors import (
    FormatError,
    MissingPackageError,
    OptionError,
    PenstockError,
    WorkerError,
)
from penstock.storage.base import Buffer

_PROCESSES_MAX = max(4, min(8, len(os.sched_getaffinity(0))))
_WAIT_S = 0.3
"""For a process that is busy, before another is started."""
_STDERR_BYTES_MAX = 300
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)
"""How processes end that others have ended; a parser does not do so itself."""
_PACKAGE = str(Path(__file__).parents[1])
_NOT_OURS = {"AssertionError": AssertionError, "UnsendableError": UnsendableError}
"""Errors that are not the file's."""

_START = """
import importlib.machinery, sys, types
def whole(name):
    if name.startswith("__"):
        raise AttributeError(name)
    del package.__getattr__
    package.__spec__.loader.exec_module(package)
    return getattr(package, name)
package = types.ModuleType("penstock")
package.__path__, package.__file__ = [sys.argv[1]], sys.argv[1] + "/__init__.py"
package.__spec__ = importlib.machinery.ModuleSpec(
    "penstock", importlib.machinery.SourceFileLoader("penstock", package.__file__), is_package=True
)
package.__getattr__ = whole
sys.modules["penstock"] = package
from penstock.dataset.parse_child import main
main()
"""
"""Imports the rooms that it needs and not all of Penstock, which takes as long as pyarrow; all of
it when a format of the user's asks the package for a name."""

Serve = Callable[[str, bytes], tuple[bytes, Sequence[Buffer]]]
"""Answers what a parser asks of the caller's store: a method and its arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserRequest:
    """Bytes to be parsed, and by which parser of `parse_child`."""

    parser: str
    data: Sequence[Buffer] = field(repr=False)
    options: Mapping[str, Any]
    needs: tuple[str, ...] = ()
    """Modules that are imported first: the time that this takes is not the parser's."""
    serve: Serve | None = None


def parsed_by_arrow(
    parser: str, data: bytes, options: Mapping[str, Any], what: str
) -> dict[str, Any]:
    """Return what a parser of pyarrow's finds in some bytes; errors begin with `what`."""
    if importlib.util.find_spec("pyarrow") is None:
        raise MissingPackageError("reading Parquet and Arrow", "pyarrow", "parquet")
    request = ParserRequest(
        parser=parser, data=[data], options=dict(options), needs=("pyarrow.parquet",)
    )
    try:
        facts: dict[str, Any] = answer_to(request)
    except ParserEndedError as death:
        raise explained(death, what) from None
    except OptionError as error:
        raise OptionError(f"{what}: {error}") from None
    except FormatError as error:
        raise FormatError(f"{what} cannot be read: {error}") from None
    return facts


def answer_to(request: ParserRequest) -> Any:
    """Return what a parser answers, or raise the error that it had.

    Its death is an `ParserEndedError`, which is for the caller to put into words.
    """
    head = {
        "parser": request.parser,
        "options": request.options,
        "needs": request.needs,
        "sizes": [memoryview(buffer).nbytes for buffer in request.data],
    }
    answer = _pool.ask(head, request)
    if "failure" in answer:
        raise answer["failure"]  # Of the caller's own store, which the parser has asked.
    if "error" not in answer:
        return answer["facts"]
    kind = error_named(answer["error"])
    if kind is MissingPackageError:
        raise MissingPackageError(*answer["arguments"])
    if answer["error"] in _NOT_OURS:
        raise _NOT_OURS[answer["error"]](answer["message"])
    raise (kind or FormatError)(answer["message"])


def num_parser_deaths() -> int:
    """Return how many parser processes of this process ended while they parsed something."""
    return _pool.num_deaths


def error_named(name: str) -> type[PenstockError] | None:
    """Return a class of `penstock.errors`, or None where the name is of another's."""
    kind = getattr(errors, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, PenstockError) else None


class ParserEndedError(Exception):
    """A parser process ended without an answer."""

    def __init__(self, code: int, stderr: str, num_begun: int) -> None:
        super().__init__(f"exit status {code}: {stderr}")
        self.code = code
        self.stderr = stderr
        self.num_begun = num_begun
        """Samples that it had begun."""


class ParserProcess:
    """One parser process, for one request at a time."""

    def __init__(self) -> None:
        # Not a pipe: nobody reads it while the process works, so it would fill up and block it.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process is
        # Shared memory rather than messages: it can still be read after the process has died.
        shared = os.memfd_create("penstock-parser", os.MFD_CLOEXEC)
        self._progress = os.fdopen(shared, "r+b", buffering=0)
        self._progress.truncate(PROGRESS_BYTES)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, _PACKAGE, str(shared)],
                pass_fds=[shared],
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
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            fds = self._process.stdout.fileno(), self._process.stdin.fileno()
            self._pipe = ParserPipe(*fds)
            self._pipe.receive()
        except (OSError, EOFError) as error:
            raise WorkerError(
                f"the process that parses files could not be started ({self._last_words(error)}): "
                f"{sys.executable!r} must be a Python that can import what this one can, and this "
                "user must be allowed another process"
            ) from error

    def _last_words(self, error: Exception) -> str:
        return str(self._death()) if isinstance(error, EOFError) else str(error)

    def ask(self, head: Mapping[str, Any], request: ParserRequest) -> dict[str, Any]:
        """Return the answer to a request, or raise `ParserEndedError`."""
        failure = None
        os.pwrite(self._progress.fileno(), bytes(PROGRESS_BYTES), 0)
        try:
            self._pipe.send(CALL, head, request.data)
            kind, said, _ = self._pipe.receive()
            while kind == STORE:
                failure = self._serve(request, *said) or failure
                kind, said, _ = self._pipe.receive()
        except (BrokenPipeError, EOFError):
            raise self._death() from None
        assert kind == ANSWER, kind
        if failure and said.get("error") in ("ReadFailedError", type(failure).__name__):
            return {"failure": failure}
        answer: dict[str, Any] = said
        return answer

    def _serve(self, request: ParserRequest, method: str, arguments: bytes) -> Exception | None:
        """Answer a question to the store; its error is returned, and its name and words are sent.

        A format may expect one: `NotFoundError` of a file that need not be there.
        """
        assert request.serve is not None
        try:
            said, buffers = request.serve(method, arguments)
        except Exception as error:
            message = str(error).encode(errors="replace")
            self._pipe.send(STORE, {"error": type(error).__name__, "message": message.decode()})
            return error
        self._pipe.send(STORE, {"said": said}, buffers)
        return None

    def _death(self) -> ParserEndedError:
        code = self._process.wait()
        begun = os.pread(self._progress.fileno(), PROGRESS_BYTES, 0)
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - _STDERR_BYTES_MAX))
        said = " ".join(self._stderr.read().decode(errors="replace").split())
        self.close()
        return ParserEndedError(code, said, int.from_bytes(begun, sys.byteorder))

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._stderr, self._progress):
            assert file is not None
            file.close()

    def forget(self) -> None:
        """Leave the process to the parent, which has started it: this process is a fork of that."""
        # Popen would otherwise wait for, or warn about, a child that this process does not have.
        self._process.returncode = 0


class ParserPool:
    """The parser processes of this process."""

    def __init__(self) -> None:
        self._idle: list[ParserProcess] = []
        self._num_processes = 0
        self._is_starting = False
        self._wait_s = _WAIT_S
        self.num_deaths = 0
        """Processes that ended while they parsed something."""
        # Guards everything above. Callers wait on it for a process to be given back, or for the
        # number of processes to fall.
        self._changed = threading.Condition()

    def ask(self, head: Mapping[str, Any], request: ParserRequest) -> dict[str, Any]:
        """Return the answer of some process to a request."""
        while True:
            process, is_fresh = self._take()
            try:
                answer = process.ask(head, request)
            except ParserEndedError as death:
                self._drop()
                # A process that had been idle may have reached its idle limit, or been killed from
                # outside: neither says anything about the file, so another one is asked.
                if is_fresh or death.code not in (0, *_FROM_OUTSIDE):
                    self.num_deaths += 1
                    raise
            except BaseException:
                # The next answer in its pipes may belong to this request: it cannot be used again.
                process.close()
                self._drop()
                raise
            else:
                self._give_back(process)
                return answer

    def _take(self) -> tuple[ParserProcess, bool]:
        """Return a process, and whether it was started for this."""
        with self._changed:
            while not self._idle and self._num_processes > 0:
                came = self._changed.wait_for(self._has_idle, timeout=self._wait_s)
                if not came and not self._is_starting and self._num_processes < _PROCESSES_MAX:
                    break
            if self._idle:
                return self._idle.pop(), False
            self._num_processes += 1
            # Only one starts at a time: sixteen callers that begin at once need one process, not
            # sixteen. The start itself is outside of the lock, so that others can give back and
            # take.
            self._is_starting = True
        begin_s = time.perf_counter()
        try:
            return ParserProcess(), True
        except BaseException:
            self._drop()
            raise
        finally:
            with self._changed:
                self._is_starting = False
                # On a busy machine a start takes longer and another process brings less, so callers
                # then wait longer for a process that is there.
                self._wait_s = max(_WAIT_S, 2 * (time.perf_counter() - begin_s))

    def _has_idle(self) -> bool:
        return bool(self._idle) or self._num_processes == 0

    def _give_back(self, process: ParserProcess) -> None:
        with self._changed:
            self._idle.append(process)
            self._changed.notify()  # One process serves one waiting caller.

    def _drop(self) -> None:
        with self._changed:
            self._num_processes -= 1
            self._changed.notify()  # A waiting caller may start a process in its place.

    def close(self) -> None:
        """End all idle processes."""
        with self._changed:
            idle, self._idle = self._idle, []
            self._num_processes -= len(idle)
        # To end a process takes time: nobody should wait for the lock meanwhile.
        for process in idle:
            process.close()

    def forget(self) -> None:
        """Begin anew in a fork.

        The processes belong to the parent, and one of its threads may have held the lock.
        """
        for process in self._idle:
            process.forget()
        self._idle, self._num_processes, self._is_starting = [], 0, False
        self._changed = threading.Condition()


def explained(death: ParserEndedError, what: str) -> FormatError:
    """Return the error that a death is; `what` names the bytes that were parsed."""
    return FormatError(f"{what} cannot be read: {cause_of(death)}")


def cause_of(death: ParserEndedError) -> str:
    """Return words that say how a parser ended, and the way out."""
    if death.code in (-signal.SIGALRM, -signal.SIGPROF):
        return "parsing did not end; the file is damaged"
    ended = signal.Signals(-death.code).name if death.code < 0 else f"status {death.code}"
    said = f" ({death.stderr})" if death.stderr else ""
    way_out = "the file is damaged: copy it anew, or write it again"
    if death.code in _FROM_OUTSIDE:
        way_out = "was there memory left? If it happens again, the file is damaged"
    return f"the process that parsed it ended with {ended}{said}; {way_out}"


_pool = ParserPool()
# An idle parser ends by itself, but only after a while: a job should leave no process behind.
atexit.register(_pool.close)
os.register_at_fork(after_in_child=_pool.forget)
