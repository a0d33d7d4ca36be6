"""Ctrl-C, at work: one line, exit code 130, nothing left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.storage.keys import TEMPORARY_PREFIX

# The process sends itself the signal when it calls a function that is in the middle of its work.
WRAPPER = """
import importlib, os, signal, sys
module, name = sys.argv[1].rsplit(":", 1)
owner = importlib.import_module(module)
*path, name = name.split(".")
for part in path:
    owner = getattr(owner, part)
real = getattr(owner, name)

def interrupted(*words, **more):
    setattr(owner, name, real)
    os.kill(os.getpid(), signal.SIGINT)
    return real(*words, **more)

setattr(owner, name, interrupted)
sys.argv[1:] = sys.argv[2:]
from penstock.cli.main import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("penstock.simulate.probe.copies:copies", ["probe", "--quick", "--output", "m.toml"]),
        ("penstock.simulate.probe.tiers:copies", ["probe", "--quick", "--output", "m.toml"]),
        (
            "penstock.simulate.probe.scratch:ScratchFile.reads",
            ["probe", "--quick", "--output", "m.toml", "--disk", "disk:50%"],
        ),
        ("penstock.cli.progress:ProgressBar.update", ["index", "files"]),
        ("penstock.cli.progress:ProgressBar.update", ["verify", "files"]),
        ("penstock.cli.progress:ProgressBar.update", ["pack", "files", "out"]),
        ("penstock.dataset.dataset:Dataset.__getitem__", ["info", "files"]),
        ("penstock.cli.order:quality_of", ["order", "files", "--quality"]),
        ("penstock.cli.plan:make_plan", ["plan", "files"]),
        ("penstock.cli.tiers:found_tiers", ["tiers"]),
        ("penstock.cli.cluster:found_here", ["cluster", "--once"]),
    ],
)
def test_ctrl_c_is_one_line_and_130(
    environment: dict[str, str], tmp_path: Path, where: str, words: list[str]
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "files").mkdir()
    for number in range(20):
        (tmp_path / "files" / f"{number}.txt").write_text(str(number))
    ended = subprocess.run(
        [sys.executable, "-c", WRAPPER, where, *words],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        check=False,
    )
    assert ended.returncode == 130, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line.startswith("penstock: interrupted")
    assert list((tmp_path / "disk").iterdir()) == []
    assert not (tmp_path / "m.toml").exists()
    assert not list(tmp_path.rglob(f"{TEMPORARY_PREFIX}*"))
