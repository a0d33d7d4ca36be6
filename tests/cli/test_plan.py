"""`penstock plan`: the numbers of the planner, in words and as JSON."""

from __future__ import annotations

import html
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock as library
from penstock.cli.main import main
from penstock.flow.layout.units import Units
from penstock.machine import Curve, LinkModel, Machine, StoreModel, TierModel, machine_toml
from penstock.units import show_bytes

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True)
def no_machine(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that this user has measured."""
    environment["XDG_CONFIG_HOME"] = str(tmp_path / "config")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def json_of(answer: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert answer.returncode == 0, answer.stderr
    result: dict[str, Any] = json.loads(answer.stdout)
    return result


def write_machine(path: Path) -> Path:
    flat = Curve.flat(1e6)
    machine = Machine(
        store=StoreModel(latency_s=0.5, latency_p99_s=1.0, throughput=Curve.flat(1e3)),
        link=LinkModel(bytes_s=1e6),
        tiers=(TierModel(kind="disk", capacity_bytes=1_000, read=flat, write=flat),),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(machine_toml(machine))
    return path


def test_a_plan_draws_the_numbers_that_it_says(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "plan.html"
    words = ["plan", str(shards), "--batch-size", "4", "--epochs", "3", "--memory", "1MB"]
    assert main([*words, "--json", "--html", str(page)]) == 0
    told = json.loads(capsys.readouterr().out)
    text = html.unescape(page.read_text())
    assert f">{show_bytes(told['first']['bytes']['store'])}<" in text
    assert all(change["what"] in text for change in told["what_if"])
    assert main([*words, "--html", str(tmp_path / "none" / "plan.html")]) == 1
    assert "name another file with --html" in capsys.readouterr().err


def test_a_plan_says_what_comes_from_where(penstock: Run, shards: Path) -> None:
    words = ("plan", shards, "--batch-size", 4, "--epochs", 3)
    shown = penstock(*words, "--memory", "1MB")
    assert (shown.returncode, shown.stderr) == (0, "")
    for text in (
        "machine: assumed, a local disk; `penstock probe` measures yours",
        "40 samples",
        "1 node, 1 rank, batches of 4 on each, 3 epochs, shuffle global",
        "tiers on the node: 1 MB of memory",
        "from the store",
        "each later one",
        "limited by",
        "(ratio 1.00)",
        "100 GB more of tiers on each node",
    ):
        assert text in shown.stdout
    assert all(len(line) <= 100 for line in shown.stdout.splitlines() if str(shards) not in line)


def test_a_plan_for_programs(penstock: Run, shards: Path) -> None:
    size_bytes = Units.of(library.open(shards)).size_bytes
    result = json_of(penstock("plan", shards, "--batch-size", 4, "--disk", "/nvme:1MB", "--json"))
    assert result["size_bytes"] == result["held_bytes"] == result["bound_bytes"] == size_bytes
    assert result["first"]["bytes"]["store"] == size_bytes
    assert result["later"]["bytes"] == {"store": 0, "memory": 0, "disk": size_bytes, "peers": 0}
    nothing_held = json_of(penstock("plan", shards, "--batch-size", 4, "--json"))
    # Nothing is kept: samples are read alone, without the headers between them.
    assert nothing_held["store_bytes"] == 10 * library.open(shards).size_bytes


def test_a_measured_machine_is_believed(penstock: Run, shards: Path, tmp_path: Path) -> None:
    own = write_machine(tmp_path / "config" / "penstock" / "machine.toml")
    found = json_of(penstock("plan", shards, "--batch-size", 4, "--json"))
    assert str(own) in found["machine"]
    assert found["cache_bytes"] == 1_000
    assert found["first"]["bottleneck"] == "store"
    other = write_machine(tmp_path / "other.toml")
    words = ("plan", shards, "--batch-size", 4, "--json", "--machine", other, "--memory", "2kB")
    named = json_of(penstock(*words))
    assert named["cache_bytes"] == 2_000, "sizes that are given replace those of the file"


def test_many_nodes_and_training(penstock: Run, shards: Path) -> None:
    words = ("plan", shards, "--nodes", 2, "--ranks", 4, "--batch-size", 2, "--json")
    shared = json_of(penstock(*words, "--disk", "/nvme:1MB", "--compute", 10))
    alone = json_of(penstock(*words, "--disk", "/nvme:1MB", "--compute", 10, "--peers", "none"))
    assert alone["store_bytes"] > shared["store_bytes"]
    assert shared["first"]["bytes"]["peers"] == pytest.approx(shared["size_bytes"] / 2, abs=1)
    assert shared["later"]["bottleneck"] == "compute"
    assert shared["later"]["seconds"] == pytest.approx(1.0)
    assert any("read from each other" in change["what"] for change in alone["what_if"])


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--batch-size", "1000"], "global batch of 1000"),
        (["--memory", "much"], "'much' has no size"),
        (["--machine", "none.toml"], "penstock probe"),
        (["--nodes", "0"], "0 ranks on 0 nodes"),
        (["--nodes", "4", "--ranks", "2"], "2 ranks on 4 nodes"),
        (["--epochs", "0"], "at least 1"),
        (["--compute", "0"], "more than 0"),
    ],
)
def test_nonsense_is_refused(
    capsys: pytest.CaptureFixture[str], shards: Path, words: list[str], hint: str
) -> None:
    assert main(["plan", str(shards), *words]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("penstock: error: ")
    assert hint in shown.err
