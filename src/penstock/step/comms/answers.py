"""Answers: one rank asks another for tensors while the other's program does something else.

    rank 0                                  rank 1
    answers.asking(1)  ──── question ────►  a thread of the same class
        peer.ask(...)  ◄──── bytes ───────  calls `answer`, whatever the program does meanwhile

Collectives need all ranks; this needs one. Each rank listens on a port of its own, at the address
from which it reaches MASTER_ADDR, and serves only connections that present its key, which ranks
exchange over a lane when they open this. Asking a rank that has left fails at once. Like gloo's and
NCCL's, the connection is not encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from penstock.errors import PeerError, PenstockError, StateError

__all__ = ["Answers", "AskedRank"]

Answer = Callable[[Sequence[int]], torch.Tensor]
"""Returns the host tensor that a question (a few numbers) asks for, or raises."""
_KEY_BYTES = 32
_QUESTION = struct.Struct("!4q")
_HEAD = struct.Struct("!?q")
"""Whether there is an answer, and the size of what follows: a tensor, or the reason."""
_REASON_BYTES_MAX = 1 << 12


class Answers:
    """Answers questions of other ranks, and asks them.

    Args:
        answer: called on threads of this class.
        rank: this one.
        timeout_s: how long a rank that lives may take for an answer.
    """

    def __init__(self, answer: Answer, *, rank: int, timeout_s: float) -> None:
        self._answer, self._rank, self._timeout_s = answer, rank, timeout_s
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._server: socket.socket | None = None
        self._places: list[tuple[bytes, Any]] = []

    def open(self, meet: Callable[[bytes], Sequence[bytes]]) -> None:
        """Listen, and learn the addresses of the others; `meet` exchanges a few bytes."""
        family, host = _host()
        self._server = socket.create_server((host, 0), family=family)
        port = self._server.getsockname()[1]
        said = meet(self._key + f"{host} {port}".encode())
        for row in said:
            where, number = row[_KEY_BYTES:].decode().split()
            self._places.append((row[:_KEY_BYTES], (where, int(number))))
        server, words = self._server, (self._key, self._answer, self._timeout_s)
        thread = threading.Thread(
            target=_listen, args=(server, *words), name="penstock-answers", daemon=True
        )
        thread.start()

    def close(self) -> None:
        """Stop answering."""
        if self._server is not None:
            with contextlib.suppress(OSError):
                self._server.shutdown(
                    socket.SHUT_RDWR
                )  # ends accept() in the thread; close() does not
            self._server.close()
            self._server = None

    @contextlib.contextmanager
    def asking(self, rank: int, timeout_s: float | None = None) -> Iterator[AskedRank]:
        """Ask another rank a few questions."""
        key, place = self._places[rank]
        timeout_s = self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)
        try:
            with socket.create_connection(place, timeout=timeout_s) as line:
                line.sendall(key)
                yield AskedRank(rank, line)
        except TimeoutError as error:
            raise PeerError(
                f"rank {rank} has not answered rank {self._rank} for {timeout_s:.0f} s",
                peer=str(rank),
                kind="stuck",
            ) from error
        except OSError as error:
            raise PeerError(
                f"rank {rank} does not answer rank {self._rank} ({error}): it has ended, or was "
                "closed",
                peer=str(rank),
            ) from error


class AskedRank:
    """A rank that is being asked."""

    def __init__(self, rank: int, line: socket.socket) -> None:
        self._rank, self._line = rank, line

    def ask(self, question: Sequence[int], into: torch.Tensor) -> None:
        """Put an answer into a host tensor, or raise the reason why there is none."""
        self._line.sendall(_QUESTION.pack(*question))
        head = memoryview(bytearray(_HEAD.size))
        _receive(self._line, head)
        is_good, size_bytes = _HEAD.unpack(head)
        if not is_good:
            reason = memoryview(bytearray(min(size_bytes, _REASON_BYTES_MAX)))
            _receive(self._line, reason)
            raise StateError(f"rank {self._rank}: {bytes(reason).decode()}")
        row = _bytes_of(into)
        assert size_bytes == len(row), f"{size_bytes=} {len(row)=}"
        _receive(self._line, row)


def _listen(server: socket.socket, key: bytes, answer: Answer, timeout_s: float) -> None:
    while True:
        try:
            line, _ = server.accept()
        except OSError:  # closed
            return
        # One thread for each connection: with one for all, ranks that answer a question by asking
        # each other could wait in a circle.
        words = (line, key, answer, timeout_s)
        threading.Thread(target=_serve, args=words, name="penstock-answer", daemon=True).start()


def _serve(line: socket.socket, key: bytes, answer: Answer, timeout_s: float) -> None:
    with line, contextlib.suppress(OSError):  # the asking rank may leave at any time
        line.settimeout(timeout_s)
        said, question = bytearray(_KEY_BYTES), bytearray(_QUESTION.size)
        _receive(line, memoryview(said))
        if not hmac.compare_digest(bytes(said), key):
            return
        while True:
            _receive(line, memoryview(question))
            try:
                row = _bytes_of(answer(_QUESTION.unpack(question)))
            except Exception as error:
                # Also a defect of ours: this thread would end unseen, but the other rank waits.
                reason = str(error) if isinstance(error, PenstockError) else repr(error)
                row = memoryview(reason.encode()[:_REASON_BYTES_MAX])
                line.sendall(_HEAD.pack(False, len(row)))
            else:
                line.sendall(_HEAD.pack(True, len(row)))
            line.sendall(row)


def _receive(line: socket.socket, row: memoryview) -> None:
    while row:
        count = line.recv_into(row)
        if not count:
            raise ConnectionError("the connection was closed")
        row = row[count:]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    row: Any = tensor.view(torch.uint8).numpy()
    return memoryview(row)


def _host() -> tuple[socket.AddressFamily, str]:
    """Return this host's address on the network of MASTER_ADDR, or its own if that is not set."""
    for master in (os.environ.get("MASTER_ADDR"), socket.gethostname()):
        with contextlib.suppress(OSError):
            if master is not None:
                family, _, _, _, place = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
                with socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.connect(place)  # sends nothing: it only chooses a route
                    return family, str(probe.getsockname()[0])
    return socket.AF_INET, "127.0.0.1"
