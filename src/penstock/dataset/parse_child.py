"""The parser process: it parses what it is sent and answers with plain values.

It runs untrusted bytes through native parsers, so that whatever they do ends this process and no
other. Nothing is unpickled on either side. It ends when its parent does, when nobody has asked for
a while, and when one answer takes too long, even inside native code.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import struct
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from penstock.dataset.formats.arrow import schema_facts
from penstock.dataset.formats.arrow_fields import import_pyarrow
from penstock.dataset.formats.parquet_footer import footer_facts
from penstock.errors import PenstockError

_IDLE_S = 20.0
_ANSWER_S = 10.0
_ANSWER_S_A_MIB = 1.0
_START_S = 300.0
"""Python and pyarrow may come from a slow network file system."""
_MEMORY_BYTES_MAX = 4 << 30
_LENGTH = struct.Struct("<Q")

Parse = Callable[[bytes, Mapping[str, Any]], dict[str, Any]]

PARSERS: dict[str, Parse] = {"parquet_footer": footer_facts, "arrow_schema": schema_facts}
"""What can be asked for, by name."""


def main() -> None:
    """Answer requests until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, whose end ends us.
    _limit(_START_S)
    # What a library prints must not get between the answers.
    answers = os.dup(1)
    os.dup2(2, 1)
    import_pyarrow("parsing")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = _MEMORY_BYTES_MAX if hard == resource.RLIM_INFINITY else min(_MEMORY_BYTES_MAX, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    _limit(0)
    _write(answers, b"")  # Ready: the time to start does not count against the first request.
    while select.select([0], [], [], _IDLE_S)[0]:
        request = _read(0)
        if request is None:
            return
        _limit(_ANSWER_S + _ANSWER_S_A_MIB * len(request) / 2**20)
        answer = _answer(request)
        _limit(0)
        _write(answers, answer)


def _limit(seconds: float) -> None:
    """End this process by SIGALRM after some seconds, wherever it is then; 0 for never."""
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _answer(request: bytes) -> bytes:
    asked = msgspec.msgpack.decode(request)
    try:
        facts = PARSERS[asked["parser"]](asked["data"], asked["options"])
        return msgspec.msgpack.encode({"facts": facts})
    except PenstockError as error:
        return msgspec.msgpack.encode({"error": type(error).__name__, "message": str(error)})
    except Exception as error:
        # Foreign errors are the file's: pyarrow raises a dozen kinds for damaged bytes.
        message = f"{type(error).__name__}: {error}".encode(errors="replace").decode()
        return msgspec.msgpack.encode({"error": "FormatError", "message": message})


def _read(descriptor: int) -> bytes | None:
    head = _read_exactly(descriptor, _LENGTH.size)
    return None if head is None else _read_exactly(descriptor, _LENGTH.unpack(head)[0])


def _read_exactly(descriptor: int, length: int) -> bytes | None:
    data = bytearray()
    while len(data) < length:
        piece = os.read(descriptor, min(length - len(data), 1 << 20))
        if not piece:
            return None
        data += piece
    return bytes(data)


def _write(descriptor: int, data: bytes) -> None:
    rest = memoryview(_LENGTH.pack(len(data)) + data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
