"""Colours and bars where there is a terminal, and nowhere else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]

CALL = "import sys; from penstock.cli.main import main; sys.exit(main({words!r}))"
WITHOUT_RICH = "import sys; sys.modules['rich'] = None; "
ESCAPE = "\x1b["


@pytest.mark.parametrize("verb", ["index", "info", "order", "verify"])
def test_a_pipe_gets_plain_text(penstock: Run, shards: Path, verb: str) -> None:
    answer = penstock(verb, shards)
    assert answer.returncode == 0
    assert ESCAPE not in answer.stdout + answer.stderr
    assert answer.stderr == ""


def test_a_terminal_gets_styles(on_terminal: Callable[..., str], shards: Path) -> None:
    shown = on_terminal(CALL.format(words=["info", str(shards)]))
    assert ESCAPE in shown
    assert "40" in shown


def test_no_color_is_respected(on_terminal: Callable[..., str], shards: Path) -> None:
    on_terminal(CALL.format(words=["index", str(shards)]))
    shown = on_terminal(CALL.format(words=["info", str(shards)]), NO_COLOR="1")
    assert ESCAPE not in shown
    assert "40" in shown


def test_without_rich_there_is_plain_text(on_terminal: Callable[..., str], shards: Path) -> None:
    shown = on_terminal(WITHOUT_RICH + CALL.format(words=["info", str(shards)]))
    assert ESCAPE not in shown
    assert "Fields" in shown


def test_progress_goes_to_stderr(environment: dict[str, str], shards: Path) -> None:
    # stderr is no terminal here either: what matters is that stdout holds the result alone.
    answer = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", "index", str(shards), "--json"],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    assert answer.stdout.startswith("{")
    assert answer.stdout.endswith("}\n")


def test_a_reader_that_leaves_early_is_no_error(environment: dict[str, str], shards: Path) -> None:
    command = f"{sys.executable} -m penstock.cli.main info {shards} --samples 40 | head -1"
    answer = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env=environment, check=True
    )
    assert answer.stderr == ""


def test_a_terminal_without_unicode_gets_question_marks(penstock: Run, shards: Path) -> None:
    answer = penstock("info", shards, PYTHONIOENCODING="ascii")
    assert answer.returncode == 0
    assert "?" in answer.stdout
