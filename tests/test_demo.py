"""The demo, in its small size: it tells the truth, and leaves nothing behind however it ends."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from examples.demo.view import sparkline
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.main import main

pytest.importorskip("torch")

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "examples.demo", "--quick"]
END_TIMEOUT_S = 60


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment that keeps caches and temporary files apart."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    return dict(os.environ) | {"PENSTOCK_CACHE": str(tmp_path / "cache"), "TMPDIR": str(scratch)}


def demo(environment: dict[str, str], *words: object) -> subprocess.CompletedProcess[str]:
    """Run the demo without a terminal."""
    command = [*COMMAND, *map(str, words)]
    return subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment,
        timeout=200,
        check=False,
    )


def training_processes(scratch: Path) -> list[int]:
    """The processes whose job lies in a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if b"examples.demo.trainer" in words and str(scratch).encode() in words:
            found.append(int(entry.name))
    return found


def start_until_it_trains(environment: dict[str, str]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        COMMAND,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.lstrip().startswith("step "):
            return process
    raise AssertionError(process.communicate())


def test_a_killed_run_resumes_with_the_same_stream(environment: dict[str, str]) -> None:
    answer = demo(environment)
    assert answer.returncode == 0, answer.stderr
    hashes = re.findall(r"hash ([0-9a-f]{16})", answer.stdout)
    assert len(hashes) == 2
    assert len(set(hashes)) == 1
    for word in ("kill -9", "as 2 ranks", "equal", "penstock pack"):
        assert word in answer.stdout
    assert "\x1b[" not in answer.stdout
    assert max(map(len, answer.stdout.splitlines())) <= 80
    assert list(Path(environment["TMPDIR"]).iterdir()) == []


def test_what_is_kept_can_be_used(environment: dict[str, str], tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    assert demo(environment, "--keep", kept).returncode == 0
    assert {p.name for p in kept.iterdir()} == {"images", "shards", "checkpoint.pt"}
    assert len(list((kept / "images").glob("*/*.jpg"))) == 320
    assert main(["verify", str(kept / "shards")]) == 0
    again = demo(environment, "--keep", kept)
    assert again.returncode == 1
    assert "not an empty folder" in again.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing(
    environment: dict[str, str], number: signal.Signals
) -> None:
    scratch = Path(environment["TMPDIR"])
    process = start_until_it_trains(environment)
    assert training_processes(scratch)
    process.send_signal(number)
    _, errors = process.communicate(timeout=END_TIMEOUT_S)
    assert (process.returncode, errors) == (130, "demo: interrupted\n")
    assert training_processes(scratch) == []
    assert list(scratch.iterdir()) == []


def test_training_ends_when_the_demo_is_killed(environment: dict[str, str]) -> None:
    scratch = Path(environment["TMPDIR"])
    process = start_until_it_trains(environment)
    handles = [os.pidfd_open(pid) for pid in training_processes(scratch)]
    assert handles
    process.kill()
    process.communicate()
    for handle in handles:
        assert select.select([handle], [], [], END_TIMEOUT_S)[0]
        os.close(handle)


@given(values=st.lists(st.floats(-1e6, 1e6), max_size=300), width=st.integers(1, 60))
def test_a_sparkline_fits_its_width(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) == min(width, len(values))


def test_without_torch_it_says_what_to_install(environment: dict[str, str]) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from examples.demo.__main__ import main; sys.exit(main([]))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert (answer.returncode, answer.stdout) == (1, "")
    assert re.search(r"pip install .*\[torch,jpeg,cli\]'", answer.stderr)
