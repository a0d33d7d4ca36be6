from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from penstock.errors import DeniedError, NotFoundError, OptionError, StoreError
from penstock.storage import FolderStore, Store
from penstock.storage.files import FileCache, files
from penstock.storage.folder_errors import store_error
from penstock.storage.keys import TEMPORARY_PREFIX
from penstock.testing.conformance import StoreConformance, some_bytes
from penstock.testing.forks import in_child


class TestFolderStore(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return FolderStore(tmp_path / "made on first write")


_WRITER = """
import sys
from penstock.storage import FolderStore
store = FolderStore(sys.argv[1])
data = bytes(50_000_000)
print("ready", flush=True)
while True:
    store.write("half/way.bin", data)
    store.delete("half/way.bin")
"""


def test_a_writer_killed_at_any_moment_leaves_nothing_half_written(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    num_interrupted = 0
    for _ in range(8):
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE
        )
        assert writer.stdout is not None
        writer.stdout.readline()
        while not list(tmp_path.glob(f"half/{TEMPORARY_PREFIX}*")):  # until it is at work
            assert writer.poll() is None
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        num_interrupted += len(list(tmp_path.glob(f"half/{TEMPORARY_PREFIX}*")))
        assert [info.size_bytes for info in store.list()] in ([], [50_000_000])
    assert num_interrupted > 0  # otherwise nothing was tried


def test_half_written_files_are_never_listed(tmp_path: Path) -> None:
    (tmp_path / f"{TEMPORARY_PREFIX}1-2").write_bytes(b"half")
    (tmp_path / "whole").write_bytes(b"whole")
    assert [info.key for info in FolderStore(tmp_path).list()] == ["whole"]


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    (tmp_path / "x").mkdir()
    with pytest.raises(StoreError):
        store.write("x", b"a folder has this name")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a").write_bytes(b"1")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "linked").symlink_to(tmp_path / "real")
    (tmp_path / "root" / "dangling").symlink_to(tmp_path / "nowhere")
    store = FolderStore(tmp_path / "root")
    assert [info.key for info in store.list()] == ["linked/a"]
    assert store.read("linked/a") == b"1"


def test_a_circle_of_links_is_an_error_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "again").symlink_to(tmp_path)
    with pytest.raises((OptionError, StoreError), match=r"link"):
        list(FolderStore(tmp_path).list())


def test_pipes_are_no_objects(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert list(FolderStore(tmp_path).list()) == []
    with pytest.raises(NotFoundError):
        FolderStore(tmp_path).info("pipe")


def test_a_folder_is_no_object_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(NotFoundError, match="is a folder"):
        FolderStore(tmp_path).read("folder")


def test_a_replaced_file_is_read_anew_whoever_replaced_it(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    (tmp_path / "x").write_bytes(b"old")
    assert store.read_range(store.info("x"), 0, 3) == b"old"
    (tmp_path / "y").write_bytes(b"new")
    (tmp_path / "y").rename(tmp_path / "x")
    assert store.read_range(store.info("x"), 0, 3) == b"new"
    (tmp_path / "x").unlink()
    with pytest.raises(NotFoundError):
        store.read_range(store.info("x"), 0, 3)


def test_no_more_files_are_open_than_the_bound(tmp_path: Path) -> None:
    cache = FileCache(files_max=4)
    for number in range(10):
        (tmp_path / str(number)).write_bytes(b"1")
        cache.open(str(tmp_path / str(number)))
    assert len(cache) == 4


def test_a_file_in_use_survives_its_eviction(tmp_path: Path) -> None:
    cache = FileCache(files_max=1)
    for name in "ab":
        (tmp_path / name).write_bytes(name.encode())
    first = cache.open(str(tmp_path / "a"))
    cache.open(str(tmp_path / "b"))
    assert os.pread(first.descriptor, 1, 0) == b"a"


def _num_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_close_closes_the_files(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.write("x", b"1")
    files.forget_all()  # else a full cache closes another file for this one
    before = _num_open_files()
    store.read_range(store.info("x"), 0, 1)
    assert _num_open_files() == before + 1
    store.close()
    assert _num_open_files() == before


def test_a_child_forked_while_the_lock_is_held_does_not_wait_for_it(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.write("x", b"1")
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with files._lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        assert in_child(lambda: bytes(store.read_range(store.info("x"), 0, 1))) == b"1"
    finally:
        done.set()
        thread.join()


def test_a_full_disk_names_both_numbers(tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    with (
        pytest.raises(StoreError, match=r"no room for 12 MB, .* free"),
        store_error(path, needed_bytes=12_000_000),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_refusal_of_the_system_names_the_user_and_the_file(tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    with pytest.raises(DeniedError, match=r"for user \d+; check the owner"), store_error(path):
        raise PermissionError(errno.EACCES, "Permission denied")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_of_others_is_denied(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"1")
    (tmp_path / "x").chmod(0)
    with pytest.raises(DeniedError, match="owner and mode"):
        FolderStore(tmp_path).read("x")


def test_ten_thousand_files_are_listed_in_order(tmp_path: Path) -> None:
    for folder in range(100):
        (tmp_path / f"{folder:03d}").mkdir()
        for number in range(100):
            (tmp_path / f"{folder:03d}" / str(number)).touch()
    keys = [info.key for info in FolderStore(tmp_path).list()]
    assert len(keys) == 10_000
    assert keys == sorted(keys)


def test_path_of_is_where_the_object_lies(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.write("a/b", some_bytes(10))
    assert store.path_of("a/b").read_bytes() == some_bytes(10)
    with pytest.raises(OptionError):
        store.path_of("../b")
