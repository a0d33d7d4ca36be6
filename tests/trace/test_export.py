"""Traces for other tools: every span arrives there, with its names and its place."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.cli.main import main
from penstock.errors import OptionError
from penstock.trace import Kind, Recorder, Trace, read_trace
from penstock.trace.export import spans_between


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of ten steps that a loader has recorded."""
    np.save(tmp_path / "rows.npy", np.zeros((4000, 4000), np.float32))
    dataset = penstock.open(tmp_path / "rows.npy")
    with penstock.Loader(dataset, batch_size=400, workers=1, trace=tmp_path / "run") as loader:
        for _ in loader:
            pass
    return tmp_path / "run"


def loaded(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def test_perfetto_gets_spans_names_arrows_and_curves(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.json.gz"
    assert main(["export", str(run), "--perfetto", str(path)]) == 0
    trace, events = read_trace(run), loaded(path)
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(trace.spans)
    assert sum(e["args"].get("count", 0) for e in spans if e["name"] == "next") == 4000
    fetched = [e for e in spans if e["name"] == "fetch"]
    assert {e["args"]["object"] for e in fetched} == {"rows.npy"}
    assert sum(e["args"]["size_bytes"] for e in fetched) == 4000 * 4000 * 4
    names = {e["args"]["name"].split(" (")[0] for e in events if e["name"] == "process_name"}
    assert {"rank 0 train", "rank 0 engine"} <= names
    assert any(e["name"] == "thread_name" for e in events)
    assert any(e["ph"] == "C" and e["name"] == "memory.rss_bytes" for e in events)
    assert_arrows(trace, events)


def assert_arrows(trace: Trace, events: list[dict[str, Any]]) -> None:
    """Fail unless each batch that was joined has an arrow to the `next` that took it."""
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert len(starts) == len(trace.of(Kind.JOIN))
    asked = [e for e in events if e["ph"] == "X" and e["name"] == "next"]
    for number, start in starts.items():
        end = ends[number]
        assert start["ts"] <= end["ts"]
        assert any(e["tid"] == end["tid"] and e["ts"] <= end["ts"] for e in asked)


def test_steps_cut_a_part_out(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "part.json.gz"
    assert main(["export", str(run), "--perfetto", str(path), "--steps", "3:5"]) == 0
    steps = [e["args"]["step"] for e in loaded(path) if e["ph"] == "X" and e["name"] == "next"]
    assert {3, 4} <= set(steps)
    assert not {0, 1, 7, 8} & set(steps)
    with pytest.raises(OptionError, match=r"no steps 20:30; it has 10"):
        spans_between(read_trace(run), (20, 30))
    assert main(["export", str(run), "--perfetto", str(path), "--steps", "5"]) == 1
    assert main(["export", str(run)]) == 1


def test_tables_have_a_row_for_each_span(run: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    feather = pytest.importorskip("pyarrow.feather")
    folder, file = tmp_path / "tables", tmp_path / "spans.arrow"
    assert main(["export", str(run), "--parquet", str(folder), "--arrow", str(file)]) == 0
    trace = read_trace(run)
    for table in (parquet.read_table(folder / "spans.parquet"), feather.read_table(file)):
        assert table.num_rows == len(trace.spans)
        rows = table.to_pydict()
        assert rows["start_ns"] == trace.spans["start_ns"].tolist()
        assert rows["object"] == trace.names_of(trace.spans["object"])
        assert rows["kind"] == [Kind(k).name.lower() for k in trace.spans["kind"].tolist()]
        assert set(rows["role"]) <= {"train", "engine", "worker"}
    counters = parquet.read_table(folder / "counters.parquet").to_pydict()
    assert "memory.rss_bytes" in counters["counter"]
    assert json.loads((folder / "facts.json").read_text())["0"]["loader"] == "penstock"


def test_ranks_of_two_machines_are_groups_of_their_own(tmp_path: Path) -> None:
    for rank in range(2):
        recorder = Recorder(tmp_path / "run", role="train", rank=rank)
        recorder.span(Kind.NEXT, 10, 20, step=0, epoch=0)
        recorder.close()
    path = tmp_path / "run.json.gz"
    assert main(["export", str(tmp_path / "run"), "--perfetto", str(path)]) == 0
    groups = {e["pid"] for e in loaded(path) if e["ph"] == "X"}
    assert len(groups) == 2


def test_a_place_that_cannot_be_written_is_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), "--perfetto", str(tmp_path / "missing" / "run.json")]) == 1
    assert "cannot be written: No such file or directory; name another" in capsys.readouterr().err
