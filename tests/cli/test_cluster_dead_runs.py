"""`penstock cluster` lists runs that are going on, and no others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.engine.node.grants import DatasetKey
from penstock.engine.node.runs import ServedRuns
from penstock.engine.peers.base import Address, Shelves
from penstock.engine.peers.node_messages import RegisterRun, RunMember
from penstock.engine.peers.run_files import read_run_files, write_run_file
from penstock.engine.peers.server import PeerServer
from penstock.engine.peers.status import NodeStatus, RunStatus, as_dict

Run = Callable[..., subprocess.CompletedProcess[str]]
DEAD, LIVE, SECRET = b"d" * 16, b"l" * 16, b"s" * 32

RANK = """
import sys
from penstock.engine.peers.node_messages import RunMember
from penstock.engine.peers.run_files import write_run_file
member = RunMember(name="n", host="h", node=0, addresses=(("127.0.0.1", int(sys.argv[2])),))
write_run_file(run_id=sys.argv[1].encode(), secret=b"s" * 32, members=[member])
print("written", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return where runs of a test are looked for, and nowhere else."""
    places = {"XDG_RUNTIME_DIR": str(tmp_path), "PENSTOCK_NODE": "none"}
    for name, value in places.items():
        monkeypatch.setenv(name, value)
    return places


@pytest.fixture
def port() -> Iterator[int]:
    """Give the port of a node that answers for the run LIVE."""
    run = RunStatus(run=LIVE.hex())
    status = as_dict(NodeStatus(name="n", host="h", tiers=(), runs=(run,)))
    server = PeerServer(
        name="n",
        shelves=Shelves(),
        secrets={LIVE: SECRET}.get,
        bind=[Address(host="127.0.0.1", port=0)],
        status=lambda *_: status,
    )
    server.start()
    yield server.address.port
    server.stop()


def rank(run: bytes, port: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", RANK, run.decode(), str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "written\n"
    return process


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "penstock" / "runs").glob("*.json"))


def test_a_rank_that_was_killed_leaves_no_run(
    penstock: Run, here: dict[str, str], tmp_path: Path, port: int
) -> None:
    live, dead = rank(LIVE, port), rank(DEAD, 1)
    dead.send_signal(signal.SIGKILL)
    # It is not waited for yet: a zombie is dead too.
    answer = penstock("cluster", "--json", **here)
    assert json.loads(answer.stdout)["run"] == LIVE.hex()
    assert DEAD.hex()[:8] not in answer.stderr
    assert [path.name[:32] for path in files(tmp_path)] == [LIVE.hex()], "swept by who has looked"
    live.communicate()
    dead.communicate()


def elsewhere(tmp_path: Path, **changes: str) -> None:
    """Make the files of runs those of another machine or container."""
    for path in files(tmp_path):
        told = json.loads(path.read_text())
        assert set(changes) <= set(told)
        path.write_text(json.dumps(told | changes))


def test_a_run_of_another_machine_is_live_if_somebody_answers(
    penstock: Run, here: dict[str, str], tmp_path: Path, port: int
) -> None:
    for run, at in ((LIVE, port), (DEAD, 1)):
        member = RunMember(name="n", host="h", node=0, addresses=(("127.0.0.1", at),))
        write_run_file(run_id=run, secret=SECRET, members=[member])
    elsewhere(tmp_path, mark="other-boot/1|7/7", host="other")
    answer = penstock("cluster", "--once", **here)
    assert answer.returncode == 0, answer.stderr
    assert "1 of 1 nodes answer" in answer.stdout
    assert "other runs here" not in answer.stderr
    assert f"nobody answers for {DEAD.hex()[:8]}" in answer.stderr
    assert len(files(tmp_path)) == 2, "what may be out of reach only is not removed"
    named = penstock("cluster", "--once", "--run", DEAD.hex()[:8], **here)
    assert "0 of 1 nodes answer" in named.stdout


def test_where_nobody_answers_there_is_no_run(
    penstock: Run, here: dict[str, str], tmp_path: Path
) -> None:
    member = RunMember(name="n", host="h", node=0, addresses=(("127.0.0.1", 1),))
    write_run_file(run_id=DEAD, secret=SECRET, members=[member])
    elsewhere(tmp_path, mark="other-boot/1|7/7", host="other")
    answer = penstock("cluster", "--once", **here)
    assert answer.returncode == 1
    assert "no run of yours was found" in answer.stderr
    assert f"nobody answers for {DEAD.hex()[:8]}" in answer.stderr


@pytest.mark.usefixtures("here")
def test_a_machine_that_was_started_again_has_none_of_its_runs(tmp_path: Path) -> None:
    write_run_file(run_id=DEAD, secret=SECRET, members=[])
    elsewhere(tmp_path, mark="other-boot/1|7/7")
    assert read_run_files() == []


def test_a_run_whose_last_rank_has_left_a_service_is_told_apart() -> None:
    runs = ServedRuns(Shelves())
    word = RegisterRun(run_id=LIVE, secret=SECRET, shelf=bytes(16), dataset="set")
    runs.register(1, os.geteuid(), DatasetKey(dataset="set", owner="u0"), word, ())
    assert [run.is_left for run in runs.seen(os.geteuid())] == [False]
    runs.leave(1)
    assert [run.is_left for run in runs.seen(os.geteuid())] == [True]
