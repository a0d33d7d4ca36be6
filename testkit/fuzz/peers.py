"""What peers and jobs say to each other as a subject: real servers that hear nonsense.

A server may hang up on whoever talks nonsense. It may not die, stop serving others, or give wrong
bytes to one who asks properly.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np

from penstock.engine.node.job_listener import JobListener
from penstock.engine.peers import facts, handshake, node_messages, wire
from penstock.engine.peers.base import Address, Shelves
from penstock.engine.peers.node_messages import (
    Acknowledged,
    ListRuns,
    OpenTiers,
    RegisterRun,
    ReportProgress,
    RunMember,
    packed,
)
from penstock.engine.peers.server import PeerServer
from penstock.engine.peers.shelf import TierShelf
from penstock.engine.peers.status import LinkStatus, RunStatus
from penstock.storage.tier import Tiers
from penstock.storage.tier_open import open_tiers
from penstock.storage.tier_shape import TierShape
from penstock.storage.tier_sizes import Disk
from testkit.fuzz.mutate import mutated
from testkit.fuzz.subjects import Subject, WrongDataError

RUN, SECRET, SHELF = b"r" * 16, b"k" * 32, b"s" * 16
UNIT_BYTES, NUM_UNITS = 5000, 6
TIMEOUT_S = 5.0


def _filled(folder: Path) -> Tiers:
    offsets = np.arange(NUM_UNITS, dtype=np.int64) * UNIT_BYTES
    lengths = np.full(NUM_UNITS, UNIT_BYTES, np.int64)
    tiers = open_tiers(
        [Disk(folder, "1MB")], TierShape(name="fuzz", offsets=offsets, lengths=lengths)
    )
    for unit in range(NUM_UNITS):
        assert tiers.tiers[0].claim(unit)
        tiers.tiers[0].write(unit, bytes([unit]) * UNIT_BYTES)
        tiers.tiers[0].release(unit)
    return tiers


def _ask(number: int, units: list[int]) -> bytes:
    rows = [[unit, unit * UNIT_BYTES, UNIT_BYTES, 10, 100] for unit in units]
    return wire.pack_ask(number, SHELF, np.array(rows, np.int64), 0.0, b"")


class PeerServerInput:
    """A server of tiers."""

    name = "peer-server"

    def prepare(self, folder: Path) -> None:
        """Start it."""
        shelves = Shelves()
        shelves.add(TierShelf(SHELF, _filled(folder), lambda: 0, lambda: False))
        self._server = PeerServer(
            name="fuzzed",
            shelves=shelves,
            secrets={RUN: SECRET}.get,
            bind=[Address(host="127.0.0.1", port=0)],
        )
        self._server.start()
        self._good = self._known()

    def _connected(self) -> socket.socket:
        address = self._server.address
        return socket.create_connection((address.host, address.port), timeout=TIMEOUT_S)

    def _known(self) -> socket.socket:
        """Return a connection that has proved itself."""
        sock = self._connected()
        asker = handshake.ClientHandshake(
            name="asker", run_id=RUN, secret=SECRET, nonce=os.urandom(32)
        )
        sock.sendall(asker.opening)
        decoder = wire.Decoder({wire.CHALLENGE, wire.WELCOME, wire.REFUSE})
        while not asker.is_done:
            decoder.feed(sock.recv(4096))
            while (frame := decoder.next()) is not None:
                sock.sendall(asker.on(frame))
        return sock

    def try_one(self, random: Random, folder: Path) -> None:
        """Say something damaged, before or after the proof; then ask properly elsewhere."""
        asks = b"".join(_ask(number, [number % NUM_UNITS, 1]) for number in range(3))
        said = asks + wire.framed(wire.STATUS_ASK, 9) + wire.framed(wire.BYE)
        if random.random() < 0.3:
            asker = handshake.ClientHandshake(
                name="asker", run_id=RUN, secret=SECRET, nonce=os.urandom(32)
            )
            sock, said = self._connected(), asker.opening + said
        else:
            sock = self._known()
        with sock, contextlib.suppress(OSError):
            sock.sendall(mutated(random, said))
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass
        self._check()

    def _check(self) -> None:
        self._good.sendall(_ask(7, [3, 5]))
        decoder = wire.Decoder(wire.FROM_SERVERS)
        while (frame := decoder.next()) is None or frame.kind != wire.ANSWER:
            data = self._good.recv(1 << 16)
            assert data, "the server hung up on a peer that asked properly"
            decoder.feed(data)
        payload = bytearray()
        decoder_rest = bytearray(200)
        payload += decoder_rest[: decoder.take(memoryview(decoder_rest))]
        while len(payload) < 200:
            payload += self._good.recv(200 - len(payload))
        if payload != bytes([3]) * 100 + bytes([5]) * 100:
            raise WrongDataError("a peer that asked properly got other bytes")


class PeerAnswers:
    """What a client reads of a server's answers, and gossip of members."""

    name = "peer-answers"

    def prepare(self, folder: Path) -> None:
        """Write down good ones."""
        sums = np.arange(3, dtype=np.uint64)
        answer = wire.pack_answer(
            4, progress_mark=5, payload_bytes=30, gossip=b"g" * 9, is_here=b"\1\0\1", sums=sums
        )
        beat = wire.pack_beat({SHELF: 11})
        status = wire.pack_status(3, {"fill": 0.5, "words": ["a"], "nest": {"x": [1, 2]}})
        self._said = answer + beat + status + wire.framed(wire.PARKED, 8)
        report = facts.MemberReport(
            reporter=1, voice=2, life=3, peer=4, incarnation=5, sequence=6, stands=True
        )
        self._gossip = facts._encoder.encode([report])

    def try_one(self, random: Random, folder: Path) -> None:
        """Decode all frames of a damaged stream."""
        decoder = wire.Decoder(wire.FROM_SERVERS)
        decoder.feed(mutated(random, self._said))
        with contextlib.suppress(wire.WireError):
            while (frame := decoder.next()) is not None:
                if frame.kind == wire.ANSWER:
                    answer = wire.parse_answer(frame.body)
                    wire.fault_in_answer(answer, [10, 20, 20])
                elif frame.kind == wire.BEAT:
                    wire.parse_beat(frame.body)
                elif frame.kind == wire.STATUS:
                    wire.parse_status(frame.body)
        facts.decoded(mutated(random, self._gossip))


class NodeSocket:
    """The unix socket of the node service."""

    name = "node-socket"

    def prepare(self, folder: Path) -> None:
        """Listen."""
        self._path = str(folder / "socket")
        door = JobListener(self._path, lambda client, word: Acknowledged(), lambda client: None)
        door.take()
        door.start()
        member = RunMember(name="n", host="h", addresses=(("127.0.0.1", 7),))
        status = RunStatus(links=(LinkStatus(peer="x"),), log=("it began",))
        words = (
            ListRuns(),
            OpenTiers(dataset="data", num_units=3, size_bytes=30, about={"uri": "s3://x"}),
            RegisterRun(run_id=RUN, secret=SECRET, shelf=SHELF, dataset="data", members=(member,)),
            ReportProgress(run_id=RUN, status=status, said=b"gossip"),
        )
        self._said = b"".join(packed(word) for word in words)

    def try_one(self, random: Random, folder: Path) -> None:
        """Say something damaged; then ask properly."""
        with self._connected() as sock, contextlib.suppress(OSError):
            sock.sendall(mutated(random, self._said))
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass
        with self._connected() as sock:
            sock.sendall(packed(ListRuns()))
            assert isinstance(node_messages.receive_answer(sock), Acknowledged)

    def _connected(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(TIMEOUT_S)
        sock.connect(self._path)
        return sock


SUBJECTS: dict[str, Callable[[], Subject]] = {
    kind.name: kind for kind in (PeerServerInput, PeerAnswers, NodeSocket)
}
