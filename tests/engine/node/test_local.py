"""The client's side: finding a service, files of runs, and words that are none."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.node.jobs import StartedNode, begin_job, get

from penstock.engine.peers.local import LocalNode, node_sockets, shelf_name
from penstock.engine.peers.node_messages import FRAME_BYTES_MAX, RunMember, receive_request
from penstock.engine.peers.run_files import read_run_files, remove_run_file, write_run_file
from penstock.errors import PeerError
from penstock.testing.forks import in_child

RUN, SECRET = b"r" * 16, b"s" * 32
MEMBERS = [RunMember(name="a", host="alpha", node=0, addresses=(("10.0.0.1", 7410),))]

Start = Callable[..., StartedNode]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "penstock" / "runs"


def test_a_run_is_found_by_its_file_until_its_process_is_gone(runs: Path) -> None:
    path = write_run_file(run_id=RUN, secret=SECRET, members=MEMBERS, dataset="s3://b/")
    assert (path.parent, stat.S_IMODE(path.stat().st_mode)) == (runs, 0o600)
    (found,) = read_run_files()
    assert (found.run.run_id, found.run.secret, found.run.members) == (RUN, SECRET, tuple(MEMBERS))
    remove_run_file(path)
    assert read_run_files() == []
    in_child(lambda: write_run_file(run_id=RUN, secret=SECRET, members=MEMBERS))
    assert len(list(runs.iterdir())) == 1
    assert read_run_files() == []
    write_run_file(run_id=b"q" * 16, secret=SECRET, members=[])
    assert [each.name.partition(".")[0] for each in runs.iterdir()] == [(b"q" * 16).hex()]


def test_files_that_make_no_sense_are_passed_over(runs: Path) -> None:
    path = write_run_file(run_id=RUN, secret=SECRET, members=MEMBERS)
    (runs / "bad.json").write_text("{")
    (runs / "odd.json").write_text(path.read_text().replace(RUN.hex(), "xyz"))
    (runs / "link.json").symlink_to(path)
    assert [file.run_id for file in read_run_files()] == [RUN.hex()]


def test_a_service_is_looked_for_where_it_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert node_sockets() == ["/run/user/7/penstock/node.sock", "/run/penstock/node.sock"]
    monkeypatch.setenv("PENSTOCK_NODE", "/elsewhere")
    assert node_sockets() == ["/elsewhere"]
    monkeypatch.setenv("PENSTOCK_NODE", "none")
    assert node_sockets() == []


def test_a_named_service_that_is_not_there_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PENSTOCK_NODE", str(tmp_path / "node.sock"))
    assert LocalNode.connect() is None
    assert "no node service answers" in caplog.text


def test_only_members_can_name_a_shelf() -> None:
    assert shelf_name(SECRET, "data") == shelf_name(SECRET, "data")
    assert len({shelf_name(SECRET, "data"), shelf_name(SECRET, "d"), shelf_name(b"x", "data")}) == 3


def test_a_forked_child_does_not_keep_its_parents_connection_open(start: Start) -> None:
    node = start()
    job = begin_job(node)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writing)
        os.read(reading, 1)  # outlives its parent's connection
        os._exit(0)
    job.end()
    end_s = time.monotonic() + 20
    while not re.search(r"penstock_dataset_processes\{.*\} 0\n", get(node, "/metrics")[1]):
        assert time.monotonic() < end_s
    os.close(writing)
    os.waitpid(pid, 0)


def test_words_that_make_no_sense_are_refused_and_nobody_else_suffers(start: Start) -> None:
    node = start()
    with socket.socket(socket.AF_UNIX) as rude:
        rude.connect(node.socket)
        rude.sendall(struct.pack("<I", FRAME_BYTES_MAX + 1))
        assert rude.recv(1) == b""
    with node.connect() as job:
        with pytest.raises(PeerError, match="cannot be the name"):
            job.open(dataset="../../etc", num_units=1, size_bytes=1)
        with pytest.raises(PeerError, match="was not opened on this connection"):
            job.keep("data")
        assert job.open(dataset="data", num_units=1, size_bytes=10).name


@given(st.binary(max_size=200))
def test_no_bytes_are_taken_for_more_than_they_are(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(data)
        ours.shutdown(socket.SHUT_WR)
        try:
            while receive_request(theirs, contextlib.nullcontext()) is not None:
                pass
        except (PeerError, msgspec.MsgspecError):
            pass
