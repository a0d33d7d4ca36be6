"""A forked child never touches its parent's client, never hangs and leaves no process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.errors import NotFoundError, RangeError, UnreachableError
from penstock.storage import RemoteStore, Store, StoreOptions
from penstock.storage.clients import is_cut_off
from penstock.storage.relay_process import relay
from penstock.testing.conformance import StoreConformance, fill, some_bytes
from penstock.testing.forks import HANG_S, in_child, start_child, wait_for
from penstock.testing.http_server import Fault, HttpServer
from penstock.testing.servers import S3Access

if TYPE_CHECKING:
    from tests.conftest import Bucket

_DATA = some_bytes(3_000_000)


@pytest.fixture
def used(s3: Bucket) -> Store:
    """A store that this process has used, so that children are cut off."""
    store = RemoteStore(s3.uri, s3.options)
    store.write("x", _DATA)
    assert store.read("x") == _DATA
    return store


def _relays() -> set[int]:
    """Return the relay processes that run now, of anybody; zombies are none."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if b"penstock.storage.relay" in command:
            found.add(int(folder.name))
    return found


def _wait_until_gone(pids: set[int]) -> None:
    deadline_s = time.monotonic() + HANG_S
    while _relays() & pids:
        assert time.monotonic() < deadline_s, f"relays are left: {_relays() & pids}"
        time.sleep(0.01)


def _relay_pid() -> int:
    assert relay._process is not None
    return relay._process.pid


def test_a_child_reads_through_its_own_relay(used: Store) -> None:
    def child() -> tuple[bool, bytes, int]:
        return is_cut_off(), bytes(used.read("x")), _relay_pid()

    cut_off, data, pid = in_child(child)
    assert cut_off
    assert data == _DATA
    assert not is_cut_off()
    _wait_until_gone({pid})


def test_five_children_at_once_have_five_relays(used: Store) -> None:
    def child() -> tuple[bool, int]:
        offsets = range(0, 3_000_000, 300_000)
        rights = [
            used.read_range(used.info("x"), offset, 300_000) == _DATA[offset : offset + 300_000]
            for offset in offsets
        ]
        return all(rights), _relay_pid()

    children = [start_child(child) for _ in range(5)]
    answers = [wait_for(each) for each in children]
    assert all(is_right for is_right, _ in answers)
    pids = {pid for _, pid in answers}
    assert len(pids) == 5
    _wait_until_gone(pids)


def test_threads_of_a_child_share_a_relay_and_not_a_connection(used: Store) -> None:
    def child() -> tuple[int, bool]:
        together = threading.Barrier(8)

        def read(number: int) -> bool:
            together.wait()
            target = bytearray(1000)
            for offset in range(number, 1_000_000, 100_000):
                used.read_into(used.info("x"), offset, memoryview(target))
                if target != _DATA[offset : offset + 1000]:
                    return False
            return True

        with ThreadPoolExecutor(8) as threads:
            is_right = all(threads.map(read, range(8)))
        return len(_relays() & {_relay_pid()}), is_right

    assert in_child(child) == (1, True)


def test_errors_come_through_with_class_and_words(used: Store) -> None:
    def child() -> list[str]:
        with pytest.raises(NotFoundError) as missing:
            used.read("missing")
        with pytest.raises(RangeError) as past_end:
            used.read_range(used.info("x"), 2_999_999, 2)
        assert missing.value.uri == past_end.value.uri.removesuffix("x") + "missing"
        assert (
            bytes(used.read_range(used.info("x"), 0, 5)) == _DATA[:5]
        )  # the connection is still in step
        return [str(missing.value), str(past_end.value)]

    missing, past_end = in_child(child)
    assert "missing does not exist (404)" in missing
    assert "the object has 3000000" in past_end


def test_a_grandchild_has_a_relay_of_its_own(used: Store) -> None:
    def grandchild() -> int:
        assert used.read("x") == _DATA
        return _relay_pid()

    def child() -> tuple[int, int]:
        assert used.read("x") == _DATA
        mine = _relay_pid()
        theirs = in_child(grandchild)
        assert used.read("x") == _DATA
        return mine, theirs

    mine, theirs = in_child(child)
    assert mine != theirs
    _wait_until_gone({mine, theirs})


def test_a_relay_ends_while_a_grandchild_lives_on(used: Store) -> None:
    reading, writing = os.pipe()

    def child() -> tuple[int, int]:
        used.read("x")
        pid = os.fork()
        if pid == 0:
            os.close(writing)
            os.read(reading, 1)  # lives until the test ends
            os._exit(0)
        return _relay_pid(), pid

    pid, grandchild = in_child(child)
    try:
        _wait_until_gone({pid})
        os.kill(grandchild, 0)
    finally:
        os.close(writing)
        os.close(reading)


def test_a_child_killed_at_once_leaves_no_relay(used: Store) -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        used.read("x")
        os.write(writing, str(_relay_pid()).encode())
        signal.pause()
    relay_pid = int(os.read(reading, 20))
    assert relay_pid in _relays()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(reading)
    os.close(writing)
    _wait_until_gone({relay_pid})


def test_a_killed_relay_is_an_error_once_and_then_replaced(used: Store) -> None:
    def child() -> tuple[int, int]:
        used.read("x")
        first = _relay_pid()
        os.kill(first, signal.SIGKILL)
        assert relay._process is not None
        relay._process.wait()
        with pytest.raises(UnreachableError, match="relay ended unexpectedly"):
            used.read("x")
        assert used.read("x") == _DATA
        return first, _relay_pid()

    first, second = in_child(child)
    assert first != second


def test_an_interrupted_call_does_not_give_its_answer_to_the_next() -> None:
    objects = {"slow": b"old answer", "x": b"right"}
    with HttpServer(objects, faults=(Fault(kind="delay", path="slow", delay_s=0.5),)) as server:
        store = RemoteStore(server.url)
        store.read("x")

        def child() -> bytes:
            def interrupt(*_: object) -> None:
                raise KeyboardInterrupt

            signal.signal(signal.SIGALRM, interrupt)
            store.read("x")
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(KeyboardInterrupt):
                store.read("slow")
            return bytes(store.read("x"))

        assert in_child(child) == b"right"


def test_a_child_forked_before_first_use_needs_no_relay() -> None:
    script = """
import os, sys
from penstock.storage import RemoteStore
from penstock.storage.clients import is_cut_off
from penstock.testing.forks import in_child
store = RemoteStore(sys.argv[1])
assert in_child(lambda: (bytes(store.read("x")), is_cut_off())) == (b"1", False)
assert store.read("x") == b"1"
assert in_child(lambda: (bytes(store.read("x")), is_cut_off())) == (b"1", True)
"""
    with HttpServer({"x": b"1"}) as server:
        _run(script, server.url)


def test_a_cut_off_child_ends_normally_with_all_its_exit_handlers() -> None:
    script = """
import atexit, os, sys
from penstock.storage import RemoteStore
from penstock.storage.relay_process import relay
store = RemoteStore(sys.argv[1])
store.read("x")
if os.fork() == 0:
    assert store.read("x") == b"1"
    atexit.register(print, relay._process.pid)
    sys.exit(0)
_, status = os.wait()
assert status == 0, status
"""
    with HttpServer({"x": b"1"}) as server:
        _wait_until_gone({int(_run(script, server.url))})


def _run(script: str, *arguments: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-X", "dev", "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == "", finished.stderr
    return finished.stdout


def _read_length(store: Store) -> int:
    return store.read("x").nbytes


def test_multiprocessing_by_fork_works_on_a_used_store(used: Store) -> None:
    context = multiprocessing.get_context("fork")
    with context.Pool(3) as pool:
        assert pool.map(_read_length, [used] * 12) == [3_000_000] * 12


def test_torch_workers_by_fork_work_on_a_used_store(used: Store) -> None:
    data = pytest.importorskip("torch.utils.data")

    class Items(data.Dataset):  # type: ignore[misc,name-defined]
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> int:
            return used.read_range(used.info("x"), index * 1000, 1000)[0]

    loader = data.DataLoader(
        Items(), batch_size=5, num_workers=2, multiprocessing_context="fork", timeout=HANG_S
    )
    found = [int(value) for batch in loader for value in batch]
    assert found == [_DATA[index * 1000] for index in range(20)]


class TestRelayedStore(StoreConformance):
    """The whole suite again, with every call going through a relay of this process."""

    @pytest.fixture(scope="class")
    @classmethod
    def filled(cls, s3_server: S3Access) -> Store:
        return fill(RemoteStore(s3_server.create_bucket("filled-relayed"), s3_server.options))

    @pytest.fixture
    def store(self, s3: Bucket) -> Store:
        return RemoteStore(s3.uri, s3.options)

    @pytest.fixture(autouse=True)
    def _cut_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("penstock.storage.clients._is_cut_off", True)

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _no_relay_left(cls) -> Iterator[None]:
        yield
        pid = _relay_pid()
        relay.close()
        assert pid not in _relays()


def test_options_travel_to_the_relay() -> None:
    with HttpServer({"b/x": b"1"}) as server:
        options = StoreOptions(endpoint=server.url, anonymous=True, timeout_s=5)
        store = RemoteStore("s3://b", options)
        store.read("x")
        assert in_child(lambda: bytes(store.read("x"))) == b"1"
