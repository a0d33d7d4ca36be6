"""`penstock analyze`, as its users see it."""

import json
from pathlib import Path

import pytest
from tests.report.made_runs import MadeRun, made_trace

from penstock.cli.main import main


def test_the_method_is_walked_step_by_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_trace(tmp_path / "real", MadeRun(workers=1, read_ms=20, decode_ms=5, compute_ms=10))
    windows = MadeRun(decode_ms=2, compute_ms=10, resident_compute_ms=8, window=15)
    made_trace(tmp_path / "windows", windows)
    assert main(["analyze", str(tmp_path / "real"), "--against", str(tmp_path / "windows")]) == 0
    shown = capsys.readouterr().out
    titles = ("Question", "Parameters", "Phases", "pattern", "Where", "differential", "Scaling")
    places = [shown.index(title) for title in (*titles, "Verdict", "Advice")]
    assert places == sorted(places)
    assert "Input-bound" in shown
    assert main(["analyze", str(tmp_path / "real"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"]["cause"] == "slow-disk"
    assert "steps" not in found


def test_a_folder_without_a_trace_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["analyze", str(tmp_path)]) == 1
    assert "holds no trace" in capsys.readouterr().err
