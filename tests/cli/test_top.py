"""`penstock top` on a real run of two ranks, one of which is killed."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.cli.conftest import COMMAND, Run

from penstock.cli.main import main

TRAINS = """
import sys
import penstock

folder, run, rank = sys.argv[1:]
world = penstock.World(rank=int(rank), num_ranks=2)
loader = penstock.Loader(
    penstock.open(folder), batch_size=10, workers="here", world=world, trace=run, output="numpy"
)
with loader:
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    print("trains", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def ranks(tmp_path: Path, environment: dict[str, str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    np.save(tmp_path / "rows.npy", np.ones((200, 4), np.float32))
    words = [str(tmp_path / "rows.npy"), str(tmp_path / "run")]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", TRAINS, *words, str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        for rank in range(2)
    ]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == b"trains\n"
    yield started
    for process in started:
        process.communicate()


def test_top_shows_every_rank_also_one_that_was_killed(
    penstock: Run, ranks: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    answer = penstock("top", tmp_path / "run", "--once")
    assert answer.returncode == 0, answer.stderr
    lines = answer.stdout.splitlines()
    assert "2 of 2 ranks running, 1 host" in lines[0]
    assert [line.split()[:4] for line in lines[5:7]] == [
        ["0", "running", "0", "3"],
        ["1", "running", "0", "3"],
    ]
    assert max(map(len, lines)) <= 80
    os.kill(ranks[1].pid, signal.SIGKILL)
    ranks[1].wait()
    told = json.loads(penstock("top", tmp_path / "run", "--json").stdout)["ranks"]
    assert [rank["state"] for rank in told] == ["running", "killed"]
    assert [rank["counts"]["samples"] for rank in told] == [30, 30]


def test_on_a_terminal_it_goes_on_until_q(
    environment: dict[str, str], ranks: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    ours, theirs = pty.openpty()
    words = ["top", str(tmp_path / "run"), "--interval", "0.1"]
    top = subprocess.Popen([*COMMAND, *words], stdin=theirs, stdout=theirs, env=environment)
    os.close(theirs)
    shown = b""
    while shown.count(b"ranks running") < 3:
        shown += os.read(ours, 65536)
    os.write(ours, b"q")
    with contextlib.suppress(OSError):  # Linux: nobody holds the other end any more.
        while data := os.read(ours, 65536):
            shown += data
    assert top.wait() == 0
    os.close(ours)
    # The last page stays, on the screen that was there before.
    assert b"2 of 2 ranks running" in shown.rpartition(b"\x1b[?1049l")[2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere", "--once"], "holds no trace"),
        (["http://127.0.0.1:9", "--once"], "no rank answers"),
        (["nowhere", "http://127.0.0.1:9"], "top shows one folder or some URLs"),
        (["nowhere", "--interval", "0"], "--interval must be more than 0"),
    ],
)
def test_what_cannot_be_shown_is_an_error(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", *words]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err
