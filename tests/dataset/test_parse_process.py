"""A file that ends the process which parses it is an error that names the file."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock
from penstock.dataset import parse_process
from penstock.dataset.parse_process import ParserPool
from penstock.errors import FormatError, OptionError, WorkerError

DANGEROUS = """
import ctypes, sys, types
package = types.ModuleType("penstock")
package.__path__ = [sys.argv[1]]
sys.modules["penstock"] = package
from penstock.dataset import parse_child

def abort(call):
    ctypes.CDLL(None).abort()

def touch_nothing(call):
    ctypes.string_at(0)

def run_on(call):
    parse_child.limit(0.05)  # as the child limits a step, but shorter
    ctypes.CDLL(None).pause()

def take_memory(call):
    return {"data": len(bytearray(64 << 30))}

def chatter(call):
    print("x" * 100_000)
    return {"data": len(call.data[0])}

dangerous = (abort, touch_nothing, run_on, take_memory, chatter)
parse_child.PARSERS.update({f.__name__: f"__main__:{f.__name__}" for f in dangerous})
parse_child.main()
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def dangerous(monkeypatch: pytest.MonkeyPatch) -> object:
    """Let the child have parsers that do what damaged files make native code do."""
    pool = ParserPool()
    monkeypatch.setattr(parse_process, "_START", DANGEROUS)
    monkeypatch.setattr(parse_process, "_pool", pool)
    yield
    pool.close()


def file_bytes(num_rows: int = 10) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"a": range(num_rows), "t": ["x"] * num_rows}), file)
    return file.getvalue()


def children() -> set[int]:
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return {
        int(pid)
        for pid in listed.split()
        if b"parse_child" in Path(f"/proc/{pid}/cmdline").read_bytes()
    }


@pytest.mark.parametrize(
    ("parser", "words"),
    [
        ("abort", "SIGABRT"),
        ("touch_nothing", "SIGSEGV"),
        ("run_on", "did not end"),
        ("take_memory", "MemoryError"),
    ],
)
@pytest.mark.usefixtures("dangerous")
def test_what_ends_a_parser_is_an_error_with_the_name_of_the_file(parser: str, words: str) -> None:
    assert parse_process.parsed_by_arrow("chatter", b"abc", {}, "x") == {"data": 3}
    with pytest.raises(FormatError, match=rf"^the footer of a.parquet .*{words}"):
        parse_process.parsed_by_arrow(parser, b"", {}, "the footer of a.parquet")
    # The next file does not suffer for it.
    assert parse_process.parsed_by_arrow("chatter", b"abc", {}, "x") == {"data": 3}


def test_footers_that_pyarrow_aborts_on_are_errors_of_open(tmp_path: Path) -> None:
    """Wrong physical types of a column: `terminate called after throwing …` in pyarrow 26."""
    whole = file_bytes()
    footer = len(whole) - int.from_bytes(whole[-8:-4], "little") - 8
    # ColumnMetaData begins with its type: field 1 of kind i32 (0x15), then INT64 (4 in zigzag).
    at = whole.rindex(b"\x15\x04\x19", footer)
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.parquet").write_bytes(whole[: at + 1] + b"\x08" + whole[at + 2 :])
    with pytest.raises(FormatError, match=r"the footer of .*a\.parquet cannot be read"):
        penstock.open(folder)


def test_mistakes_of_the_user_keep_their_kind(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(file_bytes())
    with pytest.raises(OptionError, match="no column 'b'"):
        penstock.open(tmp_path, columns=["b"])


def test_a_parser_that_was_killed_while_it_waited_is_started_again(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.parquet").write_bytes(file_bytes())
        assert len(penstock.open(tmp_path / name)) == 10
        for pid in children():
            os.kill(pid, signal.SIGKILL)


def test_many_files_share_a_few_parsers(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as threads:
        list(
            threads.map(
                lambda n: (tmp_path / f"{n:03}.parquet").write_bytes(file_bytes(n + 1)), range(60)
            )
        )
    assert len(penstock.open(tmp_path)) == sum(range(61))
    assert len(children()) <= 8


def test_a_fork_has_parsers_of_its_own(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.parquet").write_bytes(file_bytes())
    penstock.open(tmp_path / "one")
    pid = os.fork()
    if pid == 0:
        os._exit(0 if len(penstock.open(tmp_path / "two")) == 10 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert len(penstock.open(tmp_path / "three")) == 10


PARENT = """
import os, sys
import penstock
penstock.open(sys.argv[1])
print(open(f"/proc/self/task/{os.getpid()}/children").read(), flush=True)
sys.stdin.read()
"""


def test_a_parser_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(file_bytes())
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        (pid,) = map(int, parent.stdout.readline().split())
        assert Path(f"/proc/{pid}").exists()
        parent.kill()
    end = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < end, "the parser outlives its parent"


def test_a_parser_that_cannot_be_started_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.parquet").write_bytes(file_bytes())
    monkeypatch.setattr(parse_process, "_pool", ParserPool())
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(WorkerError, match="/no/such/python"):
        penstock.open(tmp_path)
