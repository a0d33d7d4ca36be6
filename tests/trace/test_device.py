"""What the device did in a step, from events: on a device whose clock is scripted."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.trace import Kind, Recorder, read_trace
from penstock.trace.device import DeviceTimes


class Device:
    """A device that works on what it is given in order, and an event's view of it."""

    def __init__(self) -> None:
        self.host_ms = 0.0
        self.busy_until_ms = 0.0

    def launch(self, takes_ms: float) -> None:
        self.busy_until_ms = max(self.busy_until_ms, self.host_ms) + takes_ms

    def event(self, enable_timing: bool) -> Any:
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self._device, self.at_ms = device, -1.0

    def record(self) -> None:
        self.at_ms = max(self._device.busy_until_ms, self._device.host_ms)

    def query(self) -> bool:
        return self.at_ms <= self._device.host_ms

    def elapsed_time(self, other: "Event") -> float:
        return other.at_ms - self.at_ms


@pytest.mark.parametrize(("launch_ms", "compute_ms"), [(2.0, 30.0), (30.0, 2.0)])
def test_a_step_is_as_long_as_the_device_worked_and_where_it_worked(
    launch_ms: float, compute_ms: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device()
    cuda = SimpleNamespace(is_initialized=lambda: True, Event=device.event)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    recorder = Recorder(tmp_path, role="train")
    times = DeviceTimes(recorder)
    asked_ms = []
    for step in range(20):
        times.got(step, int(device.host_ms * 1e6))
        device.launch(compute_ms)
        device.host_ms += launch_ms
        asked_ms.append(device.host_ms)
        times.asked(int(device.host_ms * 1e6))
    recorder.close()
    rows = read_trace(tmp_path).of(Kind.COMPUTE)
    took_ms = max(launch_ms, compute_ms)
    # The first event of all is recorded when the device is idle; all others follow from it.
    assert rows["duration_ns"][1:] / 1e6 == pytest.approx(took_ms, rel=0.01)
    if compute_ms > launch_ms:
        assert len(rows) < 20, "the device is behind: its last steps are not over"
    else:
        assert len(rows) == 20


def test_a_step_after_hours_is_as_exact_as_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device()

    def elapsed(self: Event, other: Event) -> float:
        return float(np.float32(other.at_ms - self.at_ms))  # As CUDA tells it.

    monkeypatch.setattr(Event, "elapsed_time", elapsed)
    cuda = SimpleNamespace(is_initialized=lambda: True, Event=device.event)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    recorder = Recorder(tmp_path, role="train")
    times = DeviceTimes(recorder)
    for step in range(40):
        times.got(step, int(device.host_ms * 1e6))
        device.launch(1.25)
        device.host_ms += 2.0
        times.asked(int(device.host_ms * 1e6))
        device.host_ms += 3_600_000.0
    recorder.close()
    rows = read_trace(tmp_path).of(Kind.COMPUTE)
    assert rows["duration_ns"][1:] / 1e6 == pytest.approx(2.0, rel=1e-6)
    gaps_ns = np.diff(rows["start_ns"][2:])
    assert gaps_ns == pytest.approx(3_600_002e6, abs=0.3e6)  # An hour has 2 ** 32 steps of a clock.
