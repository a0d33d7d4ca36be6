"""What the device did in a step, from CUDA events that nobody waits for.

An event is recorded on the current stream when the loop gets a batch, and another when it asks for
the next one. They are read steps later, when they have long passed, so the host never waits. An
event happens no earlier than the host recorded it, and at that very time if the stream was idle:
the latest of these bounds puts the device's clock on the host's.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass
from typing import Any

from penstock.trace.schema import Kind

_PENDING_MAX = 64
"""Steps whose events are not read yet; a device that is further behind loses some."""


@dataclass(kw_only=True)
class _Step:
    number: int
    begun: Any
    ended: Any = None
    asked_ns: int = 0


class DeviceTimes:
    """Records COMPUTE rows of a training loop on a CUDA device; does nothing without one."""

    def __init__(self, to: Any) -> None:
        self._recorder = to
        self._pending: deque[_Step] = deque()
        self._origin: Any = None
        """The first event; times of others are measured from it."""
        self._origin_ns = 0
        """When it happened on the host's clock: the latest bound that is known."""
        self._open: _Step | None = None

    def got(self, step: int) -> None:
        """Take note that the loop has got a batch."""
        event = self._event()
        if event is not None:
            self._open = _Step(number=step, begun=event)

    def asked(self, now_ns: int) -> None:
        """Take note that the loop asks for the next batch; record steps that are over."""
        if self._open is None:
            return
        step, self._open = self._open, None
        step.ended, step.asked_ns = self._event(), now_ns
        if step.ended is not None and len(self._pending) < _PENDING_MAX:
            self._pending.append(step)
        while self._pending and self._pending[0].ended.query():
            self._record(self._pending.popleft())

    def _event(self) -> Any:
        torch: Any = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        if self._origin is None:
            self._origin = event
        return event

    def _record(self, step: _Step) -> None:
        begun_ns = int(self._origin.elapsed_time(step.begun) * 1e6)
        ended_ns = int(self._origin.elapsed_time(step.ended) * 1e6)
        self._origin_ns = max(self._origin_ns, step.asked_ns - ended_ns)
        self._recorder.span(
            Kind.COMPUTE,
            self._origin_ns + begun_ns,
            self._origin_ns + ended_ns,
            step=step.number,
            count=1,
        )
