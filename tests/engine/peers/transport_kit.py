"""Nodes that serve small units and clients that ask for them, over real sockets."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from tests.storage.conftest import fill, shape_of, unit_bytes

from penstock.engine.peers.base import Address, Answer, Ask, Gossip, Shelves
from penstock.engine.peers.client import PeerClient
from penstock.engine.peers.server import PeerServer
from penstock.engine.peers.shelf import TierShelf
from penstock.errors import PeerError
from penstock.storage.tier import Tiers
from penstock.storage.tier_open import open_tiers
from penstock.storage.tier_sizes import Memory

RUN, SECRET = b"r" * 16, b"k" * 32
SHELF = b"the shelf's name"
LENGTHS = [1000, 5000, 0, 4096, 1, 20_000] * 10
SHAPE = shape_of(LENGTHS)
HANG_S = 30.0


class Filling:
    """Says how far a node has got, and whether it goes on."""

    def __init__(self) -> None:
        self.position = 0
        self.is_on = True

    def progress_mark(self) -> int:
        return self.position

    def is_filling(self) -> bool:
        return self.is_on


class Said:
    """A gossip that writes down what it is told."""

    def __init__(self, words: bytes = b"") -> None:
        self.words = words
        self.heard: list[tuple[str, bytes]] = []
        self.events: list[tuple[str, str]] = []

    def say(self) -> bytes:
        return self.words

    def hear(self, peer: str, data: bytes) -> None:
        self.heard.append((peer, data))

    def reached(self, peer: str) -> None:
        if ("reached", peer) not in self.events:
            self.events.append(("reached", peer))

    def silent(self, peer: str, kind: str) -> None:
        self.events.append((kind, peer))


class Node:
    """A server in this process with tiers of its own."""

    def __init__(self, path: Path, **options: object) -> None:
        self.tiers: Tiers = open_tiers([Memory("1MB", folder=path)], SHAPE)
        self.filling = Filling()
        self.shelves = Shelves()
        self.shelves.add(
            TierShelf(SHELF, self.tiers, self.filling.progress_mark, self.filling.is_filling)
        )
        settings: dict[str, object] = {
            "name": "node-a",
            "shelves": self.shelves,
            "secrets": {RUN: SECRET}.get,
            "bind": [Address(host="127.0.0.1", port=0)],
            "status": lambda run_id: {"fill": 0.5, "words": ["a", "b"]},
        }
        self.server = PeerServer(**{**settings, **options})  # type: ignore[arg-type]
        self.server.start()

    @property
    def address(self) -> Address:
        return self.server.address

    def close(self) -> None:
        self.server.stop()
        self.tiers.close()


@contextlib.contextmanager
def node(path: Path, *, filled: bool = True, **options: object) -> Iterator[Node]:
    made = Node(path, **options)
    try:
        if filled:
            fill(made.tiers)
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def client(
    *, secret: bytes = SECRET, run_id: bytes = RUN, gossip: Gossip | None = None, tls: object = None
) -> Iterator[PeerClient]:
    made = PeerClient(name="node-b", run_id=run_id, secret=secret, gossip=gossip, tls=tls)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.stop()


class Waiting:
    """One ask and what becomes of it."""

    def __init__(
        self,
        asker: PeerClient,
        address: Address | Sequence[Address],
        units: Sequence[int],
        *,
        wait_s: float = 0.0,
        peer: str = "node-a",
        shelf: bytes = SHELF,
    ) -> None:
        self.units = list(units)
        self.lengths = [LENGTHS[unit] for unit in units]
        self.into = bytearray(sum(self.lengths))
        self.results: list[Answer | PeerError] = []
        self.is_parked = threading.Event()
        self._is_done = threading.Event()
        ask = Ask(shelf=shelf, ranges=ranges_of(units), wait_s=wait_s)
        addresses = [address] if isinstance(address, Address) else address
        asker.ask(
            peer,
            addresses,
            ask,
            memoryview(self.into),
            parked=self.is_parked.set,
            done=self._done,
        )

    def _done(self, result: Answer | PeerError) -> None:
        self.results.append(result)
        self._is_done.set()

    @property
    def is_done(self) -> bool:
        return self._is_done.is_set()

    def wait(self) -> Answer | PeerError:
        assert self._is_done.wait(HANG_S), "nothing came"
        assert len(self.results) == 1, self.results
        return self.results[0]

    def answer(self) -> Answer:
        result = self.wait()
        assert isinstance(result, Answer), result
        return result

    def error(self) -> PeerError:
        result = self.wait()
        assert isinstance(result, PeerError), result
        return result

    def is_right(self) -> bool:
        """Whether every range that came has its unit's bytes, and every gap was left alone."""
        absent, at = set(self.answer().absent), 0
        for number, (unit, length) in enumerate(zip(self.units, self.lengths, strict=True)):
            due = bytes(length) if number in absent else unit_bytes(unit, length)
            if self.into[at : at + length] != due:
                return False
            at += length
        return True


def ranges_of(units: Sequence[int]) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    numbers = np.array(units, np.int64)
    offsets, lengths = SHAPE.offsets[numbers], SHAPE.lengths[numbers]
    return np.stack([numbers, offsets, lengths, np.zeros_like(numbers), lengths], axis=1)


class Process:
    """A forked child that serves until it is ended."""

    def __init__(self, serve: Callable[[], Address]) -> None:
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.write(writing, str(serve().port).encode() + b"\n")
                while True:
                    signal.pause()
            finally:
                os._exit(1)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            self.address = Address(host="127.0.0.1", port=int(pipe.readline()))

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)  # it goes on for a moment

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


@contextlib.contextmanager
def node_process(path: Path, *, filled: bool = True) -> Iterator[Process]:
    """A node in a process of its own."""

    def serve() -> Address:
        made = Node(path)
        if filled:
            fill(made.tiers)
        return made.address

    process = Process(serve)
    try:
        yield process
    finally:
        process.end()
