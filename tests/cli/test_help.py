"""The first page, and what happens to words that are none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from penstock import __version__
from penstock.cli.parser import VERBS, help_page

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_help_names_every_verb_and_fits_a_terminal(penstock: Run) -> None:
    answer = penstock("--help")
    assert answer.returncode == 0
    assert all(f"  {name} " in answer.stdout for name in VERBS)
    assert max(map(len, answer.stdout.splitlines())) <= 80
    assert answer.stdout == help_page()


def test_no_words_show_the_help_and_are_an_error(penstock: Run) -> None:
    answer = penstock()
    assert (answer.returncode, answer.stdout) == (2, help_page())


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_help_with_an_example(penstock: Run, verb: str) -> None:
    answer = penstock(verb, "--help")
    assert answer.returncode == 0
    assert f"\n  penstock {verb} " in answer.stdout or f"\n  penstock {verb}\n" in answer.stdout
    assert max(map(len, answer.stdout.splitlines())) <= 80


def test_version(penstock: Run) -> None:
    answer = penstock("--version")
    assert (answer.returncode, answer.stdout) == (0, f"penstock {__version__}\n")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["idnex"], "did you mean 'index'?"),
        (["--colour"], "there is no option"),
        (["index"], "URI"),
        (["info", "x", "--sampels", "3"], "--sampels"),
        (["order", "x", "--epoch", "two"], "--epoch"),
    ],
)
def test_usage_errors_are_one_line_and_code_2(penstock: Run, words: list[str], hint: str) -> None:
    answer = penstock(*words)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr.startswith("penstock: error: ")
    assert hint in answer.stderr
    assert answer.stderr.count("\n") == 1


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from penstock.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'pyarrow', 'obstore', 'rich', 'PIL') if m in sys.modules])\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[-1] == "[]"
