"""Order on a device: every lane has a stream, and events stand between tasks that depend.

A host only asks a device for work, so that a task is over for the host says nothing about the
device. There it is in order with what else is on its stream; a task that follows one of another
stream waits for the mark that was left behind it. Computation is on the stream that is current
where the step is called, so that what the caller does before and after is in order as well.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from penstock.step.program.plan import COMPUTE, Plan, Task

__all__ = ["StreamOrder", "Streams", "current_stream", "mark_of"]


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that is current. Asked by device and not by number, torch takes 20 µs."""
    return torch.cuda.current_stream(device.index)


def mark_of(device: torch.device) -> torch.cuda.Event | None:
    """Return a mark of what the current stream has been asked so far; None on the host."""
    if device.type != "cuda":
        return None
    mark: torch.cuda.Event = current_stream(device).record_event()
    return mark


class Streams:
    """The streams of a step's lanes."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.device = device
        self.compute = current_stream(device)
        """Of the iteration that is under way."""
        self.lanes = {
            lane: torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for lane in plan.lanes
            if lane != COMPUTE
        }
        lanes = {task.name: task.lane for task in plan.tasks}
        self.awaited = frozenset(
            name for task in plan.tasks for name in task.after if task.lane != lanes[name]
        )
        """Tasks that another lane waits for."""

    def keep(self, tensor: torch.Tensor) -> None:
        """Let nobody have a tensor's memory before the streams are done with it."""
        for stream in (self.compute, *self.lanes.values()):
            tensor.record_stream(stream)


class StreamOrder:
    """The order of one iteration's tasks."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.compute = streams.compute = current_stream(streams.device)
        self._begin = self.compute.record_event()
        self._has_begun: set[str] = set()
        self._marks: dict[str, tuple[torch.cuda.Stream, torch.cuda.Event]] = {}
        self._last: dict[int, torch.cuda.Event] = {}

    def on(self, task: Task) -> AbstractContextManager[object]:
        """Make a task's stream wait for what the task needs; return the stream, to be entered."""
        is_compute = task.lane == COMPUTE
        stream = self.compute if is_compute else self._streams.lanes[task.lane]
        if not is_compute and task.lane not in self._has_begun:
            self._has_begun.add(task.lane)
            stream.wait_event(self._begin)
        for name in task.after:
            where, event = self._marks.get(name, (stream, None))
            if event is not None and where != stream:
                stream.wait_event(event)
        return nullcontext() if is_compute else torch.cuda.stream(stream)

    def over(self, task: Task) -> None:
        """Leave a mark behind a task, on the stream that is current."""
        if task.lane == COMPUTE and task.name not in self._streams.awaited:
            return
        stream = current_stream(self._streams.device)
        event = stream.record_event()
        self._marks[task.name] = stream, event
        if stream != self.compute:
            self._last[stream.cuda_stream] = event

    def end(self) -> None:
        """Make the caller's stream wait for all others."""
        for event in self._last.values():
            self.compute.wait_event(event)
