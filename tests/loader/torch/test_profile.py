"""The loader in a real profile of torch.profiler."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

import penstock
from penstock.errors import OptionError
from penstock.torch import merge_profile
from penstock.trace import Kind, read_trace, recorder_of
from penstock.trace.recorder import close_recorders


@pytest.fixture
def rows(tmp_path: Path) -> penstock.Dataset:
    np.save(tmp_path / "rows.npy", np.ones((256, 8), np.float32))
    return penstock.open(str(tmp_path / "rows.npy"))


def events_of(path: Path, name: str) -> list[dict[str, Any]]:
    found = json.loads(path.read_text())["traceEvents"]
    # A file lists them by track, and spans of one thread may lie on several tracks.
    named = [e for e in found if e.get("ph") == "X" and e["name"] == name]
    return sorted(named, key=lambda e: e["ts"])


def test_next_and_copy_are_ranges_of_a_profile(rows: penstock.Dataset, tmp_path: Path) -> None:
    loader = penstock.Loader(rows, batch_size=64, workers="here")
    with loader, profile(activities=[ProfilerActivity.CPU]) as prof:
        for batch in loader:
            batch.to("cpu")
    prof.export_chrome_trace(str(tmp_path / "profile.json"))
    copies = events_of(tmp_path / "profile.json", "penstock.copy")
    # The last `next` finds no batch: it is the end.
    assert len(events_of(tmp_path / "profile.json", "penstock.next")) == 5
    assert len(copies) == 4
    for batch in penstock.Loader(rows, batch_size=64, workers="here"):
        assert isinstance(batch["data"], torch.Tensor)  # No profiler: no range, the same batches.


def test_spans_of_other_processes_lie_where_they_were_in_the_profile(
    rows: penstock.Dataset, tmp_path: Path
) -> None:
    run, path = tmp_path / "run", tmp_path / "profile.json"
    recorder = recorder_of(run, role="train", rank=0)
    loader = penstock.Loader(rows, batch_size=64, workers=1, trace=run)
    with loader, profile(activities=[ProfilerActivity.CPU]) as prof:
        for _ in loader:
            with record_function("both"):  # The same time by both clocks.
                begin_ns = time.perf_counter_ns()
                time.sleep(0.002)
                recorder.span(Kind.CHECKPOINT, begin_ns, time.perf_counter_ns())
    close_recorders()
    prof.export_chrome_trace(str(path))
    merged = merge_profile(path, run)
    assert merged == tmp_path / "profile.penstock.json"
    theirs, ours = events_of(merged, "both"), events_of(merged, "penstock.checkpoint")
    assert len(theirs) == len(ours) == 4
    # The median: on a busy machine either thread may lose its core between the two clocks.
    apart_us = [abs(one["ts"] - other["ts"]) for one, other in zip(theirs, ours, strict=True)]
    assert np.median(apart_us) < 1000
    pids = {process.role: process.pid for process in read_trace(run).processes}
    assert {e["pid"] for e in events_of(merged, "penstock.plan")} == {pids["engine"]}
    assert pids["engine"] != pids["train"]


def test_spans_that_overlap_stand_on_tracks_of_their_own(tmp_path: Path) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        recorder = recorder_of(tmp_path / "run", role="train", rank=0)
        now_ns = time.perf_counter_ns()
        torch.ones(3).sum()
        recorder.span(Kind.FETCH, now_ns, now_ns + 1000)
        recorder.span(Kind.FETCH, now_ns + 500, now_ns + 1500)
        recorder.span(Kind.FETCH, now_ns + 1000, now_ns + 2000)
    close_recorders()
    prof.export_chrome_trace(str(tmp_path / "profile.json"))
    merged = merge_profile(tmp_path / "profile.json", tmp_path / "run", tmp_path / "out.json")
    tracks = [e["tid"] for e in events_of(merged, "penstock.fetch")]
    assert len(tracks) == 3
    assert len(set(tracks)) == 2


def test_a_profile_of_another_job_is_refused(tmp_path: Path) -> None:
    recorder_of(tmp_path / "run", role="train", rank=0).mark("here")
    close_recorders()
    other = {"traceEvents": [{"ph": "X", "pid": -1, "tid": 1, "ts": 1.0, "dur": 1.0, "name": "a"}]}
    (tmp_path / "profile.json").write_text(json.dumps(other))
    with pytest.raises(OptionError, match="0 ranks of the run"):
        merge_profile(tmp_path / "profile.json", tmp_path / "run")
    (tmp_path / "empty.json").write_text('{"traceEvents": []}')
    with pytest.raises(OptionError, match="no events"):
        merge_profile(tmp_path / "empty.json", tmp_path / "run")
