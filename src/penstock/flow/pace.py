"""How fast steps are used up, when a step will be needed, and how far ahead that asks us to be.

A consumer's own pace is the time between two steps less the time it spent waiting for us: a stall
must not look like a slow consumer, or the flow would slow down because it was slow.
"""

from __future__ import annotations

from collections import deque

_GAIN = 0.1
_INTERVALS = 16
"""Steps that the pace is taken from. The longest of them is left out: a checkpoint or a validation
is a pause, not the pace; steps that are longer again and again (an optimizer step after every few
batches) do count."""
_STEP_S_MIN = 1e-6

GENEROUS = 3.0
"""The look-ahead is this many times what a bad moment needs: memory within the budget costs
nothing, a stall does."""
DEPTH_S_MIN = 1.0
"""Seconds of look-ahead, however steady the source has been so far: it may stall for the first
time."""
STEPS_MIN = 4
"""Steps of look-ahead, however fast the source and slow the consumer."""


class StepPace:
    """The consumer, as its batches being taken show it."""

    def __init__(self) -> None:
        self.last_step = -1
        self.waiting_step: int | None = None
        self.step_s: float | None = None
        """Seconds that the consumer needs for a step by itself; None before two were taken."""
        self.bytes_per_step = 0.0
        self._intervals: deque[float] = deque(maxlen=_INTERVALS)
        self._last_at_s: float | None = None
        self._waiting_since_s = 0.0
        self._stalled_s = 0.0

    def waiting(self, step: int, at_s: float) -> None:
        """Note that the consumer has begun to wait for a step."""
        if self.waiting_step is None:
            self._waiting_since_s = at_s
        self.waiting_step = step

    def consumed(self, step: int, at_s: float, size_bytes: int) -> None:
        """Note that the consumer has taken the batches up to a step, with so many bytes."""
        if self.waiting_step is not None:
            self._stalled_s += at_s - self._waiting_since_s
            self.waiting_step = None
        num_steps = step - self.last_step
        if num_steps < 1:
            return
        if self._last_at_s is not None:
            self._learn((at_s - self._last_at_s - self._stalled_s) / num_steps)
        gain = _GAIN if self.bytes_per_step else 1.0
        self.bytes_per_step += gain * (size_bytes / num_steps - self.bytes_per_step)
        self._last_at_s, self.last_step, self._stalled_s = at_s, step, 0.0

    def needed_s(self, step: int, now_s: float) -> float:
        """Return when a step will be needed, if nothing delays the consumer until then."""
        step_s = self.step_s or 0.0
        if self.waiting_step is not None:
            return now_s + max(0, step - self.waiting_step) * step_s
        if self._last_at_s is None:
            return now_s
        return max(self._last_at_s + (step - self.last_step) * step_s, now_s)

    def waited_s(self, now_s: float) -> float:
        """Return for how long the consumer has been waiting; 0 if it is not."""
        return now_s - self._waiting_since_s if self.waiting_step is not None else 0.0

    @property
    def steps_s(self) -> float:
        """Steps a second that the consumer would take if it never waited; 0 if not known."""
        return 1 / self.step_s if self.step_s else 0.0

    def _learn(self, interval_s: float) -> None:
        intervals = self._intervals
        intervals.append(max(interval_s, _STEP_S_MIN))
        if len(intervals) > 2:
            self.step_s = (sum(intervals) - max(intervals)) / (len(intervals) - 1)
        else:
            self.step_s = min(intervals)


def depth_bytes(
    pace: StepPace, *, tail_s: float, source_bytes_s: float, in_flight_bytes: float
) -> float:
    """Return how many bytes should be planned beyond the last step taken.

    A step does not stall when it was asked for one bad latency and one batch's transfer before its
    time. What is used up in that time is the need, at the consumer's own pace, or at the source's
    where that is slower: more could not be brought anyway. Beside that, enough must be planned to
    keep the requests in flight busy twice over.
    """
    step_bytes = pace.bytes_per_step
    batch_s = step_bytes / source_bytes_s if source_bytes_s > 0 else 0.0
    used_s = step_bytes * pace.steps_s
    rate = min(used_s, source_bytes_s) if used_s and source_bytes_s else max(used_s, source_bytes_s)
    need = max(GENEROUS * (tail_s + batch_s), DEPTH_S_MIN) * rate
    return max(need, STEPS_MIN * step_bytes, 2 * in_flight_bytes)
