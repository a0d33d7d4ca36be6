"""The service as jobs and peers see it: real processes, sockets and files."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import xxhash
from testkit.waiting import wait_until
from tests.engine.node.jobs import (
    UNIT_BYTES,
    Folders,
    Job,
    StartedNode,
    begin_job,
    get,
    shape,
    unit_bytes,
)

from penstock.engine.peers import handshake, wire
from penstock.engine.peers.base import Address, Answer, Ask, NoGossip, unnamed
from penstock.engine.peers.client import PeerClient
from penstock.engine.peers.local import LocalNode, shelf_name
from penstock.engine.peers.node_messages import RunMember
from penstock.engine.peers.status import LinkStatus, ReadCounts, RunStatus, status_of
from penstock.errors import PeerError
from penstock.trace import Kind, read_trace
from penstock.trace.recorder import TRACE_VARIABLE

Start = Callable[..., StartedNode]
RANGES_MAX = wire.RANGES_MAX
RUN, SECRET = b"r" * 16, b"s" * 32


@dataclass
class Heard:
    """Somebody who says one thing and remembers what is said."""

    says: bytes = b""
    heard: list[bytes] = field(default_factory=list)

    def say(self) -> bytes:
        return self.says

    def hear(self, peer: str, data: bytes) -> None:
        self.heard.append(data)

    def reached(self, peer: str) -> None:
        pass

    def silent(self, peer: str, kind: str) -> None:
        pass


def ask(
    node: StartedNode,
    units: list[int],
    *,
    secret: bytes = SECRET,
    run: bytes = RUN,
    wait_s: float = 0.0,
    gossip: Heard | None = None,
) -> tuple[Answer, bytes]:
    """Ask the service's peer server for whole units; return the answer and the bytes."""
    client = PeerClient(name="asker", run_id=run, secret=secret, gossip=gossip or Heard())
    rows = [[unit, unit * UNIT_BYTES, UNIT_BYTES, 0, UNIT_BYTES] for unit in units]
    into = bytearray(len(units) * UNIT_BYTES)
    has_come = threading.Event()
    results: list[Answer | PeerError] = []

    def done(result: Answer | PeerError) -> None:
        results.append(result)
        has_come.set()

    address = Address(host="127.0.0.1", port=node.port)
    shelf = shelf_name(SECRET, "data")
    try:
        wanted = Ask(shelf=shelf, ranges=np.array(rows, np.int64), wait_s=wait_s)
        peer, view = unnamed(address), memoryview(into)
        client.ask(peer, [address], wanted, view, parked=lambda: None, done=done)
        assert has_come.wait(20)
    finally:
        client.stop()
    if isinstance(results[0], PeerError):
        raise results[0]
    return results[0], bytes(into)


def register(job: Job) -> None:
    job.node.register(run_id=RUN, secret=SECRET, dataset=job.shape.name)


def test_what_a_job_filled_is_served_to_its_run_and_to_nobody_else(start: Start) -> None:
    node = start()
    job = begin_job(node)
    register(job)
    job.fill(range(20))
    answer, data = ask(node, [3, 30, 7])
    assert answer.absent == (1,)
    assert data[:UNIT_BYTES] == unit_bytes(3)
    assert data[2 * UNIT_BYTES :] == unit_bytes(7)
    assert answer.sums[0] == xxhash.xxh3_64_intdigest(unit_bytes(3))
    with pytest.raises(PeerError) as refused:
        ask(node, [3], secret=b"x" * 32)
    assert refused.value.kind == "refused"
    other = begin_job(node, shape("other"))
    other.node.register(run_id=b"o" * 16, secret=b"x" * 32, dataset="other")
    answer, _ = ask(node, [3], secret=b"x" * 32, run=b"o" * 16)
    assert answer.absent == (0,)
    other.end()
    job.end()


def test_answers_are_recorded_where_the_environment_names_a_trace(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRACE_VARIABLE, str(tmp_path / "run"))
    node = start()
    job = begin_job(node)
    members = [RunMember(name="asker", node=3)]
    job.node.register(run_id=RUN, secret=SECRET, dataset=job.shape.name, members=members)
    job.fill(range(4))
    ask(node, [2, 3])
    # The row is written once the answer has left, and the asker may have it before.
    wait_until(lambda: read_trace(tmp_path / "run").of(Kind.PEER_SERVE).size)
    job.end()
    trace = read_trace(tmp_path / "run")
    [row] = trace.of(Kind.PEER_SERVE)
    assert (row["size_bytes"], row["count"]) == (2 * UNIT_BYTES, 2)
    assert trace.name_of(row["source"]) == "peer:3"
    assert [process.role for process in trace.processes] == ["node"]


def test_a_cache_survives_its_job_and_disks_survive_the_service(
    start: Start, folders: Folders
) -> None:
    node = start()
    job = begin_job(node, shape(num_units=150))  # 1.5 MB: 1 MB in memory, the rest on disk
    assert [tier.kind for tier in job.opened.tiers] == ["memory", "disk"]
    job.fill(range(150))
    job.end()
    again = begin_job(node, shape(num_units=150))
    assert again.held() == 150
    assert again.opened.tiers == job.opened.tiers
    again.end()
    node.terminate()
    assert node.wait() == 0
    assert list(folders.memory.rglob("data")) == []
    later = begin_job(start(), shape(num_units=150))
    assert 40 <= later.held() < 150
    later.end()


def test_units_of_earlier_jobs_are_checked_before_they_are_served(start: Start) -> None:
    node = start(memory=None)
    job = begin_job(node)
    job.fill(range(10))
    path = job.tiers.tiers[0].path
    job.end()
    with open(f"{path}/data", "r+b") as file:
        file.seek(4 * UNIT_BYTES)
        file.write(b"rot")
    again = begin_job(node)
    register(again)
    answer, data = ask(node, [3, 4, 5])
    assert answer.absent == (1,)
    assert data[:UNIT_BYTES] == unit_bytes(3)
    again.fill(range(4, 5))
    answer, data = ask(node, [4])
    assert (answer.absent, data) == ((), unit_bytes(4))
    again.end()


def test_room_is_made_of_what_nobody_uses_the_oldest_first(start: Start, folders: Folders) -> None:
    node = start(memory=None, disk=[f"{folders.disk}:3MB"])
    for name in ("first", "second"):
        job = begin_job(node, shape(name, num_units=100))
        job.fill(range(100))
        job.end()
    used = begin_job(node, shape("first", num_units=100))
    large = begin_job(node, shape("large", num_units=200))
    assert large.opened.tiers[0].size_bytes > 1_900_000
    assert used.held() == 100
    used.end()
    large.end()
    second = begin_job(node, shape("second", num_units=100))
    assert second.held() == 0
    assert "dropped 1." in node.log.read_text()
    second.end()


def test_limits_hold_for_a_data_set_and_for_a_user(start: Start) -> None:
    node = start(memory=None, **{"limit-dataset": "2MB", "limit-user": "3MB"})
    first = begin_job(node, shape("first", num_units=500))
    second = begin_job(node, shape("second", num_units=500))
    assert [tier.size_bytes for tier in first.opened.tiers] == [2_000_000]
    assert [tier.size_bytes for tier in second.opened.tiers] == [1_000_000]
    first.end()
    second.end()


def test_ranks_of_a_job_are_granted_the_same(start: Start) -> None:
    node = start()
    ranks = [begin_job(node, shape(num_units=150)) for _ in range(3)]
    assert len({rank.opened.tiers for rank in ranks}) == 1
    assert len({tier.capacity_bytes for rank in ranks for tier in rank.tiers.tiers[:1]}) == 1
    for rank in ranks:
        rank.end()


def test_a_request_waits_while_ranks_fill_and_learns_their_cursor(start: Start) -> None:
    node = start()
    job = begin_job(node)
    register(job)
    assert job.node.progress(RUN, RunStatus(cursor=7, is_filling=True)) == ()
    job.fill(range(1))
    answer, _ = ask(node, [0])
    assert answer.progress_mark == 7
    filler = threading.Timer(0.2, lambda: job.fill(range(1, 2)))
    filler.start()
    answer, data = ask(node, [1], wait_s=20)
    assert (answer.was_parked, data) == (True, unit_bytes(1))
    job.node.progress(RUN, RunStatus(cursor=9, is_filling=False))
    answer, _ = ask(node, [2], wait_s=20)
    assert (answer.was_parked, answer.absent) == (False, (0,))
    job.end()


def test_a_run_is_served_on_when_its_process_is_gone(start: Start) -> None:
    node = start()
    job = begin_job(node)
    register(job)
    job.fill(range(5))
    job.end()
    answer, data = ask(node, [2])
    assert (answer.absent, data) == ((), unit_bytes(2))


def test_a_job_finds_a_service_that_was_started_anew(start: Start) -> None:
    node = start(listen="127.0.0.1:0")
    job = begin_job(node)
    register(job)
    job.fill(range(5))
    node.kill()
    assert job.node.progress(RUN, RunStatus()) == ()
    again = start()
    job.node.progress(RUN, RunStatus(cursor=3, is_filling=True))
    answer, data = ask(again, [2])
    assert (answer.progress_mark, data) == (3, unit_bytes(2))
    job.end()


def test_draining_lets_nobody_in_finishes_answers_and_ends_with_0(start: Start) -> None:
    node = start()
    job = begin_job(node)
    register(job)
    assert get(node, "/healthz") == (200, "ok\n")
    job.fill(range(1))
    job.node.progress(RUN, RunStatus(is_filling=True))
    waited: list[Answer] = []
    waiting = threading.Thread(target=lambda: waited.append(ask(node, [0, 1], wait_s=60)[0]))
    waiting.start()
    while "penstock_parked_requests 1" not in get(node, "/metrics")[1]:
        pass
    with slow_reader(node) as reader:
        node.terminate()
        waiting.join(20)
        assert waited[0].absent == (1,)  # it is told at once that the rest will not come
        code, text = get(node, "/healthz")
        assert (code, text.partition(" ")[0]) == (503, "draining:")
        assert LocalNode.connect(node.socket) is None
        with pytest.raises(PeerError, match="being stopped"):
            job.node.register(run_id=b"o" * 16, secret=SECRET, dataset="data")
        assert drained(reader) == RANGES_MAX * UNIT_BYTES
    assert node.wait() == 0
    job.end()


def test_a_second_signal_ends_it_at_once(start: Start) -> None:
    node = start()
    job = begin_job(node)
    register(job)
    job.fill(range(1))
    with slow_reader(node):
        node.terminate()
        while get(node, "/healthz")[0] == 200:
            pass
        node.terminate()
        assert node.wait() == 128 + signal.SIGTERM
    job.end()


@contextlib.contextmanager
def slow_reader(node: StartedNode) -> Iterator[socket.socket]:
    """Give a peer that has asked for more than buffers hold, and reads nothing yet."""
    asker = handshake.ClientHandshake(name="slow", run_id=RUN, secret=SECRET, nonce=bytes(32))
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", node.port))
        sock.sendall(asker.opening)
        decoder = wire.Decoder({wire.CHALLENGE, wire.WELCOME})
        while not asker.is_done:
            decoder.feed(sock.recv(1))
            if (frame := decoder.next()) is not None:
                sock.sendall(asker.on(frame))
        rows = np.tile(np.array([0, 0, UNIT_BYTES, 0, UNIT_BYTES], np.int64), (RANGES_MAX, 1))
        sock.sendall(wire.pack_ask(1, shelf_name(SECRET, "data"), rows, 0.0, b""))
        assert sock.recv(1, socket.MSG_PEEK)
        yield sock


def drained(sock: socket.socket) -> int:
    """Read an answer to its end, and return how many bytes came with it."""
    head = wire.HEAD.unpack(sock.recv(wire.HEAD.size, socket.MSG_WAITALL))
    assert head[0] == wire.ANSWER
    sock.recv(head[1], socket.MSG_WAITALL)
    due = total = RANGES_MAX * UNIT_BYTES
    while due and (data := sock.recv(min(due, 2**20))):
        due -= len(data)
    return total - due


def test_a_second_service_is_refused_with_the_process_of_the_first(
    start: Start, folders: Folders, capfd: pytest.CaptureFixture[str]
) -> None:
    node = start()
    with pytest.raises(AssertionError) as refused:
        start()
    assert f"process {node.pid}) has the socket" in str(refused.value)
    with pytest.raises(AssertionError) as refused:
        start(socket=f"{folders.disk}/other.sock")
    assert f"process {node.pid}) has the memory" in str(refused.value)
    node.kill()
    start()  # a socket that nobody answers is replaced


def test_metrics_are_as_prometheus_reads_them(start: Start) -> None:
    node = start()
    job = begin_job(node, shape("odd_name", num_units=10))
    register(job)
    job.fill(range(10))
    text = ""
    while 'uri="s3://bucket/odd_name/"' not in text:
        code, text = get(node, "/metrics")
        assert code == 200
    seen: set[str] = set()
    for line in text.splitlines():
        if line.startswith("# "):
            seen.add(line.split()[2])
            continue
        match = re.fullmatch(r'(\w+)(\{(\w+="(\\.|[^"\\])*",?)*\})? [0-9.e+-]+', line)
        assert match, line
        assert match[1] in seen, line
    pattern = r'tier_held_bytes\{tier="memory".*uri="s3://bucket/odd_name/"\} (\d+)'
    while int(re.findall(pattern, get(node, "/metrics")[1])[0]) < 100_000:
        pass
    assert get(node, "/nowhere")[0] == 404
    job.end()


def test_gossip_is_passed_on_between_peers_and_the_ranks_of_their_run(start: Start) -> None:
    node = start()
    job = begin_job(node)
    register(job)
    other = begin_job(node, shape("other"))
    other.node.register(run_id=b"o" * 16, secret=b"x" * 32, dataset="other")
    job.node.progress(RUN, RunStatus(), said=b"I am well")
    other.node.progress(b"o" * 16, RunStatus(), said=b"not for you")
    heard = Heard(says=b"C is lost")
    ask(node, [0], gossip=heard)
    assert b"I am well" in heard.heard
    assert b"not for you" not in heard.heard
    assert job.node.progress(RUN, RunStatus()) == (("asker", b"C is lost"),)
    assert job.node.progress(RUN, RunStatus()) == ()
    assert other.node.progress(b"o" * 16, RunStatus()) == ()
    job.end()
    other.end()


def test_the_status_shows_a_run_to_its_members_only(start: Start) -> None:
    node = start()
    job = begin_job(node)
    register(job)
    link = LinkStatus(peer="b", in_bytes=5)
    reads = ReadCounts(tier_bytes=70, peer_bytes=20, store_bytes=10, num_ranks=1)
    job.node.progress(RUN, RunStatus(reads=reads, links=(link,), suspects=("c",)))
    other = begin_job(node, shape("other"))
    other.node.register(run_id=b"o" * 16, secret=b"x" * 32, dataset="other")
    client = PeerClient(name="asker", run_id=RUN, secret=SECRET, gossip=NoGossip())
    address = Address(host="127.0.0.1", port=node.port)
    status = status_of(client.status(unnamed(address), [address], 20))
    client.stop()
    assert [run.run for run in status.runs] == [RUN.hex()]
    assert (status.runs[0].reads, status.runs[0].links) == (reads, (link,))
    assert status.runs[0].suspects == ("c",)
    assert [tier.kind for tier in status.tiers] == ["memory", "disk"]
    seen = job.node.look()
    assert {run.run_id for run in seen.runs} == {RUN, b"o" * 16}
    assert seen.status.name == job.opened.name == status.name
    job.end()
    other.end()
