"""penstock probe: the table, the file, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock as library
from penstock.cli import probe
from penstock.cli.main import main
from penstock.machine import load_machine
from penstock.simulate.probe import Effort

Run = Callable[..., subprocess.CompletedProcess[str]]

TINY = Effort(
    copy_s=0.02,
    memory_s=0.03,
    disk_s=0.05,
    store_s=0.1,
    decode_s=0.03,
    repeats=1,
    working_set_bytes=4 << 20,
    file_bytes_max=4 << 20,
    store_bytes_max=8 << 20,
    in_flight_max=4,
)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make --quick quicker: what is shown does not depend on how exact it is."""
    monkeypatch.setattr(probe, "QUICK", TINY)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("quick")
def test_a_table_is_shown_and_a_machine_written(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library.open(shards)
    (tmp_path / "disk").mkdir()
    words = ["probe", str(shards), "--disk", f"{tmp_path / 'disk'}:80%", "--quick", "--link", "3GB"]
    assert main(words) == 0
    shown = capsys.readouterr()
    for word in (
        "Copies in memory",
        "Memory tier",
        "Disk tier",
        "requests in flight",
        "largest useful number in flight",
        "Decoding",
        "samples/s",
        "█",
    ):
        assert word in shown.out
    assert shown.err == ""
    lines = [line for line in shown.out.splitlines() if str(tmp_path) not in line]
    assert max(map(len, lines)) <= 80
    path = tmp_path / "config" / "penstock" / "machine.toml"
    assert f"written to {path}" in shown.out
    machine = load_machine(path)
    assert machine.link.bytes_s == 3e9
    assert machine.notes["command"].startswith(f"penstock probe {shards} --disk")
    assert "host" not in machine.notes
    assert list((tmp_path / "disk").iterdir()) == []


@pytest.mark.usefixtures("quick")
def test_for_programs_and_with_the_name_of_the_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "node.toml"
    output.write_text("what was there before")
    words = ["probe", "--quick", "--json", "--notes", "--output", str(output)]
    assert main(words) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["path"] == str(output)
    assert result["machine"]["notes"]["host"] == os.uname().nodename
    assert result["machine"]["store"]["throughput"]["counts"][0] == 1
    assert (result["in_flight"], result["store_read_bytes"]) == (None, 0)
    assert load_machine(output).notes == result["machine"]["notes"]
    assert not (tmp_path / "config").exists()


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["nowhere"], "nowhere"),
        (["--disk", "nowhere:1GB"], "nowhere does not exist"),
        (["--disk", "/sys/kernel:1GB"], "may write to"),
        (["--link", "fast"], "is not a size"),
        (["--link", "0"], "carries nothing"),
        (["--output", "/"], "is a folder"),
        (["s3://bucket/x/", "--endpoint", "localhost"], "http://"),
    ],
)
@pytest.mark.usefixtures("quick")
def test_bad_input_is_a_sentence_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], hint: str
) -> None:
    assert main(["probe", "--quick", *words]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("penstock: error: ")
    assert hint in shown.err
    assert not (tmp_path / "config").exists()


def test_an_interrupt_leaves_no_file(environment: dict[str, str], tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    # The process says when it begins with the disk; then comes the Ctrl-C.
    code = (
        "import sys\n"
        "from penstock.cli import probe\n"
        "from penstock.cli.main import main\n"
        "probe._report = lambda words: print(words, flush=True)\n"
        f"sys.exit(main(['probe', '--quick', '--disk', {f'{disk}:80%'!r}, '--output', 'm.toml']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    assert process.stdout is not None
    assert any(str(disk) in line for line in process.stdout)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert (process.returncode, said) == (130, "penstock: interrupted\n")
    assert list(disk.iterdir()) == []
    assert not (tmp_path / "m.toml").exists()
