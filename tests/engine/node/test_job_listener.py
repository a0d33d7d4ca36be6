"""The node's socket, which every user of the host may open: nobody can take much of the service."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from tests.engine.node.jobs import StartedNode

from penstock.engine.node import runs
from penstock.engine.node.job_listener import CONNECTIONS_OF_USER_MAX
from penstock.engine.peers import node_messages
from penstock.engine.peers.node_messages import FRAME_BYTES_MAX, OpenTiers, packed, receive_answer
from penstock.errors import PeerError

Start = Callable[..., StartedNode]


@contextlib.contextmanager
def knocking(node: StartedNode, count: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(count):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            sock.settimeout(20)
            sock.connect(node.socket)
            opened.append(sock)
        yield opened


def send_part(sock: socket.socket, num_bytes: int) -> None:
    """Claim the longest ask and send a part of it, as far as the service reads."""
    sock.sendall(FRAME_BYTES_MAX.to_bytes(4, "little"))
    sock.settimeout(0.2)
    with contextlib.suppress(TimeoutError, BrokenPipeError, ConnectionResetError):
        sock.sendall(bytes(num_bytes))
    sock.settimeout(20)


def resident_bytes(node: StartedNode) -> int:
    pages = Path(f"/proc/{node.pid}/statm").read_text().split()[1]
    return int(pages) * 4096


def test_unfinished_asks_hold_next_to_no_memory_and_others_are_answered(start: Start) -> None:
    node = start()
    before_bytes = resident_bytes(node)
    with knocking(node, 40) as opened:
        for sock in opened:
            send_part(sock, FRAME_BYTES_MAX - 1)
        assert resident_bytes(node) - before_bytes < 4 * FRAME_BYTES_MAX
        with node.connect() as well_behaved:
            assert well_behaved.look().status.name


def test_an_ask_that_does_not_arrive_in_time_ends_its_connection(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_messages, "FRAME_S_MAX", 0.3)  # the service is forked from here
    node = start()
    with knocking(node, 3) as opened, node.connect() as silent:
        for sock, part in zip(opened, (b"\1", b"\1\0\0\0", b"\2\0\0\0x"), strict=True):
            sock.sendall(part)
        assert [sock.recv(1) for sock in opened] == [b""] * 3
        assert silent.look().status.name, "who has not begun to ask may be silent"


def test_a_large_ask_is_answered_and_one_beyond_the_bound_is_not(start: Start) -> None:
    node = start()
    about = {f"{number:04}": "x" * 4096 for number in range(16)}
    ask = OpenTiers(dataset="data", num_units=1, size_bytes=10, about=about)
    assert len(packed(ask)) > node_messages.SMALL_FRAME_BYTES
    with knocking(node, 2) as (one, other):
        one.sendall(packed(ask))
        assert isinstance(receive_answer(one), node_messages.TiersOpened)
        more = msgspec.structs.replace(ask, about={**about, "17": ""})
        other.sendall(packed(more))
        assert other.recv(1) == b""


def test_one_user_has_a_bounded_number_of_connections(start: Start) -> None:
    node = start()
    with knocking(node, CONNECTIONS_OF_USER_MAX) as opened:
        for sock in opened:
            sock.sendall(packed(node_messages.ListRuns()))
            assert receive_answer(sock) is not None
        with knocking(node, 1) as (late,):
            assert late.recv(1) == b""
    with node.connect() as again:
        assert again.look().status.name


def test_one_user_has_a_bounded_number_of_runs(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "RUNS_OF_USER_MAX", 3)
    node = start()
    with node.connect() as job:
        job.open(dataset="data", num_units=1, size_bytes=10)
        for number in range(3):
            job.register(run_id=bytes([number] * 16), secret=bytes([number] * 32), dataset="data")
        with pytest.raises(PeerError, match="has 3 runs"):
            job.register(run_id=bytes([9] * 16), secret=bytes([9] * 32), dataset="data")
        job.register(run_id=bytes([1] * 16), secret=bytes([1] * 32), dataset="data")
