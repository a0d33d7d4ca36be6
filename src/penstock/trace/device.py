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
"""Rows whose events are not read yet; a device that is further behind loses some."""
_SHORT_NS = 500_000
"""Two events take the host about 10 µs: steps shorter than this share a row."""
_NEAR_MS = 5_000.0
"""The device tells times in milliseconds, as numbers of 24 bits: only near ones are exact."""


@dataclass(kw_only=True)
class _StepEvents:
    number: int
    begun: Any
    begun_ns: int
    count: int = 0
    ended: Any = None
    asked_ns: int = 0


class DeviceTimes:
    """Records COMPUTE rows of a training loop on a CUDA device; does nothing without one."""

    def __init__(self, to: Any) -> None:
        self._recorder = to
        self._pending: deque[_StepEvents] = deque()
        self._origin: Any = None
        """An event; times of others are measured from it."""
        self._origin_ns = 0
        """When it happened on the host's clock: the latest bound that is known."""
        self._open: _StepEvents | None = None

    def got(self, step: int, now_ns: int) -> None:
        """Note that the loop has got a batch."""
        if self._open is None and (event := self._event()) is not None:
            self._open = _StepEvents(number=step, begun=event, begun_ns=now_ns)

    def waited(self) -> None:
        """Note that the loop waits since the last batch: what is open would hold the wait."""
        self._open = None

    def asked(self, now_ns: int) -> None:
        """Note that the loop asks for the next batch; record steps that are over."""
        step = self._open
        if step is None:
            return
        step.count += 1
        if now_ns - step.begun_ns < _SHORT_NS:
            return
        self._open = None
        step.ended, step.asked_ns = self._event(), now_ns
        if step.ended is not None and len(self._pending) < _PENDING_MAX:
            self._pending.append(step)
        self.record_finished()

    def record_finished(self) -> None:
        """Record steps that are over on the device."""
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

    def _record(self, step: _StepEvents) -> None:
        begun_ms = self._origin.elapsed_time(step.begun)
        begun_ns = int(begun_ms * 1e6)
        took_ns = int(step.begun.elapsed_time(step.ended) * 1e6)
        self._origin_ns = max(self._origin_ns, step.asked_ns - begun_ns - took_ns)
        start_ns = self._origin_ns + begun_ns
        self._recorder.span(
            Kind.COMPUTE, start_ns, start_ns + took_ns, step=step.number, count=step.count
        )
        if begun_ms > _NEAR_MS:
            self._origin, self._origin_ns = step.begun, start_ns
