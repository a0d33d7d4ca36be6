"""The parser process: it parses what it is sent and answers with plain values.

It runs bytes of strangers through native parsers, so that whatever they do ends this process and no
other. Nothing that it answers is unpickled. It ends when its parent does, after a while without
requests, and when one step takes too long, even inside native code. It is the first process that
the kernel ends when memory is short.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.dataset.parse_pipe import ANSWER, CALL, PROGRESS_BYTES, STORE, ParserPipe, cut
from penstock.errors import MissingPackageError, PenstockError

_IDLE_S = 20.0
_STEP_S = 10.0
_STEP_S_A_MIB = 1.0
_WALL_A_CPU = 6.0
"""Seconds that may pass for each second of CPU: for parsers that wait for ever."""
_RENEWED_S = 0.1
"""How often, at most, a new sample renews the time limit."""
_START_S = 300.0
"""Python and its packages may come from a slow network file system."""
_MEMORY_BYTES_MAX = 4 << 30
_MEMORY_A_BYTE = 32
"""Additional bytes of memory for each byte that was sent, since large row groups take more."""

PARSERS = {
    "parquet_footer": "penstock.dataset.formats.parquet_footer:parse_footer_apart",
    "arrow_schema": "penstock.dataset.formats.arrow:parse_schema_apart",
    "format": "penstock.dataset.parse_format:answer_format",
    "samples": "penstock.dataset.parse_samples:answer_samples",
    "verdicts": "penstock.dataset.parse_samples:answer_verdicts",
}
"""What can be asked for, by name: functions from a `ParserCall` to plain values."""


class ReadFailedError(BaseException):
    """The caller's store has failed: the caller knows the error, and no format may catch it."""


@dataclass(slots=True, kw_only=True)
class ParserCall:
    """What is to be parsed."""

    data: list[memoryview]
    options: Mapping[str, Any]
    pipe: ParserPipe = field(repr=False)
    progress: memoryview = field(repr=False)
    _limited_s: float = 0.0

    def begin_sample(self) -> None:
        """Let the caller know that another sample is begun, for which there is as much time."""
        self.progress[0] += 1
        now_s = time.monotonic()
        if now_s - self._limited_s > _RENEWED_S:  # A call of the kernel takes as long as a row.
            self._limited_s = now_s
            limit(_step_s(sum(map(len, self.data))))

    def ask_store(self, method: str, arguments: bytes) -> tuple[Any, memoryview]:
        """Return what the caller's store answers. The time that it takes is not the parser's."""
        limit(0)
        self.pipe.send(STORE, [method, arguments])
        _, head, data = self.pipe.receive()
        limit(_step_s(len(data)))
        return head, data


def main() -> None:
    """Answer requests until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, whose end ends us.
    # Crashes are expected here, and a core file of each would fill the disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    # What a library prints must not get between the answers.
    pipe = ParserPipe(0, os.dup(1))
    os.dup2(2, 1)
    progress = memoryview(mmap.mmap(int(sys.argv[2]), PROGRESS_BYTES)).cast("Q")
    pipe.send(ANSWER)  # Ready: the time to start does not count against the first request.
    while select.select([0], [], [], _IDLE_S)[0]:
        try:
            kind, head, data = pipe.receive()
        except EOFError:
            return
        assert kind == CALL, kind
        pieces = cut(data, head["sizes"])
        call = ParserCall(data=pieces, options=head["options"], pipe=pipe, progress=progress)
        answer = _answer(head["parser"], head["needs"], call)
        limit(0)
        pipe.send(ANSWER, answer)


def limit(seconds: float) -> None:
    """End this process after some seconds of CPU, wherever it is then; 0 for never.

    A busy machine is no fault of a file, so time itself is limited as well, but to more.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, _WALL_A_CPU * seconds)


def _step_s(size_bytes: int) -> float:
    return _STEP_S + _STEP_S_A_MIB * size_bytes / 2**20


def _limit_memory(size_bytes: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = _MEMORY_BYTES_MAX + _MEMORY_A_BYTE * size_bytes
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def _answer(parser: str, needs: list[str], call: ParserCall) -> dict[str, Any]:
    size_bytes = sum(map(len, call.data))
    try:
        limit(_START_S)
        parse = _imported(parser, needs)
        limit(_step_s(size_bytes))
        _limit_memory(size_bytes)
        return {"facts": parse(call)}
    except ReadFailedError:
        return {"error": "ReadFailedError"}
    except MissingPackageError as error:
        return {"error": "MissingPackageError", "arguments": error.__reduce__()[1]}
    except PenstockError as error:
        return {"error": type(error).__name__, "message": text_of(error)}
    except Exception as error:
        # Foreign errors are the file's: pyarrow raises a dozen kinds for damaged bytes.
        name = type(error).__name__
        return {"error": name, "message": f"{name}: {text_of(error)}"}


def text_of(error: Exception) -> str:
    """Return what an error says as text that can be sent."""
    return str(error).encode(errors="replace").decode()


def _imported(parser: str, needs: list[str]) -> Callable[[ParserCall], Any]:
    for name in needs:
        with contextlib.suppress(ImportError):  # The code that uses it says what is missing.
            importlib.import_module(name)
    module, _, function = PARSERS[parser].partition(":")
    found: Callable[[ParserCall], Any] = getattr(importlib.import_module(module), function)
    return found
