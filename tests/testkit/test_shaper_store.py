"""Shapers before a store, their lifetime and their command."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from testkit.shaper import Fault, Fixed, Shape, Shaper
from testkit.shaper_command import main

import penstock
from penstock.errors import (
    DeniedError,
    ExistsError,
    NotFoundError,
    OptionError,
    UnavailableError,
    UnreachableError,
)
from penstock.storage import ObjectInfo, RemoteStore, Store
from penstock.testing.conformance import OBJECTS, ReadConformance, some_bytes
from penstock.testing.forks import HANG_S, in_child
from penstock.testing.ports import HOST, free_ports
from penstock.testing.servers import S3Access, ServerError

DATA = some_bytes(5_000_000, "shaped")
X = ObjectInfo(key="x", size_bytes=len(DATA))
PLAIN = Shape()
ASKED = b"GET /b/x HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shaped")
    (root / "x").write_bytes(DATA)
    return root


def address(shaper: Shaper) -> tuple[str, int]:
    return HOST, int(shaper.endpoint.rpartition(":")[2])


def _received(client: socket.socket, size_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < size_bytes:
        piece = client.recv(size_bytes - len(data))
        assert piece, "the shaper hung up"
        data += piece
    return bytes(data)


class TestSignedS3ThroughAShaper(ReadConformance):
    """SeaweedFS checks signatures, which cover the Host header that the client wrote."""

    @pytest.fixture(scope="class")
    @classmethod
    def forwarded(cls, s3_server: S3Access) -> Iterator[Shaper]:
        shape = Shape(latency=Fixed(0.001), bandwidth_bytes_s=1e9)
        with Shaper(s3_server.endpoint, shape) as shaper:
            yield shaper

    @pytest.fixture(scope="class")
    @classmethod
    def filled(cls, s3_server: S3Access, forwarded: Shaper) -> Store:
        uri = s3_server.create_bucket("filled-shaped")
        options = dataclasses.replace(s3_server.options, endpoint=forwarded.endpoint)
        store = RemoteStore(uri, options)
        for key, data in OBJECTS.items():
            store.write(key, data)
        return store

    def test_a_wrong_secret_is_still_refused(self, s3_server: S3Access, forwarded: Shaper) -> None:
        uri = s3_server.create_bucket("refused-shaped")
        wrong = dataclasses.replace(s3_server.options, endpoint=forwarded.endpoint, secret_key="no")
        with pytest.raises(DeniedError, match="403"):
            RemoteStore(uri, wrong).read("x")

    def test_it_can_be_listed_written_and_emptied(
        self, s3_server: S3Access, forwarded: Shaper
    ) -> None:
        uri = s3_server.create_bucket("written-shaped")
        options = dataclasses.replace(s3_server.options, endpoint=forwarded.endpoint)
        store = RemoteStore(uri, options)
        before = forwarded.counts()
        store.write("a/x", DATA[:1000], only_if_absent=True)
        with pytest.raises(ExistsError):
            store.write("a/x", b"", only_if_absent=True)
        store.write("b", DATA * 3)  # in parts
        assert [(info.key, info.size_bytes) for info in store.list()] == [
            ("a/x", 1000),
            ("b", 3 * len(DATA)),
        ]
        assert store.read("b") == DATA * 3
        store.delete("b")
        assert [info.key for info in store.list("a")] == ["a/x"]
        counts = forwarded.counts() - before
        assert counts.upload_bytes >= 3 * len(DATA) + 1000
        assert counts.failures == 0


def test_requests_arrive_byte_for_byte(tmp_path: Path) -> None:
    head = (
        b"GET /a%20b?x=1&y HTTP/1.1\r\nhOST: some.host:99\r\nX-Odd:   spaces  \r\n"
        b"Authorization: AWS4-HMAC-SHA256 Credential=a/b, Signature=00\r\n\r\n"
    )
    with socket.create_server((HOST, 0)) as listening:
        endpoint = f"http://{HOST}:{listening.getsockname()[1]}"
        with Shaper(endpoint) as shaper, socket.create_connection(address(shaper)) as client:
            listening.accept()[0].close()  # of the look whether anybody is there
            client.sendall(head)
            store, _ = listening.accept()
            with store:
                assert _received(store, len(head)) == head
                answer = b"HTTP/1.1 204 No Content\r\nOdd:  1\r\n\r\n"
                store.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" + answer)
                assert (
                    _received(client, 25 + len(answer)) == b"HTTP/1.1 100 Continue\r\n\r\n" + answer
                )


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\nuntil the end",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    ],
)
def test_bodies_of_all_kinds_of_lengths_arrive(answer: bytes) -> None:
    with socket.create_server((HOST, 0)) as listening:
        endpoint = f"http://{HOST}:{listening.getsockname()[1]}"
        with Shaper(endpoint, Shape(bandwidth_bytes_s=1e5)) as shaper:
            listening.accept()[0].close()
            with socket.create_connection(address(shaper), timeout=HANG_S) as client:
                client.sendall(ASKED)
                store, _ = listening.accept()
                with store:
                    _received(store, len(ASKED))
                    for at in range(len(answer)):
                        store.sendall(answer[at : at + 1])
                if b"/1.0" in answer:
                    assert client.makefile("rb").read() == answer
                else:
                    assert _received(client, len(answer)) == answer


def test_a_store_that_dies_is_told_and_counted() -> None:
    with socket.create_server((HOST, 0)) as listening:
        endpoint = f"http://{HOST}:{listening.getsockname()[1]}"
        with Shaper(endpoint) as shaper:
            listening.accept()[0].close()
            with socket.create_connection(address(shaper), timeout=HANG_S) as client:
                client.sendall(ASKED)
                listening.accept()[0].close()  # before it has answered
                assert b" 502 " in client.recv(1000)
                listening.close()  # nobody is there any more
                client.sendall(ASKED)
                assert b"refused" in client.recv(1000)
            assert shaper.counts().failures == 2
            assert shaper.counts().connections == 1


def test_a_store_that_breaks_off_is_passed_on() -> None:
    with socket.create_server((HOST, 0)) as listening:
        endpoint = f"http://{HOST}:{listening.getsockname()[1]}"
        with Shaper(endpoint) as shaper:
            listening.accept()[0].close()
            with socket.create_connection(address(shaper), timeout=HANG_S) as client:
                client.sendall(ASKED)
                store, _ = listening.accept()
                with store:
                    _received(store, len(ASKED))
                    store.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")
                assert client.makefile("rb").read().endswith(b"\r\n\r\nhalf")
            assert shaper.counts().failures == 1


def test_an_upload_that_is_refused_is_read_to_its_end(s3_server: S3Access) -> None:
    uri = s3_server.create_bucket("upload-refused")
    with Shaper(s3_server.endpoint, Shape(faults=(Fault(kind="unavailable"),))) as shaper:
        options = dataclasses.replace(s3_server.options, endpoint=shaper.endpoint)
        store = RemoteStore(uri, options)
        with pytest.raises(UnavailableError):
            store.write("x", DATA)
        assert shaper.counts().upload_bytes == len(DATA)
        shaper.reshape(PLAIN)
        store.write("x", DATA)
        assert store.read("x") == DATA


# -- lifetime ----------------------------------------------------------------------------------

_OWNER = """
import os, signal, sys
from testkit.shaper import Shaper
shaper = Shaper.of_folder(sys.argv[1]).__enter__()
if sys.argv[2] == "fork" and os.fork() == 0:
    signal.alarm(60)
    signal.pause()  # holds the pipe open
print(shaper._process.pid, flush=True)
signal.pause()
"""


def _is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except OSError:
        return False


@pytest.mark.parametrize(
    ("end", "forks"),
    [(signal.SIGINT, "alone"), (signal.SIGKILL, "alone"), (signal.SIGKILL, "fork")],
)
def test_a_shaper_ends_with_its_owner(tmp_path: Path, end: signal.Signals, forks: str) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(tmp_path), forks],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    try:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        owner.stdout.close()
        assert _is_running(pid)
        owner.send_signal(end)
        owner.wait()
        deadline_s = time.monotonic() + HANG_S
        while _is_running(pid):
            assert time.monotonic() < deadline_s, "the shaper outlived its owner"
            time.sleep(0.01)
    finally:
        os.killpg(owner.pid, signal.SIGKILL) if forks == "fork" else None


def test_counts_stay_after_the_block_and_start_anew(folder: Path) -> None:
    shaper = Shaper.of_folder(folder)
    for _ in range(2):
        with shaper:
            assert RemoteStore(shaper.url).read_range(X, 0, 10) == DATA[:10]
        counts = shaper.counts()
        assert (counts.requests, counts.body_bytes, counts.connections) == (1, 10, 1)
        assert counts.methods == {"GET": 1}
    with pytest.raises(ServerError, match="not running"):
        shaper.reshape(PLAIN)


def test_a_forked_child_does_not_end_its_parents_shaper(folder: Path) -> None:
    with Shaper.of_folder(folder) as shaper:

        def child() -> str:
            with pytest.raises(ServerError, match="belongs to process") as caught:
                shaper.counts()
            shaper.stop()
            return str(caught.value)

        assert f"process {os.getpid()}" in in_child(child)
        assert shaper.counts().requests == 0


def test_a_dead_shaper_says_so(folder: Path) -> None:
    with Shaper.of_folder(folder) as shaper:
        assert shaper._process is not None
        shaper._process.kill()
        with pytest.raises(ServerError, match="exit code -9"):
            shaper.counts()


@pytest.mark.parametrize("endpoint", ["https://host", "host:80", "http://", "http://host/path"])
def test_what_cannot_be_shaped_is_refused(endpoint: str) -> None:
    with pytest.raises(OptionError, match=r"http://127\.0\.0\.1:8333"), Shaper(endpoint):
        pass


def test_an_endpoint_that_does_not_answer_is_named(folder: Path) -> None:
    (port,) = free_ports(1)
    with pytest.raises(UnreachableError, match=f"{port}.*refused"), Shaper(f"http://{HOST}:{port}"):
        pass
    with pytest.raises(NotFoundError, match="nowhere"):
        Shaper.of_folder(folder / "nowhere")
    with pytest.raises(OptionError, match="My Bucket"):
        Shaper.of_folder(folder, bucket="My Bucket")


def test_a_port_can_be_chosen_and_may_be_taken(folder: Path) -> None:
    (port,) = free_ports(1)
    with Shaper.of_folder(folder, port=port) as shaper:
        assert shaper.endpoint.endswith(f":{port}")
        with pytest.raises(ServerError, match=str(port)), Shaper.of_folder(folder, port=port):
            pass


def test_it_runs_from_a_terminal(folder: Path) -> None:
    command = [sys.executable, "-m", "testkit.shaper", "--folder", str(folder)]
    shape = ["--latency", "20ms", "--bandwidth", "100MB", "--corrupt", "1"]
    shaper = subprocess.Popen([*command, *shape], stdout=subprocess.PIPE, text=True)
    assert shaper.stdout is not None
    endpoint, uri = shaper.stdout.readline().split()
    store = RemoteStore(uri, penstock.StoreOptions(endpoint=endpoint, anonymous=True))
    begin_s = time.monotonic()
    assert store.read_range(X, 0, 1000) != DATA[:1000]
    assert time.monotonic() - begin_s >= 0.02
    shaper.send_signal(signal.SIGINT)
    assert "1 requests, 1 kB, 0 times 503, faults: {'corrupt': 1}" in shaper.stdout.read()
    shaper.stdout.close()
    assert shaper.wait(HANG_S) == 0


def test_the_terminal_says_what_is_wrong(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--folder", str(folder), "--latency", "far"]) == 1
    assert capsys.readouterr().err.startswith("error: 'far' is not a duration; write for example")
    assert main(["--folder", str(folder / "nowhere")]) == 1
    assert "there is no folder" in capsys.readouterr().err
