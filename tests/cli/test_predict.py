import json
from pathlib import Path

import pytest
from tests.report.model.torch_rows import torch_trace

from penstock.cli.main import main


def test_several_values_are_several_forecasts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch_trace(tmp_path / "run")
    assert main(["predict", str(tmp_path / "run"), "--workers", "2,4", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    two, four = said["forecasts"]
    assert (two["what_if"], four["what_if"]) == ({"workers": 2}, {"workers": 4})
    assert two["step_s"] > 1.5 * four["step_s"]
    assert two["step_s_low"] < two["step_s"] < two["step_s_high"]


def test_the_table_names_the_limit_and_what_is_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch_trace(tmp_path / "run", num_steps=60)
    words = ["predict", str(tmp_path / "run"), "--nodes", "1,64", "--store-bandwidth", "100MB"]
    assert main([*words, "--samples", "100000"]) == 0
    out = capsys.readouterr().out
    assert "all: store-bandwidth=100MB" in out
    assert "the limit is store, not latency" in out


def test_needs_are_those_that_end_the_stall(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch_trace(tmp_path / "run", num_steps=60)
    words = ["predict", str(tmp_path / "run"), "--samples", "10000", "--needs", "--json"]
    assert main(words) == 0
    needs = {n["resource"]: n for n in json.loads(capsys.readouterr().out)["needs"]}
    # A batch takes 80 ms to make and 10 ms to use: 8 workers, and a few more for the spread.
    assert 8 <= needs["workers"]["little_stall"] <= needs["workers"]["no_stall"] <= 14
    assert needs["cores"]["no_stall"] is None


def test_bad_values_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch_trace(tmp_path / "run", num_steps=20)
    assert main(["predict", str(tmp_path / "run"), "--nodes", "many"]) == 1
    assert "--nodes 'many' makes no sense" in capsys.readouterr().err
    assert main(["predict", str(tmp_path / "run"), "--store-latency", "20"]) == 1
    assert "20ms" in capsys.readouterr().err
    assert main(["predict", str(tmp_path / "nothing")]) == 1
