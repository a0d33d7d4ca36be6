"""Counters of processes and of the machine, once a second, from a thread beside the training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from penstock.trace.host import NodeCounters, process_counters
from penstock.trace.recorder import Recorder

EVERY_S = 1.0


class Sampler:
    """A thread that records counters until it is stopped."""

    def __init__(
        self,
        recorder: Recorder,
        pids: Callable[[], Iterable[int]],
        *,
        of_node: bool,
        every_s: float = EVERY_S,
    ) -> None:
        """`of_node`: of the machine, too; one process of each machine does that."""
        self._recorder = recorder
        self._pids = pids
        self._node = NodeCounters() if of_node else None
        self._every_s = every_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-sample", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Record once more, and end."""
        if not self._stopped.is_set():
            self._stopped.set()
            if threading.current_thread() is not self._thread:
                self._thread.join(self._every_s)

    def _run(self) -> None:
        while True:
            self.sample()
            if self._stopped.wait(self._every_s):
                self.sample()
                return

    def sample(self) -> None:
        """Record the counters as they are now."""
        for pid in self._pids():
            values = process_counters(pid)
            if values:
                self._recorder.counters(time.perf_counter_ns(), values, pid=pid)
        if self._node is not None:
            self._recorder.counters(time.perf_counter_ns(), self._node.read())
