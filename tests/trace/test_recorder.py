"""The recorder: nothing that was recorded is lost, whatever happens to the process."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import OptionError
from penstock.trace import COLUMNS, Flag, Kind, Recorder, read_trace
from penstock.trace.chunks import chunks_of, rows_chunk, rows_of
from penstock.trace.clocks import FACT, ClockReading, clock_facts, read_clock
from penstock.trace.recorder import ROWS_MAX
from penstock.trace.schema import ROW


def test_a_span_is_read_back_with_every_column(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, role="engine", rank=3)
    recorder.span(
        Kind.FETCH, 1_000, 3_500,
        object_id=recorder.name("train-000.tar"), source_id=recorder.name("s3"),
        offset=4096, size_bytes=110_000, step=7, epoch=2, count=1, attempt=1,
        flags=Flag.HEDGE | Flag.ERROR, cpu_ns=11, wait_ns=12, lock_ns=13,
    )  # fmt: skip
    recorder.close()
    trace = read_trace(tmp_path)
    [span] = trace.spans
    assert trace.name_of(span["object"]) == "train-000.tar"
    assert trace.name_of(span["source"]) == "s3"
    found = {
        name: int(span[name]) for name, _ in COLUMNS if name not in ("object", "source", "spare")
    }
    assert found == {
        "start_ns": 0, "duration_ns": 2_500, "cpu_ns": 11, "wait_ns": 12, "lock_ns": 13,
        "offset": 4096, "size_bytes": 110_000, "step": 7, "count": 1, "epoch": 2,
        "kind": Kind.FETCH, "flags": 3, "attempt": 1,
    }  # fmt: skip
    assert (span["rank"], trace.processes[0].role, trace.processes[0].pid) == (
        3,
        "engine",
        os.getpid(),
    )


@pytest.mark.parametrize("num_rows", [0, 1, ROWS_MAX - 1, ROWS_MAX, 2 * ROWS_MAX + 5])
def test_rows_of_a_running_process_are_readable(tmp_path: Path, num_rows: int) -> None:
    recorder = Recorder(tmp_path, role="train")
    for number in range(num_rows):
        recorder.span(Kind.NEXT, number, number + 1, step=number)
    assert read_trace(tmp_path).spans["step"].tolist() == list(range(num_rows))
    recorder.close()
    assert read_trace(tmp_path).spans["step"].tolist() == list(range(num_rows))
    assert not list(tmp_path.glob("*.rows"))


_KILLED = """
import os, signal, sys
from penstock.trace import Kind, Recorder
recorder = Recorder(sys.argv[1], role="worker", rank=1)
for number in range(5000):
    name = recorder.name(f"f{number % 9}")
    recorder.span(Kind.DECODE, number, number + 1, step=number, object_id=name)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_every_row_that_it_recorded(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    trace = read_trace(tmp_path)
    assert trace.spans["step"].tolist() == list(range(5000))
    assert set(trace.names_of(trace.spans["object"])) == {f"f{n}" for n in range(9)}


def test_a_file_that_is_cut_anywhere_gives_the_chunks_before_the_cut(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, role="train")
    for number in range(3 * ROWS_MAX):
        recorder.span(Kind.NEXT, number, number + 1, step=number)
    recorder.close()
    [path] = tmp_path.glob("*.trace")
    data = path.read_bytes()
    for cut in range(300, len(data), len(data) // 60):
        path.write_bytes(data[:cut])
        steps = read_trace(tmp_path).spans["step"].tolist()
        assert steps == list(range(len(steps)))
        assert len(steps) % ROWS_MAX == 0


def test_a_program_that_takes_our_descriptor_finds_none_of_our_bytes_in_its_files(
    tmp_path: Path,
) -> None:
    recorder = Recorder(tmp_path / "run", role="train")
    recorder.span(Kind.NEXT, 0, 1, step=0)
    number = recorder._file
    os.close(number)  # As programs do that close all descriptors.
    theirs = os.open(tmp_path / "theirs", os.O_WRONLY | os.O_CREAT)
    if theirs != number:
        os.dup2(theirs, number)
    recorder.name("a name")
    recorder.span(Kind.NEXT, 1, 2, step=1)
    recorder.close()
    child = os.fork()
    if child == 0:
        os.write(number, b"still theirs")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / "theirs").read_bytes() == b"still theirs"
    assert read_trace(tmp_path / "run").spans["step"].tolist() == [0, 1]


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Makes the disk full, for whoever records, or gives room again."""

    def no_room(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def fill(is_full: bool) -> None:
        monkeypatch.setattr(os, "write", no_room if is_full else write)
        monkeypatch.setattr(os, "posix_fallocate", no_room if is_full else allocate)

    write, allocate = os.write, os.posix_fallocate
    return fill


def test_what_is_recorded_on_a_full_disk_is_missing_and_counted(
    tmp_path: Path, full: Callable[[bool], None], caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(tmp_path, role="train")
    for number in range(3 * ROWS_MAX + 7):
        full(number // ROWS_MAX == 1)  # While the first rows are compressed.
        recorder.span(Kind.NEXT, number, number + 1, step=number)
    assert "not complete: No space left" in caplog.text
    for _ in range(2):
        trace = read_trace(tmp_path)
        assert trace.spans["step"].tolist() == list(range(ROWS_MAX, 3 * ROWS_MAX + 7))
        assert trace.num_damaged == ROWS_MAX
        full(True)
        recorder.close()  # The last rows stay where they are.
    full(False)


def test_rows_wait_in_memory_where_there_is_no_room_for_a_file_of_a_thread(
    tmp_path: Path, full: Callable[[bool], None]
) -> None:
    recorder = Recorder(tmp_path, role="train")
    full(True)
    recorder.span(Kind.NEXT, 0, 1, step=0)
    full(False)
    assert not list(tmp_path.glob("*.rows"))
    recorder.span(Kind.NEXT, 1, 2, step=1)
    recorder.close()
    assert read_trace(tmp_path).spans["step"].tolist() == [0, 1]


def test_a_folder_that_goes_away_costs_the_trace_and_not_the_training(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run", role="train")
    recorder.span(Kind.NEXT, 0, 1)
    shutil.rmtree(tmp_path / "run")
    for number in range(ROWS_MAX + 1):
        recorder.span(Kind.NEXT, number, number + 1)
    thread = threading.Thread(target=lambda: recorder.span(Kind.READ, 0, 1))
    thread.start()
    thread.join()
    recorder.close()
    assert not (tmp_path / "run").exists()


def test_children_that_record_nothing_leave_no_file(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, role="train")
    for status in (0, 0):
        child = os.fork()
        if child == 0:
            os._exit(status)
        os.waitpid(child, 0)
    assert len(list(tmp_path.glob("*.trace"))) == 1
    child = os.fork()
    if child == 0:
        recorder.span(Kind.BATCH, 0, 1)
        os._exit(0)
    os.waitpid(child, 0)
    recorder.close()
    assert sorted(process.role for process in read_trace(tmp_path).processes) == ["train", "worker"]


def test_a_signal_handler_that_records_takes_no_row_away(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, role="train")
    marked: list[int] = []

    def handler(*_: object) -> None:
        marked.append(len(marked))
        recorder.span(Kind.MARK, 0, 1, step=marked[-1])

    recorder.span(Kind.MARK, 0, 1, step=-7)
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 5e-4, 5e-4)
    try:
        for number in range(10 * ROWS_MAX):
            recorder.span(Kind.NEXT, number, number + 1, step=number)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    recorder.close()
    trace = read_trace(tmp_path)
    steps = trace.of(Kind.NEXT)["step"]
    assert (np.diff(steps) > 0).all()
    # Only one that comes while rows are compressed takes the place of another one.
    assert 10 * ROWS_MAX + 1 + len(marked) - len(trace.spans) <= 10
    assert trace.num_damaged == 0


def test_a_reader_beside_a_writer_sees_whole_rows_and_no_gap(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, role="train")

    def write() -> None:
        for n in range(40 * ROWS_MAX):
            recorder.span(Kind.NEXT, n, 2 * n, step=n, size_bytes=n, offset=n)

    writer = threading.Thread(target=write)
    writer.start()
    num_seen = 0
    while writer.is_alive() or not num_seen:
        trace = read_trace(tmp_path)
        rows = trace.spans
        num_seen = len(rows)
        for column in ("start_ns", "duration_ns", "size_bytes", "offset", "step"):
            assert np.array_equal(rows[column], np.arange(num_seen)), column
        assert trace.num_damaged == 0
    writer.join()
    recorder.close()
    assert len(read_trace(tmp_path).spans) == 40 * ROWS_MAX


def test_threads_and_forked_children_record_into_one_run(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, role="train")
    recorder.span(Kind.NEXT, 0, 1, step=0)
    threads = [
        threading.Thread(target=lambda n=n: recorder.span(Kind.READ, 0, 1, step=n), name=f"t{n}")
        for n in range(1, 9)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    child = os.fork()
    if child == 0:
        recorder.span(Kind.READ, 0, 1, step=100, object_id=recorder.name("of the child"))
        recorder.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    recorder.span(Kind.NEXT, 2, 3, step=200)
    recorder.close()
    trace = read_trace(tmp_path)
    assert sorted(trace.spans["step"].tolist()) == [*range(9), 100, 200]
    assert sorted(p.pid for p in trace.processes) == sorted([os.getpid(), child])


def test_disk_is_bounded_and_what_is_dropped_is_counted(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, role="train", file_bytes_max=50_000)
    rng = np.random.default_rng(0)
    for number in range(20 * ROWS_MAX):
        kind = Kind.NEXT if number % 4 == 0 else Kind.READ
        recorder.span(kind, number, number + 1, step=number, offset=int(rng.integers(1 << 40)))
    recorder.close()
    trace = read_trace(tmp_path)
    kept = trace.of(Kind.READ)
    assert len(trace.of(Kind.NEXT)) == 5 * ROWS_MAX
    assert trace.processes[0].dropped == {Kind.READ: 15 * ROWS_MAX - len(kept)}
    assert 0 < len(kept) < 15 * ROWS_MAX


@given(
    st.lists(
        st.tuples(*[st.integers(-(2**62), 2**62)] * 8, *[st.integers(0, 2**31 - 1)] * 4),
        min_size=1,
        max_size=50,
    )
)
def test_rows_survive_compression(rows: list[tuple[int, ...]]) -> None:
    table = np.array([(*row, 0, 0, 0, 0) for row in rows], ROW)
    [(header, body)] = chunks_of(b"rubbish" + rows_chunk(table, {"segment": 0}) + b"more")
    assert (rows_of(header, body) == table).all()


def test_facts_and_counters_are_kept_by_process(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, role="train", rank=1)
    recorder.facts({"batch_size": 8, "workers": 2})
    recorder.facts({"workers": 4})
    recorder.counters(time.perf_counter_ns(), {"cpu": 0.5})
    recorder.close()
    trace = read_trace(tmp_path)
    assert trace.facts(1) == {"batch_size": 8, "workers": 4}
    assert [values for _, values in trace.processes[0].counters] == [{"cpu": 0.5}]


def test_a_folder_without_a_trace_is_an_error_that_says_how_to_record_one(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="penstock trace --out"):
        read_trace(tmp_path)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(OptionError, match="cannot be written"):
        Recorder(blocked / "run", role="train")


def test_clocks_of_machines_are_compared_by_the_shortest_round_trip() -> None:
    offset_ns = 5_000_000_000
    reading = read_clock(lambda: time.perf_counter_ns() + offset_ns)
    assert abs(reading.offset_ns - offset_ns) <= reading.error_ns


def test_a_drifting_clock_is_corrected_between_two_readings() -> None:
    first = ClockReading(at_ns=0, offset_ns=1_000, error_ns=5)
    last = ClockReading(at_ns=1_000_000, offset_ns=2_000, error_ns=7)
    head = {"perf_ns": 0, "time_ns": 0, "host": "b", "rank": 1, "boot": "b", "role": "train"}
    files = [
        ({**head, "rank": 0, "role": "launch", "boot": "b"}, {}),
        ({**head, "boot": "z", "rank": 0, "host": "a"}, {}),
        (head, {FACT: [first.as_fact, last.as_fact]}),
    ]
    facts = clock_facts(files)
    times = np.array([0, 500_000, 1_000_000])
    assert facts.offset_ns("b", times).tolist() == [1_000, 1_500, 2_000]
    assert facts.offset_ns("z", times) == 0
    assert facts.error_ns == 5
