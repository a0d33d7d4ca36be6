"""Completion in a real bash, and scripts for all shells that name what verbs take."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from penstock.cli.main import main
from penstock.cli.parser import VERBS

Run = Callable[..., subprocess.CompletedProcess[str]]

ASK = """
eval "$1"; shift
COMP_WORDS=(penstock "$@"); COMP_CWORD=$#
_penstock
printf '%s\\n' "${COMPREPLY[@]}"
complete -p penstock
"""


@pytest.fixture
def script(capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", "bash"]) == 0
    return capsys.readouterr().out


def answers(script: str, *words: str) -> list[str]:
    """Return what bash offers for the last word."""
    shown = subprocess.run(
        ["bash", "--norc", "-c", ASK, "bash", script, *words],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stderr == ""
    *offered, registered = shown.stdout.splitlines()
    assert registered == "complete -o default -F _penstock penstock"
    return [word for word in offered if word]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["ve"], ["verify"]),
        (["p"], ["pack", "probe", "plan", "predict"]),
        (["help", "i"], ["info", "index"]),
        (["order", "--sh"], ["--shuffle"]),
        (["order", "--shuffle", "bl"], ["blocks", "blocks-first"]),
        (["plan", "data/", "--peers", "f"], ["fixed"]),
        (["pack", "a", "b", "--format", ""], ["tar", "npy"]),
        (["node", "--share", ""], ["user", "group", "all"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
        # Nothing of ours: bash completes names of files.
        (["probe", "--output", "m"], []),
        (["info", "da"], []),
        (["nonsense", "-"], []),
    ],
)
def test_bash_offers_what_fits(script: str, words: list[str], offered: list[str]) -> None:
    assert answers(script, *words) == offered


def test_bash_offers_every_verb_and_every_option(script: str) -> None:
    assert answers(script, "") == [*VERBS, "help"]
    assert {"--samples", "--json", "--help", "-h", "--endpoint"} <= set(
        answers(script, "info", "-")
    )


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_are_told_of_all_verbs(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    shown = capsys.readouterr().out
    for verb in VERBS.values():
        assert verb.name in shown
        assert verb.line in shown
    assert "blocks-first" in shown


def test_help_of_a_verb_is_its_help(penstock: Run) -> None:
    wanted = penstock("info", "--help")
    for words in (["help", "info"], ["--help", "info"], ["-h", "info"]):
        shown = penstock(*words)
        assert (shown.returncode, shown.stdout) == (0, wanted.stdout)
    assert "Usage: penstock VERB" in penstock("help").stdout
    refused = penstock("help", "inof")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "there is no verb 'inof'; did you mean 'info'?" in refused.stderr
