"""The recorder: spans and marks of one process."""

from __future__ import annotations

import gzip
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

_EVENTS_MAX = 1_000_000


class Kind(StrEnum):
    """The vocabulary: what can be seen in a trace."""

    PLAN = "plan"
    """Finding out which samples a batch holds and where they lie."""
    FETCH = "fetch"
    """One read from a store."""
    WORK = "work"
    """Reading, decoding and transforming some samples of a batch."""
    FINISH = "finish"
    """Joining the pieces of a batch."""
    STALL = "stall"
    """The training loop waits for a batch."""
    DELIVER = "deliver"
    """A batch is handed over."""


class Recorder:
    """Keeps the latest events; safe to use from many threads."""

    def __init__(self, events_max: int = _EVENTS_MAX) -> None:
        # A bounded deque appends atomically: no lock on the hot path.
        self._events: deque[tuple[Kind, int, int, int, dict[str, Any]]] = deque(maxlen=events_max)

    def __len__(self) -> int:
        return len(self._events)

    def span(self, kind: Kind, start_ns: int, end_ns: int, **facts: Any) -> None:
        """Write down that something took from `start_ns` to `end_ns` (perf_counter_ns)."""
        self._events.append((kind, start_ns, end_ns, threading.get_ident(), facts))

    def mark(self, kind: Kind, **facts: Any) -> None:
        """Write down that something happened now."""
        now = time.perf_counter_ns()
        self._events.append((kind, now, now, threading.get_ident(), facts))

    def events(self) -> list[dict[str, Any]]:
        """Return all events in the form of the Chrome trace format."""
        pid = os.getpid()
        out: list[dict[str, Any]] = []
        for kind, start, end, thread, facts in list(self._events):
            event = {"name": str(kind), "pid": pid, "tid": thread, "ts": start / 1e3, "args": facts}
            event |= (
                {"ph": "X", "dur": (end - start) / 1e3} if end > start else {"ph": "i", "s": "t"}
            )
            out.append(event)
        return out

    def write(self, path: str | Path, others: Sequence[dict[str, Any]] = ()) -> None:
        """Write the trace, with events of other processes; a name that ends with `.gz` is
        compressed. Open it in Perfetto."""
        events = [*self.events(), *others]
        data = msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})
        data = gzip.compress(data, 1) if str(path).endswith(".gz") else data
        Path(path).write_bytes(data)
