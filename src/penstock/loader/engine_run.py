"""One iteration whose batches an engine in its own process makes.

If the engine dies, another one goes on behind the last batch that was taken.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from penstock.engine.channel import ChannelClosed
from penstock.engine.engine import RunStart
from penstock.engine.job import BatchSlot, batches_of
from penstock.engine.messages import LossNotice, MadeBatches
from penstock.engine.process_errors import unpacked_error
from penstock.errors import EngineError
from penstock.loader.engine_client import EngineClient
from penstock.order.importance import StepLosses

_DEATHS_MAX = 5
_DEATHS_S = 3600.0
"""An iteration survives this many deaths of its engine within this time."""
_log = logging.getLogger("penstock.loader")


Scores = Callable[[Callable[[], None]], Mapping[str, Any]]
"""Returns the present scores, for an order that depends on losses. Its argument is called under the
lock of the scores and clears the losses that are still to be told: the scores contain them."""


class EngineRun:
    """One iteration of an engine in its own process."""

    def __init__(self, client: EngineClient, start: RunStart, scores: Scores | None = None) -> None:
        self._client = client
        self._scores = scores
        self._start = start
        self._num_delivered = 0
        self._cursor: tuple[int, int] | None = None
        self._deaths: deque[float] = deque(maxlen=_DEATHS_MAX)
        """Times at which engines of this iteration died."""
        self._num_taken = 0
        """Batches of the latest message; the engine is told with the next `receive`."""
        self._waited_before_s = client.waited_s
        self.sent_bytes = 0
        self.decode_ns = (0, 0)
        self.made_bytes = 0
        self._is_stopped = False
        with client.beginning:
            self._number = self._begin()

    def next(self) -> list[tuple[BatchSlot, Any]] | None:
        """Return the next batches, or None when there are no more."""
        made = self._made()
        self._num_taken = 0
        if made.error is not None:
            raise unpacked_error(made.error)
        if made.slots is None or made.data is None:
            return None
        slots = made.slots.slots()
        self._num_taken = len(slots)
        self._num_delivered += len(slots)
        self._cursor = slots[-1].cursor_after
        self.sent_bytes += len(made.data)
        self.decode_ns = made.decode_ns
        self.made_bytes = made.size_bytes
        return batches_of(slots, self._client.opened(made))

    def _made(self) -> MadeBatches:
        """Return the next message; if the engine dies, that of another engine."""
        while True:
            try:
                return self._client.receive(self._number, taken=self._num_taken, wait_s=self.wait_s)
            except ChannelClosed:
                if not self._begin_again():
                    return MadeBatches(run=self._number)

    def _begin_again(self) -> bool:
        """Go on with another engine after the death of this one; False if the run was stopped."""
        begin_s = time.perf_counter()
        with self._client.beginning:
            if not self._is_stopped:
                self._take_note_of_death()
                self._num_taken = 0
                self._number = self._begin()
        self._client.waited_s += time.perf_counter() - begin_s
        if self._is_stopped:
            self._end()  # The new run may have begun after `stop` ended the old one.
        return not self._is_stopped

    def _begin(self) -> int:
        """Begin behind the last batch, with the present engine or a new one."""
        span = self._start.span
        if self._num_delivered and span.part == (0, 1) and self._cursor is not None:
            span = replace(span, start=self._cursor)
        elif self._num_delivered:
            span = replace(span, skip=self._num_delivered)
        while True:
            try:
                scores = None
                if self._scores is not None:
                    scores = self._scores(self._client.losses.clear)
                return self._begin_at(replace(self._start, span=span, scores=scores))
            except ChannelClosed:
                if self._is_stopped:
                    return self._number
                self._take_note_of_death()

    def _begin_at(self, start: RunStart) -> int:
        return self._client.begin_at(start)

    def _take_note_of_death(self) -> None:
        story, now_s = self._client.died(), time.monotonic()
        is_often = len(self._deaths) == _DEATHS_MAX and now_s - self._deaths[0] < _DEATHS_S
        if is_often:
            raise EngineError(
                f"{story}, the {_DEATHS_MAX + 1}th within an hour; a file that is cut off while it "
                "is read, too little memory and faults of native libraries do that"
            )
        self._deaths.append(now_s)
        epoch, position = self._cursor or self._start.span.start
        sentence = f"{story}; another goes on at epoch {epoch}, position {position:,}"
        self._client.events.append(sentence)
        _log.warning("%s", sentence)

    @property
    def wait_s(self) -> float:
        """Time that was spent waiting for the engine."""
        return self._client.waited_s - self._waited_before_s

    @property
    def cpu_s(self) -> float:
        """0: the run has no thread in this process."""
        return 0.0

    def observed(self, steps: Sequence[StepLosses], closes_window: bool) -> None:
        """Tell the engine about losses with the next batch; at once if a window is over."""
        self._client.losses.append(LossNotice(steps, closes_window))
        if closes_window:
            # At once, because the engine cannot plan beyond the window, and the loop may still have
            # several batches of the latest message to use before it asks again.
            with suppress(ChannelClosed):  # The next batch finds the engine dead.
                self._client.tell(self._number, 0, wait_s=self.wait_s)

    def stop(self) -> None:
        """End the iteration."""
        self._is_stopped = True  # First: the end wakes a waiting thread, which looks at this.
        self._end()

    def _end(self) -> None:
        self._client.end(self._number)
