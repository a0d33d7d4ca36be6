"""The real command in real processes, and a small data set to point it at."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "penstock.cli.main"]
SAMPLES_A_SHARD = 20

Answer = subprocess.CompletedProcess[str]
Run = Callable[..., Answer]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment that keeps caches and temporary files apart, and says nothing of colours."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    own = {"PENSTOCK_CACHE": str(tmp_path / "cache"), "TMPDIR": str(scratch), "TERM": "xterm"}
    kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    return kept | own


@pytest.fixture
def penstock(environment: dict[str, str]) -> Run:
    """Give a function that runs the command without a terminal."""

    def run(*words: object, **more: str) -> Answer:
        return subprocess.run(
            [*COMMAND, *map(str, words)],
            capture_output=True,
            text=True,
            env=environment | more,
            timeout=200,
            check=False,
        )

    return run


@pytest.fixture
def on_terminal(environment: dict[str, str]) -> Callable[..., str]:
    """Give a function that runs some Python on a pseudo-terminal and returns all it showed."""

    def run(code: str, **more: str) -> str:
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            env=environment | more,
        )
        os.close(theirs)
        shown = b""
        while True:
            try:
                data = os.read(ours, 65536)
            except OSError:  # Linux: nobody holds the other end any more.
                break
            if not data:
                break
            shown += data
        os.close(ours)
        process.wait()
        return shown.decode()

    return run


def write_shard(path: Path, first: int) -> None:
    with tarfile.open(path, "w") as tar:
        for number in range(first, first + SAMPLES_A_SHARD):
            text = f"sample number {number} " * (1 + number % 5)
            for extension, data in (("txt", text.encode()), ("cls", str(number % 3).encode())):
                member = tarfile.TarInfo(f"{number:05}.{extension}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Two tar shards with texts and classes."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(2):
        write_shard(folder / f"train-{number}.tar", number * SAMPLES_A_SHARD)
    return folder


@pytest.fixture
def add_shard(shards: Path) -> Callable[[], None]:
    """Give a function that adds a third shard."""
    return lambda: write_shard(shards / "train-2.tar", 2 * SAMPLES_A_SHARD)
