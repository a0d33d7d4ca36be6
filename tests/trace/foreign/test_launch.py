"""Running a command under `penstock trace`: its status, its environment, its mistakes."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.cli.parser import parse
from penstock.errors import OptionError
from penstock.trace import read_trace
from penstock.trace.foreign.launch import TracedJob, run_job

CUSTOM = "import sys; sys.own_start_up = 'ran'"


def test_the_status_of_a_job_is_handed_on_and_its_start_up_file_still_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(CUSTOM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    program = "import sys; sys.exit(7 if sys.own_start_up == 'ran' else 8)"
    job = TracedJob(command=(sys.executable, "-c", program), folder=tmp_path / "run", view="python")
    assert run_job(job) == 7
    trace = read_trace(tmp_path / "run")
    [launcher] = trace.processes
    assert launcher.facts["command"].endswith(
        f"-c '{program}'".replace("'ran'", "'\"'\"'ran'\"'\"'")
    )
    counters = [values for _, values in launcher.counters]
    assert any("node.cores" in values for values in counters)
    with pytest.raises(OptionError, match="holds a trace already"):
        TracedJob(command=("true",), folder=tmp_path / "run")


def test_a_signal_is_handed_on(tmp_path: Path) -> None:
    program = (
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(3)); "
        "print('ready', flush=True); time.sleep(60)"
    )
    verb = [sys.executable, "-m", "penstock.cli.main", "trace", "--out", str(tmp_path / "run")]
    with subprocess.Popen(
        [*verb, "--with", "python", "--", sys.executable, "-c", program],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as launcher:  # fmt: skip
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "ready\n"
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(60) == 3


def test_a_command_that_cannot_run_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no command to trace"):
        TracedJob(command=(), folder=tmp_path / "run")
    with pytest.raises(OptionError, match="there is no program"):
        TracedJob(command=("no-such-program",), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_options_behind_the_dashes_are_the_jobs_own() -> None:
    _, args = parse(["trace", "--out", "r", "--", "python", "train.py", "--debug", "--out", "x"])
    assert args.command == ["python", "train.py", "--debug", "--out", "x"]
    assert args.out == "r"


def test_a_job_that_died_before_its_loop_is_not_taken_for_one_without_penstock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = "import os, sys; os.kill(os.getpid(), 9)"
    words = ["trace", "--with", "python", "--out", str(tmp_path / "run")]
    assert main([*words, "--", sys.executable, "-c", program]) == 128 + signal.SIGKILL
    said = capsys.readouterr().err
    assert "was ended by signal 9" in said
    assert "before its loop asked for a batch" in said
    assert "installed" not in said


def test_the_summary_of_penstocks_own_loader_has_its_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = (
        "import sys; from penstock.trace import Kind, Recorder; "
        "r = Recorder(sys.argv[1], role='train'); r.span(Kind.NEXT, 1, 2, count=1); "
        "r.span(Kind.FETCH, 1, 2, size_bytes=7000); r.span(Kind.READ, 1, 2, size_bytes=50); "
        "r.close()"
    )
    folder = str(tmp_path / "run")
    words = ["trace", "--with", "python", "--out", folder]
    assert main([*words, "--", sys.executable, "-c", program, folder]) == 0
    assert "1 batch, waited 0.0 s; 1 reads, 7 kB" in capsys.readouterr().err
