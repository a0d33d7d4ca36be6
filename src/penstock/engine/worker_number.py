"""The number of workers of a loader: measured once a second, decided by `flow.worker_count`."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.engine.workers import Workers
from penstock.flow.worker_count import WorkerCount, WorkerLimits, WorkInterval

_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopTimes:
    """Waits and batches of the training loop so far."""

    wait_s: float
    num_batches: int


class WorkerCountControl:
    """Adapts the number of workers while an iteration runs."""

    def __init__(self, workers: Workers, *, most: int, told: Callable[[], LoopTimes]) -> None:
        self._workers = workers
        self._told = told
        self._count = WorkerCount(WorkerLimits.of_cores(most))
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-count", daemon=True)

    def start(self) -> None:
        """Begin with a number that is rather too high, and adapt it from now on."""
        self._workers.resize(self._count.target)
        self._thread.start()

    def stop(self) -> None:
        """Leave the number as it is."""
        self._stopped.set()

    def _run(self) -> None:
        before = self._look()
        while not self._stopped.wait(_INTERVAL_S):
            now = self._look()
            seconds = now.at_s - before.at_s
            num_workers = max(1, self._workers.num_alive)
            seen = WorkInterval(
                num_workers=self._workers.num_alive,
                seconds=seconds,
                wait_share=min(1.0, (now.loop.wait_s - before.loop.wait_s) / seconds),
                busy_share=min(1.0, (now.busy_s - before.busy_s) / (seconds * num_workers)),
                idle_cores=max(0.0, (now.idle_s - before.idle_s) / seconds),
                num_batches=float(now.loop.num_batches - before.loop.num_batches),
            )
            target = self._count.on(seen)
            if target != self._workers.num_workers:
                self._workers.resize(target)
            before = now

    def _look(self) -> _WorkerReading:
        return _WorkerReading(
            at_s=time.monotonic(),
            loop=self._told(),
            busy_s=self._workers.busy_s,
            idle_s=idle_s(os.sched_getaffinity(0)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _WorkerReading:
    """The measurements of one moment."""

    at_s: float
    loop: LoopTimes
    busy_s: float
    idle_s: float


def idle_s(cores: set[int]) -> float:
    """Return the idle time of some cores since the machine began, summed."""
    ticks = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *numbers = line.split()
        if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in cores:
            ticks += int(numbers[3]) + int(numbers[4])  # Idle, and waiting for a device.
    return ticks / os.sysconf("SC_CLK_TCK")
