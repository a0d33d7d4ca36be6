"""A server among good clients, strangers, liars, and readers that do not read."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from testkit.waiting import wait_until
from tests.engine.peers.transport_kit import (
    LENGTHS,
    RUN,
    SECRET,
    SHAPE,
    SHELF,
    Node,
    Said,
    Waiting,
    client,
    node,
    ranges_of,
)
from tests.storage.conftest import fill

from penstock.engine.peers import handshake, server_connection, server_loop, wire
from penstock.engine.peers.base import Address, HeldFile, Lookup, Shelf
from penstock.engine.peers.shelf import TierShelf
from penstock.errors import PeerError
from penstock.storage.tier_open import open_tiers
from penstock.storage.tier_sizes import Disk
from penstock.testing.forks import in_child, start_child, wait_for


def known(address: Address, secret: bytes = SECRET) -> socket.socket:
    """Return a blocking socket that has been through the hello."""
    sock = socket.create_connection((address.host, address.port), timeout=20)
    asker = handshake.ClientHandshake(name="raw", run_id=RUN, secret=secret, nonce=os.urandom(32))
    sock.sendall(asker.opening)
    decoder = wire.Decoder({wire.CHALLENGE, wire.WELCOME, wire.REFUSE})
    while not asker.is_done:
        decoder.feed(sock.recv(4096))
        while (frame := decoder.next()) is not None:
            sock.sendall(asker.on(frame))
    return sock


def test_what_is_there_is_answered_with_its_bytes_and_sums(tmp_path: Path) -> None:
    with node(tmp_path) as a, client() as c:
        asks = [Waiting(c, a.address, [u, (u + 7) % 60, (u + 8) % 60]) for u in range(60)]
        assert all(ask.is_right() and not ask.answer().absent for ask in asks)
        for ask in asks:
            assert list(ask.answer().sums) == a.tiers.tiers[0].sums_of(np.array(ask.units))
        assert a.server.counts()["requests"] == 60
        assert a.server.counts()["bytes"] == sum(len(ask.into) for ask in asks)
        assert a.server.bytes_by_shelf() == {SHELF: a.server.counts()["bytes"]}


@pytest.mark.parametrize("host", ["::1", "::", "127.0.0.1", ""])
def test_it_listens_where_it_is_told_in_both_families(tmp_path: Path, host: str) -> None:
    with node(tmp_path, bind=[Address(host=host, port=0)]) as a:
        hosts = {"::1": ["::1"], "127.0.0.1": ["127.0.0.1"]}.get(host, ["127.0.0.1", "::1"])
        for each in hosts:
            with client() as c:
                assert Waiting(c, Address(host=each, port=a.address.port), [5]).is_right()


def test_several_addresses_share_one_port_and_no_other_address_answers(tmp_path: Path) -> None:
    told = [Address(host=host, port=0) for host in ("127.0.0.2", "127.0.0.3", "::1")]
    with node(tmp_path, bind=told) as a:
        addresses = a.server.addresses
        assert [each.host for each in addresses] == ["127.0.0.2", "127.0.0.3", "::1"]
        assert len({each.port for each in addresses}) == 1
        for each in addresses:
            with client() as c:
                assert Waiting(c, each, [5]).is_right()
        for host in ("127.0.0.1", "127.0.0.4"):
            with pytest.raises(ConnectionRefusedError), socket.socket() as stranger:
                stranger.connect((host, addresses[0].port))


def test_an_address_that_this_host_does_not_have_is_left_out(tmp_path: Path) -> None:
    missing, loopback = (Address(host=host, port=0) for host in ("192.0.2.1", "127.0.0.1"))
    with node(tmp_path, bind=[missing, loopback]) as a:
        assert [each.host for each in a.server.addresses] == ["127.0.0.1"]
    with pytest.raises(PeerError, match=re.escape("192.0.2.1")):
        Node(tmp_path, bind=[missing])


def test_an_address_in_use_is_named(tmp_path: Path) -> None:
    with node(tmp_path) as a, pytest.raises(PeerError, match=str(a.address.port)):
        Node(tmp_path, bind=[a.address])


def test_parts_of_units_and_neighbours_come_in_order(tmp_path: Path) -> None:
    with node(tmp_path) as a, client() as c:
        rows = ranges_of([5, 0, 1, 11])
        rows[0, wire.INSIDE], rows[0, wire.LENGTH] = 19_000, 1000
        rows[3, wire.LENGTH] = 3
        sent = known(a.address)
        sent.sendall(wire.pack_ask(1, SHELF, rows, 0, b""))
        decoder, payload = wire.Decoder(wire.FROM_SERVERS), bytearray(1000 + 6000 + 3)
        frame = None
        while frame is None:
            decoder.feed(sent.recv(65536))
            frame = decoder.next()
        count = decoder.take(memoryview(payload))
        while count < len(payload):
            count += sent.recv_into(memoryview(payload)[count:])
        sent.close()
        whole = [Waiting(c, a.address, [unit]) for unit in (5, 0, 1, 11)]
        assert all(each.is_right() for each in whole)
        parts = [whole[0].into[19_000:], whole[1].into, whole[2].into, whole[3].into[:3]]
        assert payload == b"".join(parts)


def test_what_is_absent_and_will_not_come_is_answered_at_once(tmp_path: Path) -> None:
    with node(tmp_path, filled=False) as a, client() as c:
        fill(a.tiers, [0, 5])
        a.filling.is_on = False
        ask = Waiting(c, a.address, [0, 1, 5, 3], wait_s=600)
        assert ask.answer().absent == (1, 3)
        assert ask.answer().sums[1] == 0
        assert not ask.answer().was_parked
        assert ask.is_right()


def test_units_and_places_that_do_not_exist_are_absent(tmp_path: Path) -> None:
    with node(tmp_path) as a, client() as c:
        rows = ranges_of([5] * 5)
        rows[0, wire.UNIT] = 60
        rows[1, wire.UNIT] = 2**62
        rows[2, wire.UNIT_OFFSET] = 2**61
        rows[3, wire.UNIT_LENGTH] = SHAPE.size_bytes + 1
        found = a.shelves.get(SHELF).lookup(rows)  # type: ignore[union-attr]
        assert found.places.tolist() == [-1, -1, -1, -1, 0]
        assert Waiting(c, a.address, [5], shelf=b"another shelf of").answer().absent == (0,)


def test_a_parked_ask_is_answered_when_another_process_has_filled_it(tmp_path: Path) -> None:
    with node(tmp_path, filled=False) as a, client() as c:
        fill(a.tiers, [0])
        waiting = Waiting(c, a.address, [0, 1, 5], wait_s=600)
        assert waiting.is_parked.wait(20)
        # One that waits does not stop one that came later.
        assert Waiting(c, a.address, [0], wait_s=600).is_right()
        assert not waiting.is_done
        assert a.server.counts()["parked"] == 1
        in_child(lambda: fill(a.tiers, [5]))
        assert not waiting.is_done
        a.filling.position = 9
        in_child(lambda: fill(a.tiers, [1]))
        assert waiting.is_right()
        answer = waiting.answer()
        assert (answer.absent, answer.was_parked, answer.progress_mark) == ((), True, 9)
        assert a.server.counts()["parked"] == 0


def test_a_parked_ask_comes_back_when_its_time_or_the_filling_is_over(tmp_path: Path) -> None:
    with node(tmp_path, filled=False) as a, client() as c:
        fill(a.tiers, [0])
        assert Waiting(c, a.address, [0, 1], wait_s=0.05).answer().absent == (1,)
        waiting = Waiting(c, a.address, [0, 1], wait_s=600)
        assert waiting.is_parked.wait(20)
        a.filling.is_on = False
        assert waiting.answer().absent == (1,)
        a.filling.is_on = True
        waiting = Waiting(c, a.address, [0, 1], wait_s=600)
        assert waiting.is_parked.wait(20)
        a.shelves.remove(SHELF)
        assert waiting.answer().absent == (0, 1)


def test_a_run_reads_only_the_shelves_that_it_may(tmp_path: Path) -> None:
    with node(tmp_path, may_read=lambda run, shelf: run != RUN) as a, client() as c:
        assert Waiting(c, a.address, [5], wait_s=600).answer().absent == (0,)


def test_what_an_earlier_run_left_is_checked_before_it_is_sent(tmp_path: Path) -> None:
    wish = Disk(tmp_path, "1MB")
    with open_tiers([wish], SHAPE) as tiers:
        fill(tiers)
        os.pwrite(tiers.tiers[0].descriptor, b"other bytes", int(SHAPE.offsets[11]))
    with open_tiers([wish], SHAPE) as tiers, node(tmp_path, filled=False) as a:
        assert tiers.unchecked(np.arange(60)).all()
        a.shelves.add(TierShelf(SHELF, tiers, lambda: 0, lambda: False))
        with client() as c:
            ask = Waiting(c, a.address, [5, 11, 17])
            assert ask.answer().absent == (1,)
            assert ask.is_right()
            assert tiers.held(np.array([5, 11, 17])).tolist() == [True, False, True]


def test_runs_with_secrets_of_their_own_share_a_server(tmp_path: Path) -> None:
    secrets = {RUN: SECRET, b"q" * 16: b"z" * 32}
    with node(tmp_path, secrets=secrets.get) as a:
        with client() as one, client(run_id=b"q" * 16, secret=b"z" * 32) as other:
            assert Waiting(one, a.address, [5]).is_right()
            assert Waiting(other, a.address, [5]).is_right()
        with client(run_id=b"q" * 16) as liar:
            assert Waiting(liar, a.address, [5]).error().kind == "refused"


def test_a_stranger_is_told_why_counted_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with node(tmp_path) as a, client(run_id=b"q" * 16) as c:
        assert "does not know our run" in str(Waiting(c, a.address, [5]).error())
        wait_until(lambda: a.server.counts()["refused"] == 1)
        wait_until(lambda: "was refused" in caplog.text)


def test_an_asker_that_lies_about_its_secret_is_refused(tmp_path: Path) -> None:
    with node(tmp_path) as a:
        with socket.create_connection((a.address.host, a.address.port), timeout=20) as sock:
            asker = handshake.ClientHandshake(
                name="b", run_id=RUN, secret=b"x" * 32, nonce=b"n" * 32
            )
            sock.sendall(asker.opening)
            sock.recv(4096)
            sock.sendall(wire.framed(wire.PROOF, 0, b"p" * 32))
            decoder = wire.Decoder({wire.REFUSE})
            decoder.feed(sock.recv(4096))
            frame = decoder.next()
            assert frame is not None
            assert "our proof" in handshake.reason_in(frame)
        wait_until(lambda: a.server.counts()["refused"] == 1)


def test_strangers_who_say_nothing_are_sent_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "HELLO_S_MAX", 0.1)
    with node(tmp_path) as a:
        with socket.create_connection((a.address.host, a.address.port), timeout=20) as sock:
            assert sock.recv(4096) == handshake.refusal(handshake.SAID_SLOW)
            assert sock.recv(4096) == b""
        wait_until(lambda: a.server.counts()["connections"] == 0)


def test_there_are_never_more_strangers_than_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_loop, "STRANGERS_MAX", 5)
    with node(tmp_path) as a, client() as c, contextlib.ExitStack() as held:
        for _ in range(50):
            place = (a.address.host, a.address.port)
            held.enter_context(socket.create_connection(place, timeout=20))
        wait_until(lambda: a.server.counts()["accepted"] == 50)
        assert a.server.counts()["connections"] <= 10
        assert Waiting(c, a.address, [5]).is_right()


def test_thousands_who_come_and_go_leave_nothing_behind(tmp_path: Path) -> None:
    with node(tmp_path) as a, client() as c:
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        for number in range(2000):
            sock = socket.create_connection((a.address.host, a.address.port), timeout=20)
            if number % 3 == 0:
                sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
            if number % 3 == 1:  # a reset instead of an end
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        wait_until(lambda: a.server.counts()["accepted"] == 2000)
        wait_until(lambda: a.server.counts()["connections"] == 0)
        assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208
        assert Waiting(c, a.address, [5]).is_right()


@given(words=st.lists(st.binary(min_size=1, max_size=300), max_size=4), is_known=st.booleans())
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_garbage_hurts_nobody_else(
    live: tuple[Node, Callable[[], bool]], words: list[bytes], is_known: bool
) -> None:
    a, is_well = live
    sock = (
        known(a.address)
        if is_known
        else socket.create_connection((a.address.host, a.address.port), timeout=20)
    )
    with contextlib.suppress(OSError), sock:
        for word in words:
            sock.sendall(word)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(65536):
            pass
    assert is_well()


@given(
    changes=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 255)), max_size=4),
    cut=st.integers(1, 300),
)
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_spoilt_and_half_asks_hurt_nobody_else(
    live: tuple[Node, Callable[[], bool]], changes: list[tuple[int, int]], cut: int
) -> None:
    a, is_well = live
    data = bytearray(wire.pack_ask(1, SHELF, ranges_of([5, 6, 7]), 600, b"gossip"))
    for place, value in changes:
        data[place % len(data)] = value
    with contextlib.suppress(OSError), known(a.address) as sock:
        sock.sendall(data[: cut % len(data)])
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(65536):
            pass
    assert is_well()


@pytest.fixture
def live(tmp_path: Path):  # type: ignore[no-untyped-def]
    with node(tmp_path) as a, client() as c:

        def is_well() -> bool:
            return Waiting(c, a.address, [5, 1]).is_right()

        yield a, is_well
        assert a.server.counts()["parked"] == 0


class Endless(Shelf):
    """A shelf of one large file, as long as anybody wants it."""

    name = b"an endless shelf"

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(2**20))
        with path.open("ab") as file:
            file.truncate(64 * 2**20)
        self._file = HeldFile(os.open(path, os.O_RDONLY), close=True)

    def progress_mark(self) -> int:
        return 0

    def is_filling(self) -> bool:
        return False

    def lookup(self, ranges: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> Lookup:
        places = np.zeros(len(ranges), np.int64)
        sums = np.zeros(len(ranges), np.uint64)
        return Lookup(places=places, files=(self._file,), sums=sums)


def test_a_reader_that_does_not_read_blocks_nobody_and_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with node(tmp_path) as a, client() as c, known(a.address) as sock:
        a.shelves.add(Endless(tmp_path / "endless"))
        size = 64 * 2**20
        row = np.array([[0, 0, size, 0, size]], np.int64)
        for number in range(20):
            sock.sendall(wire.pack_ask(number, Endless.name, row, 0, b""))
        wait_until(lambda: a.server.counts()["requests"] == 20)
        assert all(Waiting(c, a.address, [unit]).is_right() for unit in range(60))
        monkeypatch.setattr(server_loop, "SEND_S_MAX", 0.1)
        wait_until(lambda: a.server.counts()["dropped"] == 1)
        assert Waiting(c, a.address, [5]).is_right()


def test_reading_stops_where_too_much_is_unanswered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_connection, "CONNECTION_COST_MAX", 100)
    with node(tmp_path, filled=False) as a, client() as c, known(a.address) as sock:
        for number in range(50):
            sock.sendall(wire.pack_ask(number, SHELF, ranges_of([5, 5]), 600, b""))
        wait_until(lambda: a.server.counts()["parked"] == 10)
        fill(a.tiers, [1])
        assert Waiting(c, a.address, [1]).is_right()
        assert a.server.counts()["parked"] == 10
        fill(a.tiers, [5])
        seen = 0
        while seen < 50 * (2 * 20_000):
            seen += len(sock.recv(2**20))
        assert a.server.counts()["requests"] == 51


def test_without_descriptors_it_waits_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with node(tmp_path) as a, client() as c, contextlib.ExitStack() as held:
        assert Waiting(c, a.address, [5]).is_right()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = max(map(int, os.listdir("/proc/self/fd")))  # noqa: PTH208
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, hard))
        sockets: list[socket.socket] = []
        held.callback(lambda: [sock.close() for sock in sockets])
        with pytest.raises(OSError) as caught:
            while True:
                sockets.append(socket.create_connection((a.address.host, a.address.port)))
        assert caught.value.errno == errno.EMFILE
        wait_until(lambda: "Too many open files" in caplog.text)
        assert Waiting(c, a.address, [5, 6]).is_right()
        for sock in sockets:
            sock.close()
        with client() as late:
            assert Waiting(late, a.address, [5]).is_right()


def test_gossip_goes_both_ways_and_is_not_repeated(tmp_path: Path) -> None:
    of_a, of_b = Said(b"a says"), Said(b"b says")
    with node(tmp_path, gossip=of_a) as a, client(gossip=of_b) as c:
        for _ in range(3):
            Waiting(c, a.address, [5]).answer()
        of_b.words = b"b has news"
        Waiting(c, a.address, [5]).answer()
    assert of_a.heard == [("node-b", b"b says"), ("node-b", b"b has news")]
    assert of_b.heard == [("node-a", b"a says")]
    assert of_b.events == [("reached", "node-a")]


def test_what_fails_in_somebody_elses_code_hurts_no_loop(tmp_path: Path) -> None:
    class Fails(Said):
        def say(self) -> bytes:
            raise RuntimeError("a mistake of somebody else")

    class Broken(Shelf):
        name = b"a broken shelf's"

    with (
        node(tmp_path, gossip=Fails(), status=lambda run_id: 1 / 0) as a,
        client(gossip=Fails()) as c,
    ):
        a.shelves.add(Broken())
        assert Waiting(c, a.address, [5], shelf=Broken.name, wait_s=9).answer().absent == (0,)
        assert Waiting(c, a.address, []).answer().absent == ()
        assert "error" in c.status("node-a", [a.address], 20)


def test_a_node_can_be_asked_how_it_is(tmp_path: Path) -> None:
    with node(tmp_path) as a, client() as c:
        assert c.status("node-a", [a.address], 20) == {"fill": 0.5, "words": ["a", "b"]}
        assert c.status(f"@{a.address}", [a.address], 20)["fill"] == 0.5


def test_a_server_that_stops_finishes_what_it_was_asked(tmp_path: Path) -> None:
    with node(tmp_path, filled=False) as a, client() as c:
        fill(a.tiers, [5])
        a.shelves.add(Endless(tmp_path / "endless"))
        parked = Waiting(c, a.address, [1, 5], wait_s=600)
        assert parked.is_parked.wait(20)
        with known(a.address) as slow:
            size = 64 * 2**20
            row = np.array([[0, 0, size, 0, size]], np.int64)
            slow.sendall(wire.pack_ask(1, Endless.name, row, 0, b""))
            wait_until(lambda: a.server.counts()["requests"] == 2)
            stopping = threading.Thread(target=a.server.stop, args=(20.0,))
            stopping.start()
            assert parked.answer().absent == (0,)
            count = 0
            while count < size:
                count += len(slow.recv(2**20))
        stopping.join(20)
        assert not stopping.is_alive()
        assert Waiting(c, a.address, [5]).error().kind == "lost"


def test_a_forked_child_neither_serves_nor_holds_the_connections(tmp_path: Path) -> None:
    with node(tmp_path) as a, client() as c:
        assert Waiting(c, a.address, [5]).is_right()

        def in_the_child() -> tuple[int, str]:
            a.server.stop()  # must not stop the parent's
            sockets = [
                name
                for name in os.listdir("/proc/self/fd")  # noqa: PTH208
                if _is_of(int(name), a.address.port)
            ]
            return len(sockets), Waiting(c, a.address, [5]).error().kind

        child = start_child(in_the_child)
        assert wait_for(child) == (0, "lost")
        assert Waiting(c, a.address, [6]).is_right()


def _is_of(descriptor: int, port: int) -> bool:
    """Whether a descriptor is of a port, at either end; those of other tests are about."""
    try:
        sock = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return False
    with sock:
        if sock.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        ends = [sock.getsockname()]
        with contextlib.suppress(OSError):
            ends.append(sock.getpeername())
        return port in [end[1] for end in ends]


def test_a_file_that_was_cut_short_costs_the_connection_and_not_wrong_bytes(
    tmp_path: Path,
) -> None:
    with node(tmp_path) as a, client() as c:
        tier = a.tiers.tiers[0]
        several = [5, 59, 0, 1, 3]  # of so many, the file's length is not looked up each time
        assert Waiting(c, a.address, several).is_right()
        os.ftruncate(tier.descriptor, int(SHAPE.offsets[59]) + 100)
        assert Waiting(c, a.address, several).error().kind == "lost"
        assert Waiting(c, a.address, several).answer().absent == (1,)
        assert sum(LENGTHS) > os.fstat(tier.descriptor).st_size
