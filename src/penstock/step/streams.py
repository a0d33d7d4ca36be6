"""Order on a device: every lane has a stream, and events order tasks that depend on each other.

A host only launches work on a device, so a task that is over for the host may not have run on the
device. There it is ordered with everything else on its stream; a task that follows one of another
stream waits for the event (the mark) recorded behind it. Computation is on the stream that is
current where the step is called, so that the caller's work before and after is in order as well.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from penstock.step.program.plan import COMPUTE, Plan, Task

__all__ = ["StreamOrder", "Streams", "current_stream", "mark_of"]


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the current stream of a device."""
    # By its number: given a device, torch takes 20 µs.
    return torch.cuda.current_stream(device.index)


def mark_of(device: torch.device) -> torch.cuda.Event | None:
    """Return an event behind everything on the current stream so far; None on the host."""
    if device.type != "cuda":
        return None
    mark: torch.cuda.Event = current_stream(device).record_event()
    return mark


class Streams:
    """The streams of a step's lanes."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.device = device
        self.compute = current_stream(device)
        """The stream of computation, of the iteration under way."""
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
        """Keep a tensor's memory from being reused before all streams are done with it."""
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
        """Make a task's stream wait for what the task needs; return a context on that stream."""
        is_compute = task.lane == COMPUTE
        stream = self.compute if is_compute else self._streams.lanes[task.lane]
        if not is_compute and task.lane not in self._has_begun:
            self._has_begun.add(task.lane)
            # The caller's stream may still be writing inputs and states.
            stream.wait_event(self._begin)
        for name in task.after:
            where, event = self._marks.get(name, (stream, None))
            if event is not None and where != stream:
                stream.wait_event(event)
        return nullcontext() if is_compute else torch.cuda.stream(stream)

    def over(self, task: Task) -> None:
        """Record a mark behind a task, on the current stream."""
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
