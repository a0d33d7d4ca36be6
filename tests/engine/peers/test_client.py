"""A client among peers that die, freeze, lie, hang up, get stuck, or are not there."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.engine.peers.transport_kit import (
    RUN,
    SECRET,
    SHELF,
    Said,
    Waiting,
    client,
    node,
    node_process,
    ranges_of,
)
from tests.storage.conftest import fill

from penstock.engine.peers import client_connection, client_link, handshake, server_loop, wire
from penstock.engine.peers.base import Address, Answer, Ask
from penstock.engine.peers.client import PeerClient
from penstock.errors import OptionError, PeerError
from penstock.testing.ports import free_ports

LIARS = itertools.count()
"""Numbers of peers that are asked once."""


@contextmanager
def liar(
    speak: Callable[[socket.socket, wire.Frame], None], name: str = "node-a"
) -> Iterator[Address]:
    """A server that goes through the hello and then answers the first ask as a test wants."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.settimeout(20)
            machine = handshake.ServerHandshake(
                name=name, secrets={RUN: SECRET}.get, nonce=os.urandom(32)
            )
            decoder = wire.Decoder({wire.HELLO, wire.PROOF, *wire.FROM_ASKERS})
            while True:
                data = sock.recv(4096)
                if not data:
                    return
                decoder.feed(data)
                while (frame := decoder.next()) is not None:
                    if machine.is_done:
                        speak(sock, frame)
                    else:
                        sock.sendall(machine.on(frame))

    def guarded() -> None:
        with suppress(OSError):
            serve()

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    try:
        yield Address(host="127.0.0.1", port=listener.getsockname()[1])
    finally:
        listener.close()
        thread.join(20)


def an_answer(number: int, payload_bytes: int, num_ranges: int = 1) -> bytes:
    return wire.pack_answer(
        number,
        progress_mark=0,
        payload_bytes=payload_bytes,
        gossip=b"",
        is_here=bytes([1]) * num_ranges,
        sums=np.zeros(num_ranges, np.uint64),
    )


def test_a_peer_that_is_not_there_fails_at_once() -> None:
    (port,) = free_ports(1)
    gossip = Said()
    with client(gossip=gossip) as c:
        asks = [Waiting(c, Address(host="127.0.0.1", port=port), [5]) for _ in range(3)]
        assert {ask.error().kind for ask in asks} == {"lost"}
        assert "refused" in str(asks[0].error())
        assert Waiting(c, [], [5]).error().kind == "lost"
    assert ("lost", "node-a") in gossip.events


def test_the_first_address_that_works_is_used_and_remembered(tmp_path: Path) -> None:
    dead, *_ = free_ports(1)
    with node(tmp_path) as a, client() as c:
        unreachable = [
            Address(host="127.0.0.1", port=dead),
            Address(host="::1", port=a.address.port),
            Address(host="not-a-literal", port=1),
        ]
        assert Waiting(c, [*unreachable, a.address], [5]).is_right()
        assert c._links["node-a"]._worked == a.address


def test_an_address_that_swallows_everything_costs_a_moment_and_not_the_peer(
    tmp_path: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute, node(tmp_path) as a, client() as c:
        swallowing = Address(host="127.0.0.1", port=mute.getsockname()[1])
        assert Waiting(c, [swallowing, a.address], [5]).is_right()


def test_an_address_where_another_node_answers_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with node(tmp_path) as a, node(tmp_path / "x", name="node-x") as x, client() as c:
        assert Waiting(c, [x.address, a.address], [5]).is_right()
        assert a.server.counts()["requests"] == 1
        alone = Waiting(c, [x.address], [5], peer="node-y").error()
        assert alone.kind == "broken"
        assert "node-x answers there" in str(alone)


def test_a_server_with_another_secret_is_not_asked(tmp_path: Path) -> None:
    gossip = Said()
    with node(tmp_path) as a, client(secret=b"x" * 32, gossip=gossip) as c:
        error = Waiting(c, a.address, [5]).error()
        assert error.kind == "refused"
        assert error.peer == "node-a"
        assert a.server.counts()["requests"] == 0
    assert gossip.events == [("refused", "node-a")]


def test_a_frozen_peer_is_lost_after_one_silence_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_link, "SILENCE_S", 0.8)
    (tmp_path / "x").mkdir()
    gossip = Said()
    with (
        node_process(tmp_path) as frozen,
        node(tmp_path / "x", name="node-x") as x,
        client(gossip=gossip) as c,
    ):
        assert Waiting(c, frozen.address, [5]).is_right()
        frozen.freeze()
        began_s = time.monotonic()
        asks = [Waiting(c, frozen.address, [unit]) for unit in range(20)]
        while not asks[0].is_done:
            assert Waiting(c, x.address, [5], peer="node-x").is_right()
        assert {ask.error().kind for ask in asks} == {"lost"}
        assert time.monotonic() - began_s >= 0.8
        # The system still accepts for it, which is no sign of life.
        assert Waiting(c, frozen.address, [5]).error().kind == "lost"
        assert gossip.events.count(("lost", "node-a")) == 2
        frozen.thaw()
        assert Waiting(c, frozen.address, [5]).is_right()


def test_a_peer_that_is_busy_with_parked_asks_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_link, "SILENCE_S", 0.8)
    monkeypatch.setattr(server_loop, "BEAT_S", 0.05)
    with node(tmp_path, filled=False) as a, client() as c:
        assert Waiting(c, a.address, [5], wait_s=1.2).answer().absent == (0,)


def test_a_killed_peer_fails_all_that_was_asked_at_once(tmp_path: Path) -> None:
    with node_process(tmp_path, filled=False) as killed, client() as c:
        asks = [Waiting(c, killed.address, [unit], wait_s=600) for unit in range(60)]
        assert all(ask.is_parked.wait(20) for ask in asks)
        killed.end()
        assert {ask.error().kind for ask in asks} == {"lost"}
        assert c.counts()["node-a"]["failed"] == 60


def test_parked_asks_fail_when_their_peer_does_not_get_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_link, "STUCK_S", 0.8)
    monkeypatch.setattr(server_loop, "BEAT_S", 0.05)
    gossip = Said()
    with node(tmp_path, filled=False) as a, client(gossip=gossip) as c:
        fill(a.tiers, [0])
        stuck = Waiting(c, a.address, [5], wait_s=600)
        assert stuck.is_parked.wait(20)
        while not stuck.is_done:
            assert Waiting(c, a.address, [0]).is_right()
        assert stuck.error().kind == "stuck"
        assert gossip.events == [("reached", "node-a"), ("stuck", "node-a")]
        # Its answer comes after all, and goes to waste without hurting the next.
        fill(a.tiers, [5])
        assert Waiting(c, a.address, [5, 0]).is_right()
        assert not any(stuck.into)
        assert a.server.counts()["accepted"] == 1


def test_parked_asks_wait_while_their_peer_gets_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_link, "STUCK_S", 0.8)
    monkeypatch.setattr(server_loop, "BEAT_S", 0.05)
    with node(tmp_path, filled=False) as a, client() as c:
        waiting = Waiting(c, a.address, [5], wait_s=1.6)
        while not waiting.is_done:
            a.filling.position += 1
            time.sleep(0.05)  # the pace at which the node gets on
        assert waiting.answer().absent == (0,)


@pytest.mark.parametrize(
    "nonsense",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        wire.HEAD.pack(wire.ANSWER, 2**31, 1),
        an_answer(1, 19_999),
        an_answer(1, 20_000, num_ranges=2),
        an_answer(2, 20_000),
        wire.framed(wire.PARKED, 7),
        wire.pack_status(1, {}),
        wire.framed(wire.STATUS, 1, b"\xc1"),
        wire.framed(wire.BEAT, 0, b"x"),
    ],
)
def test_a_peer_that_talks_nonsense_is_hung_up_on(nonsense: bytes) -> None:
    with liar(lambda sock, _: sock.sendall(nonsense)) as address, client() as c:
        assert Waiting(c, address, [5]).error().kind == "broken"


@given(
    words=st.binary(max_size=200),
    changes=st.lists(st.tuples(st.integers(0, 100), st.integers(0, 255)), max_size=4),
    is_random=st.booleans(),
)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_whatever_a_peer_says_ends_every_ask_once_and_hurts_no_other(
    live: tuple[PeerClient, Address], words: bytes, changes: list[tuple[int, int]], is_random: bool
) -> None:
    def speak(sock: socket.socket, frame: wire.Frame) -> None:
        data = bytearray(words if is_random else an_answer(frame.number, 20_000))
        for place, value in changes:
            if data:
                data[place % len(data)] = value
        sock.sendall(data + bytes(20_000))
        sock.shutdown(socket.SHUT_WR)

    c, good = live
    with liar(speak) as address:
        result = Waiting(c, address, [5], peer=f"@liar {next(LIARS)}").wait()
        assert isinstance(result, Answer) or result.kind in ("lost", "broken", "refused")
    assert Waiting(c, good, [5]).is_right()


@pytest.fixture
def live(tmp_path: Path) -> Iterator[tuple[PeerClient, Address]]:
    with node(tmp_path) as a, client() as c:
        yield c, a.address


def test_a_peer_that_hangs_up_in_the_middle_of_an_answer_is_lost() -> None:
    def speak(sock: socket.socket, frame: wire.Frame) -> None:
        sock.sendall(an_answer(frame.number, 20_000) + bytes(7000))
        sock.shutdown(socket.SHUT_RDWR)

    with liar(speak) as address, client() as c:
        assert Waiting(c, address, [5]).error().kind == "lost"


def test_an_answer_may_come_byte_by_byte() -> None:
    def speak(sock: socket.socket, frame: wire.Frame) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data = an_answer(frame.number, 2, num_ranges=2) + b"ab"
        for place in range(len(data)):
            sock.send(data[place : place + 1])

    with liar(speak) as address, client() as c:
        ask = Waiting(c, address, [4, 10])
        assert ask.answer().absent == ()
        assert ask.into == b"ab"


def test_answers_may_overtake_each_other() -> None:
    frames: list[wire.Frame] = []

    def speak(sock: socket.socket, frame: wire.Frame) -> None:
        frames.append(frame)
        if len(frames) == 3:
            for number, each in enumerate(reversed(frames)):
                sock.sendall(an_answer(each.number, 1) + bytes([number]))

    with liar(speak) as address, client() as c:
        asks = [Waiting(c, address, [4]) for _ in range(3)]
        assert [bytes(ask.into) for ask in asks if ask.answer()] == [b"\2", b"\1", b"\0"]


def test_more_asks_than_fit_wait_for_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_connection, "ASKS_MAX", 3)
    with node(tmp_path) as a, client() as c:
        asks = [Waiting(c, a.address, [u % 60, (u + 1) % 60]) for u in range(500)]
        assert all(ask.is_right() for ask in asks)
        assert c.counts()["node-a"]["requests"] == 500
        assert c.counts()["node-a"]["bytes"] == sum(len(ask.into) for ask in asks)


def test_many_threads_ask_many_peers(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    with (
        node(tmp_path / "a") as a,
        node(tmp_path / "b", name="node-b") as b,
        node(tmp_path / "c", name="node-c") as third,
        client() as c,
    ):
        peers = {"node-a": a, "node-b": b, "node-c": third}
        wrong: list[int] = []

        def ask(seed: int) -> None:
            draw = np.random.default_rng(seed)
            for _ in range(30):
                peer = str(draw.choice(list(peers)))
                units = draw.integers(0, 60, draw.integers(1, 20)).tolist()
                if not Waiting(c, peers[peer].address, units, peer=peer).is_right():
                    wrong.append(seed)

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert sum(counts["requests"] for counts in c.counts().values()) == 240


def test_a_peer_that_came_back_is_found_again(tmp_path: Path) -> None:
    with client() as c:
        with node(tmp_path) as a:
            address = a.address
            assert Waiting(c, address, [5]).is_right()
        assert Waiting(c, address, [5]).error().kind == "lost"
        with node(tmp_path, bind=[address]):
            assert Waiting(c, address, [5]).is_right()


def test_stopping_finishes_every_ask_once(tmp_path: Path) -> None:
    with node(tmp_path, filled=False) as a, client() as c:
        asks = [Waiting(c, a.address, [unit], wait_s=600) for unit in range(60)]
        assert asks[0].is_parked.wait(20)
        stopping = threading.Thread(target=c.stop)
        stopping.start()
        asks += [Waiting(c, a.address, [unit]) for unit in range(60)]
        stopping.join(20)
        asks.append(Waiting(c, a.address, [5]))
        results = [ask.wait() for ask in asks]
        assert all(isinstance(each, PeerError) or each.absent == (0,) for each in results)
        assert isinstance(results[0], PeerError)
        assert isinstance(results[-1], PeerError)


def test_a_callback_that_fails_is_logged_and_hurts_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(result: Answer | PeerError) -> None:
        raise RuntimeError("a mistake of somebody else")

    with node(tmp_path) as a, client() as c:
        ask = Ask(shelf=SHELF, ranges=ranges_of([4]))
        into = memoryview(bytearray(1))
        c.ask("node-a", [a.address], ask, into, parked=lambda: None, done=fails)
        assert Waiting(c, a.address, [5]).is_right()
        assert "a mistake of somebody else" in caplog.text


def test_asks_beyond_the_bounds_are_refused_before_they_are_sent() -> None:
    with client() as c:
        ranges = np.zeros((4097, 5), np.int64)
        for ask, into in (
            (Ask(shelf=SHELF, ranges=ranges), bytearray(0)),
            (Ask(shelf=SHELF, ranges=ranges_of([5])), bytearray(19_999)),
        ):
            with pytest.raises(OptionError):
                c.ask(
                    "node-a",
                    [],
                    ask,
                    memoryview(into),
                    parked=lambda: None,
                    done=lambda result: None,
                )


def test_a_client_that_never_asked_leaves_nothing_behind() -> None:
    before = threading.active_count()
    with client() as c:
        assert threading.active_count() == before
        assert c.counts() == {}


def test_a_process_that_slept_does_not_call_its_peers_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time that passed while a callback held the client's thread is nobody's silence."""
    monkeypatch.setattr(client_link, "SILENCE_S", 0.8)
    monkeypatch.setattr(server_loop, "BEAT_S", 0.05)
    with node(tmp_path, filled=False) as a, client() as c:
        other = Waiting(c, a.address, [5], wait_s=1.3)
        assert other.is_parked.wait(20)
        ask = Ask(shelf=SHELF, ranges=ranges_of([4]))
        into = memoryview(bytearray(1))
        c.ask(
            "node-a",
            [a.address],
            ask,
            into,
            parked=lambda: None,
            done=lambda result: time.sleep(1.0),  # what is tested
        )
        assert other.answer().absent == (0,)


def test_names_of_peers_may_be_left_open(tmp_path: Path) -> None:
    asker = PeerClient(name="cli", run_id=RUN, secret=SECRET)
    with node(tmp_path) as a:
        assert asker.status(f"@{a.address}", [a.address], 20)["fill"] == 0.5
    with pytest.raises(PeerError):
        asker.status(f"@{a.address}", [a.address], 20)
    asker.stop()
