"""The preloaded library alone: the interpreter's lock, connections, children, failures.

No torch here: programs are a few lines of Python.
"""

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.trace import Flag, Kind, Trace, read_trace
from penstock.trace.following import TraceFollower
from penstock.trace.foreign import library
from penstock.trace.native import pack_native


@pytest.fixture(scope="module")
def preload() -> Path:
    found, problem = library.preload_library()
    if found is None:
        pytest.skip(problem)
    return found


def run(program: str, folder: Path, preload: Path, *arguments: str) -> str:
    environment = {**os.environ, "PENSTOCK_TRACE": str(folder), "LD_PRELOAD": str(preload)}
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-S", "-c", program, *arguments],
        env=environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


LOCK = """
import ctypes, json, threading, time
waited_ns = ctypes.CDLL(None).penstock_lock_wait_ns
waited_ns.restype = ctypes.c_int64

def compute(num_turns):
    total = 0
    for turn in range(num_turns):
        total += turn
    return total

def share(beside):
    '''How much of the time this thread waited for the lock, beside another thread.'''
    thread = threading.Thread(target=beside, daemon=True)
    thread.start()
    begun, waited = time.perf_counter_ns(), waited_ns()
    cpu = time.thread_time_ns()
    compute(6_000_000)
    took = time.perf_counter_ns() - begun
    return [(waited_ns() - waited) / took, (time.thread_time_ns() - cpu) / took]

never = threading.Event()
print(json.dumps({
    "alone": share(lambda: None),
    "beside a thread that waits in C": share(lambda: ctypes.CDLL(None).usleep(3_000_000)),
    "beside a thread that waits for a lock of its own": share(lambda: never.wait(3)),
    "beside one that computes": share(lambda: compute(10**9)),
}))
"""


def test_waits_for_the_interpreters_lock_are_told_from_all_others(
    preload: Path, tmp_path: Path
) -> None:
    shares: dict[str, list[float]] = json.loads(run(LOCK, tmp_path, preload))
    contended, running = shares.pop("beside one that computes")
    for what, (waited, _) in shares.items():
        assert waited < 0.05, what
    # Both get turns of 5 ms. On a busy machine a thread waits for a core most of the time.
    assert contended > 0.1
    assert contended + running < 1.05


READING = """
import os, socket, subprocess, sys
folder, port = sys.argv[1:]
os.chdir(folder)
with open("a.bin", "rb") as file:          # a relative name
    file.read(100); file.seek(5000); file.read()
copy = os.dup(os.open(folder + "/a.bin", os.O_RDONLY))
os.lseek(copy, 300, 0)
os.read(copy, 50)                          # a descriptor that nobody saw opened
subprocess.run(["cat", "a.bin"], stdout=subprocess.DEVNULL, check=True)
child = os.fork()
if not child:
    os.pread(copy, 70, 7)
    os.kill(os.getpid(), 9)
os.waitpid(child, 0)
with socket.create_connection(("127.0.0.1", int(port))) as peer:
    for size in (1000, 200_000):
        peer.sendall(size.to_bytes(4, "little"))
        left = size
        while left:
            left -= len(peer.recv(4096))
"""


def _serve(listener: socket.socket) -> None:
    peer, _ = listener.accept()
    with peer:
        while question := peer.recv(4):
            peer.sendall(bytes(int.from_bytes(question, "little")))


@pytest.fixture(scope="module")
def read_back(preload: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, int]:
    folder = tmp_path_factory.mktemp("native")
    (folder / "data").mkdir()
    (folder / "data/a.bin").write_bytes(bytes(9000))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=_serve, args=(listener,))
        server.start()
        port = listener.getsockname()[1]
        run(READING, folder / "run", preload, str(folder / "data"), str(port))
        server.join()
    before = read_trace(folder / "run")
    pack_native(folder / "run")
    after = read_trace(folder / "run")
    assert np.array_equal(before.spans, after.spans)
    assert not list((folder / "run").glob("*.rows"))
    return after, port


def reads(trace: Trace, name: str) -> Any:
    found = trace.of(Kind.READ)
    return found[[n.endswith(name) for n in trace.names_of(found["object"])]]


def test_offsets_are_right_however_a_file_is_read(read_back: tuple[Trace, int]) -> None:
    trace, _ = read_back
    found = reads(trace, "a.bin")
    main = found[found["process"] == found["process"][0]]
    # Python's buffer asks for whole blocks.
    seen = list(zip(main["offset"].tolist(), main["size_bytes"].tolist(), strict=True))
    assert seen[0][0] == 0
    assert (300, 50) in seen
    assert sum(size for offset, size in seen if offset >= 4096) == 9000 - seen[1][0]


def test_children_have_files_of_their_own_also_when_they_are_killed(
    read_back: tuple[Trace, int],
) -> None:
    trace, _ = read_back
    found = reads(trace, "a.bin")
    children = found[found["process"] != found["process"][0]]
    by_process = {
        int(p): children[children["process"] == p]["size_bytes"].sum()
        for p in set(children["process"].tolist())
    }
    assert sorted(by_process.values()) == [70, 9000]  # the fork, and cat
    assert 7 in children["offset"].tolist()


def test_an_answer_of_a_connection_is_one_row_from_question_to_last_byte(
    read_back: tuple[Trace, int],
) -> None:
    trace, port = read_back
    answers = reads(trace, f"127.0.0.1:{port}")
    assert answers["size_bytes"].tolist() == [1000, 200_000]
    assert (answers["flags"] == Flag.NATIVE | Flag.SOCKET).all()
    assert answers["count"][1] > 1


RENUMBERED = """
import os, sys
first, second = (os.open(sys.argv[1] + name, os.O_RDONLY) for name in ("/a.bin", "/b.bin"))
os.read(second, 10)
os.closerange(second, second + 1)          # closes without calling close
again = os.dup(first)
assert again == second
os.read(again, 77)
"""


def test_a_number_that_was_closed_unseen_is_not_taken_for_the_old_file(
    preload: Path, tmp_path: Path
) -> None:
    for name in ("a.bin", "b.bin"):
        (tmp_path / name).write_bytes(bytes(100))
    run(RENUMBERED, tmp_path / "run", preload, str(tmp_path))
    trace = read_trace(tmp_path / "run")
    assert reads(trace, "a.bin")["size_bytes"].tolist() == [77]
    assert reads(trace, "b.bin")["size_bytes"].tolist() == [10]


def test_a_pack_that_fails_leaves_what_there_was(
    preload: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(100))
    run(
        "import sys; open(sys.argv[1], 'rb').read()",
        tmp_path / "run",
        preload,
        str(tmp_path / "a.bin"),
    )
    before = read_trace(tmp_path / "run").spans

    def no_room(*_: object) -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("penstock.trace.native.rows_chunk", no_room)
        assert "No space left" in pack_native(tmp_path / "run")
    assert np.array_equal(read_trace(tmp_path / "run").spans, before)
    # Whoever packs may be killed before the old files are gone.
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", lambda *_, **__: None)
        assert pack_native(tmp_path / "run") == ""
    assert np.array_equal(read_trace(tmp_path / "run").spans, before)


def test_a_folder_that_cannot_be_written_costs_the_trace_and_not_the_program(
    preload: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.bin").write_bytes(b"abc")
    (tmp_path / "run").write_text("a file")
    environment = {
        **os.environ,
        "PENSTOCK_TRACE": str(tmp_path / "run"),
        "LD_PRELOAD": str(preload),
    }
    done = subprocess.run(
        ["cat", str(tmp_path / "a.bin")], env=environment, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, b"abc")


def test_without_a_compiler_a_sentence_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    found, problem = library.preload_library()
    assert found is None
    assert "no C compiler" in problem


STILL_READING = """
import sys
with open(sys.argv[1], "rb", buffering=0) as file:
    for line in sys.stdin:
        file.read(int(line))
        print(line, end="", flush=True)
"""


def test_reads_are_followed_while_the_job_runs_and_count_once_when_it_has_ended(
    preload: Path, tmp_path: Path
) -> None:
    folder, data = tmp_path / "run", tmp_path / "a.bin"
    folder.mkdir()
    data.write_bytes(bytes(10_000))
    follower = TraceFollower(folder)

    def sizes() -> list[int]:
        rows = [rows for process in follower.look() for _, rows in process.rows]
        return [int(n) for some in rows for n in some["size_bytes"][some["kind"] == Kind.READ]]

    job = subprocess.Popen(
        [sys.executable, "-S", "-c", STILL_READING, str(data)],
        env={**os.environ, "PENSTOCK_TRACE": str(folder), "LD_PRELOAD": str(preload)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert job.stdin is not None
    assert job.stdout is not None
    for size in (100, 70):
        job.stdin.write(f"{size}\n")
        job.stdin.flush()
        job.stdout.readline()
        assert sizes() == [size]
    job.communicate()
    assert pack_native(folder) == ""
    assert sizes() == []
