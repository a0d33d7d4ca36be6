"""Operations of a step are counted: those that the job calls, not those that they call."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from penstock.trace.loop import LoopRecorder
from penstock.trace.operations import OperationCount
from penstock.trace.reading import read_trace
from penstock.trace.recorder import Recorder


def test_operations_of_some_steps_are_counted(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, role="train")
    count = OperationCount(recorder)
    layer, rows = torch.nn.Linear(4, 4), torch.zeros(2, 4)
    for step in range(9):
        count.got(step)
        assert torch._C._autograd._profiler_enabled() == (step == 7)
        for _ in range(10):
            rows = layer(rows)  # Calls transpose and addmm: one operation of the job all the same.
        count.ended()
    assert not torch._C._autograd._profiler_enabled()
    recorder.close()
    assert read_trace(tmp_path).facts()["ops_per_step"] == 10


def test_a_job_that_records_its_operations_is_left_alone(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, role="train")
    count = OperationCount(recorder)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        count.got(7)
        torch.zeros(3).tanh()
        count.ended()
    assert any(event.name == "aten::tanh" for event in own.events())
    recorder.close()
    assert "ops_per_step" not in read_trace(tmp_path).facts()


def test_a_job_that_begins_to_record_in_a_counted_step_is_not_disturbed(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, role="train")
    count = OperationCount(recorder)
    count.got(7)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        torch.zeros(3).tanh()
    count.ended()
    assert any(event.name == "aten::tanh" for event in own.events())
    count.got(23)
    torch.zeros(3)
    count.ended()
    recorder.close()
    assert read_trace(tmp_path).facts()["ops_per_step"] == 1


def test_a_loop_on_the_cpu_counts_its_operations(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, role="train")
    loop = LoopRecorder(recorder)
    now_ns = 0
    for step in range(9):
        loop.asked_at(now_ns)
        loop.took(now_ns, now_ns + 1_000_000, 1_000_000, (step, 0, 1, 0, 0))
        torch.zeros(3).add_(1)
        now_ns += 9_000_000
    loop.ended()
    assert not torch._C._autograd._profiler_enabled()
    recorder.close()
    assert read_trace(tmp_path).facts()["ops_per_step"] == 2
