"""Drives a flow in virtual time: tells it events, carries out its actions, wakes it when it asks.

The engine does the same with threads (`engine.fetcher`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from penstock.flow import Arrived, Begin, Event, Failed, Flow, Throttled, Tick
from penstock.flow.limit import MARKS_MAX
from penstock.simulate.virtual import Call

At = Callable[[float, Call], None]
"""Calls a function at a time."""


class FlowDriver:
    """Connects a flow with virtual devices."""

    def __init__(
        self, flow: Flow, *, now_s: Callable[[], float], at: At, begin: Callable[[Begin], None]
    ) -> None:
        self.flow = flow
        self._now_s, self._at, self._begin = now_s, at, begin
        self._events: deque[Event] = deque()
        self._wake_s = math.inf

    def tell(self, event: Event) -> None:
        """Tell the flow an event and carry out its actions.

        An action may cause another event before it returns. That event waits its turn here, because
        a flow must not be entered twice.
        """
        self._events.append(event)
        if len(self._events) > 1:
            return
        while self._events:
            for action in self.flow.on(self._events[0]):
                assert isinstance(action, Begin), f"the store was given up: {action}"
                self._begin(action)
            self._events.popleft()
        wake_s = self.flow.wake_s
        if wake_s is not None and wake_s < self._wake_s:
            self._wake_s = wake_s
            self._at(wake_s, self._wake)

    def arrived(self, begin: Begin, *, moved: bool = True, num_retries: int = 0) -> None:
        """Tell the flow that a request was answered, and how often its source refused it before."""
        now_s = self._now_s()
        for _ in range(min(num_retries, MARKS_MAX)):
            self.tell(Throttled(source=begin.source, at_s=now_s))
        self.tell(Arrived(number=begin.number, attempt=begin.attempt, at_s=now_s, moved=moved))

    def failed(self, begin: Begin) -> None:
        """Tell the flow that a source could not answer a request."""
        self.tell(Failed(number=begin.number, attempt=begin.attempt, at_s=self._now_s()))

    def _wake(self) -> None:
        if self._now_s() < self._wake_s:
            return
        self._wake_s = math.inf
        if self.flow.wake_s is not None:
            self.tell(Tick(at_s=self._now_s()))
