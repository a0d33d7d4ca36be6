"""--memory, --disk and --shuffle mean one thing in every verb."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock as library
from penstock.cli import probe
from penstock.cli.main import main
from penstock.engine.node.options import options_of
from penstock.errors import OptionError
from penstock.machine import load_machine
from penstock.storage.tier_sizes import Disk, Memory, disk_of, memory_of

from .test_probe import TINY


def test_a_disk_whose_size_came_first_is_told_so() -> None:
    with pytest.raises(OptionError, match=r"the folder comes first; write .*'/scratch', '500GB'"):
        library.Disk("500GB", "/scratch")
    with pytest.raises(OptionError, match="the folder comes first"):
        library.Disk("50%", "scratch")
    assert library.Disk("2024", "1GB").folder == "2024", "a folder may be called anything"


def test_the_folder_of_memory_is_named() -> None:
    assert Memory("1GB", folder="/mnt/tmpfs").folder == "/mnt/tmpfs"
    with pytest.raises(TypeError, match="positional"):
        Memory("1GB", "/mnt/tmpfs")  # type: ignore[misc]


def test_a_service_reads_the_same_words() -> None:
    options = options_of({"memory": "/m:1GB", "disk": ["/a:1TB", "b:c:50%"]}, {})
    assert options.wishes == (Memory("1GB", folder="/m"), Disk("/a", "1TB"), Disk("b:c", "50%"))
    assert options.wishes == (memory_of("/m:1GB"), disk_of("/a:1TB"), disk_of("b:c:50%"))


@pytest.fixture
def some_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("a")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("verb", [["plan", "."], ["probe", "--quick"], ["node"]])
@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--disk", "200GB"], "--disk '200GB' has no folder; write --disk FOLDER:SIZE"),
        (["--disk", "/scratch"], "--disk '/scratch' has no size; write --disk FOLDER:SIZE"),
        (["--disk", "/scratch:much"], "--disk '/scratch:much' has no size"),
        (["--memory", "/dev/shm"], "--memory '/dev/shm' has no size; write for example --memory"),
        (["--memory", "120%"], "between 0% and 100%"),
    ],
)
@pytest.mark.usefixtures("some_data")
def test_every_verb_refuses_the_same(
    verb: list[str], words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*verb, *words]) == 1
    assert hint in capsys.readouterr().err


@pytest.fixture
def told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Any]:
    """Give a function that runs the command here and returns what it tells programs."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    def run(*words: object) -> Any:
        assert main([*map(str, words), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_a_plan_takes_the_words_of_a_node(
    shards: Path, told: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", str(shards), "--batch-size", "4"]

    def cache_bytes(*tiers: str) -> int:
        return int(told(*words, *tiers)["cache_bytes"])

    assert cache_bytes("--memory", "2kB", "--disk", "/no/such/folder:3kB") == 5000
    assert cache_bytes("--disk", "/a:1kB", "--disk", "/b:3kB") == 4000
    assert cache_bytes("--memory", "0") == 0
    assert main([*words, "--disk", "/a:50%"]) == 1
    said = capsys.readouterr().err
    assert "50% of a disk tier that no machine file describes is unknown" in said


def test_a_probe_notes_how_much_a_tier_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probe, "QUICK", TINY)
    (tmp_path / "disk").mkdir()
    output = tmp_path / "m.toml"
    tiers = ["--memory", "3MB", "--disk", f"{tmp_path / 'disk'}:5MB"]
    assert main(["probe", "--quick", "--output", str(output), *tiers]) == 0
    machine = load_machine(output)
    assert [tier.capacity_bytes for tier in machine.tiers] == [3_000_000, 5_000_000]
    assert f"--memory 3MB --disk {tmp_path / 'disk'}:5MB" in machine.notes["command"]
    assert "5 MB, latency" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["sequential", "none"])
def test_no_shuffling_has_one_meaning(
    shards: Path, told: Callable[..., Any], capsys: pytest.CaptureFixture[str], word: str
) -> None:
    result = told("order", shards, "--shuffle", word)
    assert (result["shuffle"], result["ids"][:4]) == ("sequential", [0, 1, 2, 3])
    told("plan", shards, "--batch-size", 4, "--shuffle", word)
    with pytest.raises(SystemExit, match="2"):
        main(["order", str(shards), "--shuffle", "some"])
    assert "'global', 'blocks', 'blocks-first', 'sequential'" in capsys.readouterr().err
