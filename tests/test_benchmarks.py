"""The instruments of the benchmarks: loops that use data, bare processes, kills."""

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks.bare import Bare, Slot
from benchmarks.kills import Findings, count
from benchmarks.kills_program import RECORD
from benchmarks.loops import PAGE, touch

NUM_PAGES = 20
ROOT = Path(__file__).parents[1]


def with_a_one_at_each_page() -> np.ndarray:
    marked = np.zeros(NUM_PAGES * PAGE, np.uint8)
    marked[::PAGE] = 1
    return marked


def forms_of(marked: np.ndarray) -> dict[str, object]:
    torch = pytest.importorskip("torch")
    return {
        "bytes": marked.tobytes(),
        "array": marked.view(np.int32).reshape(NUM_PAGES, -1),
        "axes exchanged": marked.reshape(-1, 2, 64).transpose(0, 2, 1),
        "tensor": torch.from_numpy(marked).view(torch.float32),
        "fields": {"a": [marked[: 8 * PAGE], marked[8 * PAGE :]]},
    }


@pytest.mark.parametrize("form", ["bytes", "array", "axes exchanged", "tensor", "fields"])
def test_the_loop_reads_a_byte_of_every_page(form: str) -> None:
    assert touch(forms_of(with_a_one_at_each_page())[form]) == NUM_PAGES


def test_the_loop_reads_all_of_what_is_small() -> None:
    assert touch((np.arange(10), 5, b"")) == 50


def squared(number: int, slot: Slot) -> None:
    slot[0][:] = number**2


def test_bare_processes_make_each_batch_once() -> None:
    made = Bare(squared, [((4,), np.int64)], 3)
    with contextlib.closing(made):
        values = [slot[0].tolist() for slot in made.batches(range(50))]
    assert sorted(values) == [[n**2] * 4 for n in range(50)]


def test_bare_processes_end_when_their_owner_is_killed() -> None:
    program = """
import sys, numpy
from benchmarks.bare import Bare
made = Bare(lambda number, slot: None, [((1,), numpy.int64)], 2)
print(*made.pids, flush=True)
sys.stdin.read()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    owner = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, **pipes)
    with owner:
        assert owner.stdout is not None
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        ends = [os.pidfd_open(pid) for pid in pids]
        owner.send_signal(signal.SIGKILL)
    for end in ends:
        ended, _, _ = select.select([end], [], [], 30)
        assert ended, "a bare process outlived its owner"
        os.close(end)
    assert len(pids) == 2


@pytest.mark.parametrize(
    ("used", "missing", "twice"),
    [(range(2000), 0, 0), (range(1990), 10, 0), ([*range(2000), 7], 0, 1)],
)
def test_samples_that_an_epoch_lacks_or_repeats_are_counted(
    tmp_path: Path, used: range | list, missing: int, twice: int
) -> None:
    np.array([(0, i) for i in used], RECORD).tofile(tmp_path / "log")
    found = Findings()
    count(tmp_path / "log", found)
    assert (found.epochs, found.missing, found.twice) == (1, missing, twice)


def test_kills_of_the_training_process_leave_and_lose_nothing() -> None:
    command = [sys.executable, "-m", "benchmarks.kills", "--kinds", "front", "--moments", "2"]
    done = subprocess.run(
        [*command, "--workers", "here"], cwd=ROOT, check=False, capture_output=True, text=True
    )
    said = done.stdout + done.stderr
    row = next((line for line in done.stdout.splitlines() if line.startswith("| front")), "")
    cells = [cell.strip() for cell in row.split("|")]
    assert cells[2:6] == ["2", "0", "0", "2"], said
    assert cells[8:10] == ["0", "0"], said
    # A kill during indexing may leave a temporary file in the cache: that is indexing's own matter.
    assert re.fullmatch(r"nothing|\d+ files of the cache", cells[6]), said
