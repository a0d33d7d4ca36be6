"""Windows of draws during a run: losses come in, and later batches become known.

The order of importance sampling is known for the window that is trained on and for the next one.
Batches of later windows are not planned before the training process says that a window is over.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence

from penstock.engine.draw_summary import DrawSummary
from penstock.engine.job import BatchSlot
from penstock.engine.stream import BatchStream
from penstock.order.importance import (
    ImportanceCourse,
    ImportanceOrder,
    StepLosses,
    WindowDraws,
)
from penstock.order.importance.order import DELAY


class SharedCourse(ImportanceCourse):
    """A course that one thread plans from while another one brings losses."""

    def __init__(self, order: ImportanceOrder, window: int = 0) -> None:
        """Begin in a window, with nothing scored."""
        super().__init__(order, window)
        # Held while a window is drawn or closed: closing one changes the scores that the next is
        # drawn from. Reentrant, because closing one window draws another.
        self._lock = threading.RLock()

    def draws(self, window: int) -> WindowDraws:
        """Return the draws of a window, as `ImportanceCourse` does."""
        with self._lock:
            return super().draws(window)

    def observe(self, step: StepLosses) -> None:
        """Take the losses of a step, as `ImportanceCourse` does."""
        with self._lock:
            super().observe(step)

    def close_window(self) -> None:
        """Close a window, as `ImportanceCourse` does; also draw the one that becomes known."""
        with self._lock:
            super().close_window()
            self.draws(self.known_windows[-1])


class DrawnRun:
    """One run over an order that becomes known window by window."""

    def __init__(
        self,
        stream: BatchStream,
        start: tuple[int, int],
        end_epoch: int | None,
        known: Callable[[int | None], None],
        seen: DrawSummary,
    ) -> None:
        """`known` is a method that takes the number of batches that can be planned; None: all."""
        assert stream.course is not None
        self.course = stream.course
        self._known = weakref.WeakMethod(known)  # Else this would keep a run that is over.
        self._seen = seen
        self._ends = _ends(stream, start, end_epoch)
        self._next_end = next(self._ends, None)
        self._num_known = 0
        for window in self.course.known_windows:
            seen.add(self.course.draws(window))
        self._tell()

    def observed(self, steps: Sequence[StepLosses], *, closes_window: bool) -> None:
        """Take over losses; with the end of a window, another one becomes known."""
        for step in steps:
            self.course.observe(step)
        if closes_window:
            self.course.close_window()
            self._seen.add(self.course.draws(self.course.window + DELAY - 1))
            self._tell()

    def _tell(self) -> None:
        while self._next_end is not None and self.course.is_known(*self._next_end):
            self._num_known += 1
            self._next_end = next(self._ends, None)
        # After the last batch, None: else the runner would never look for the end of the run.
        known = self._known()
        if known is not None:
            known(None if self._next_end is None else self._num_known)


def _ends(
    stream: BatchStream, start: tuple[int, int], end_epoch: int | None
) -> Iterator[tuple[int, int]]:
    """Yield the epoch and the end position of each batch."""
    epoch, position = start
    while end_epoch is None or epoch < end_epoch:
        steps = stream.steps(position)
        for step in range(steps.num_steps):
            yield epoch, steps.bounds(step)[1]
        epoch, position = epoch + 1, 0


def known_slots(stream: BatchStream, epoch: int, position: int) -> Iterator[BatchSlot]:
    """Yield the batches from a place or from the present window on, as far as they are known.

    They may reach beyond the last epoch of the run; the next run uses those.
    """
    course, size = stream.course, stream.global_batch_size
    assert course is not None
    now, first, _ = course.order.span(course.window)
    if epoch < now:
        epoch, position = now, 0
    if epoch == now and position < first:
        position += -(-(first - position) // size) * size
    slots = stream.slots(epoch, min(position, stream.order.num_samples), None)
    for end in _ends(stream, (epoch, min(position, stream.order.num_samples)), None):
        # A slow caller may find that its window is over.
        is_past = course.order.window_at(end[0], end[1] - 1) < course.window
        if is_past or not course.is_known(*end):
            return
        yield next(slots)
