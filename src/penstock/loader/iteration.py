"""One pass over the stream: owns the threads, hands over batches, moves the cursor."""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from penstock.errors import StateError
from penstock.loader.batch import Batch
from penstock.loader.convert import Convert
from penstock.loader.job import Slot
from penstock.loader.processes import ProcessPool
from penstock.loader.runner import Runner
from penstock.loader.stats import Counters
from penstock.trace import Kind, Recorder


class Iteration(Iterator[Any]):
    """What `iter(loader)` returns. Threads live exactly as long as it does."""

    def __init__(
        self,
        runner: Runner,
        counters: Counters,
        convert: Convert,
        *,
        delivered: Callable[[Slot], None],
        processes: ProcessPool | None,
        recorder: Recorder | None,
        holds: object = None,
    ) -> None:
        self._runner = runner
        self._holds = holds
        """What its threads use, for as long as they live: the loader may be gone before."""
        self._counters = counters
        self._convert = convert
        self._delivered = delivered
        self._recorder = recorder
        self._ready: deque[tuple[Slot, Any]] = deque()
        self._pid = os.getpid()
        self._began = time.perf_counter()
        # Runs when nobody holds this any more, at `close`, or when the interpreter ends.
        self._finalizer = weakref.finalize(
            self, _end, runner, processes, counters, self._began, self._pid
        )
        runner.start()

    @property
    def is_open(self) -> bool:
        """Whether threads are still there."""
        return self._finalizer.alive

    @property
    def running_s(self) -> float:
        """Seconds since it began; 0 once it is closed."""
        return time.perf_counter() - self._began if self.is_open else 0.0

    def __next__(self) -> Any:
        if os.getpid() != self._pid:
            raise StateError(
                "this iteration belongs to the process that started it; its threads do not exist "
                "in a forked one. Call iter(loader) in the process that needs the batches"
            )
        if not self._ready:
            self._take_job()
        slot, fields = self._ready.popleft()
        batch = self._batch(slot, fields)
        self._counters.samples += slot.num_counted
        self._counters.batches += 1
        self._delivered(slot)
        if self._recorder is not None:
            self._recorder.mark(Kind.DELIVER, epoch=slot.epoch, step=slot.step)
        return batch

    def _take_job(self) -> None:
        if not self.is_open:
            raise StopIteration
        begin = time.perf_counter_ns()
        try:
            job = self._runner.next()
        except BaseException:
            self.close()
            raise
        end = time.perf_counter_ns()
        self._counters.stall_s += (end - begin) / 1e9
        if self._recorder is not None:
            self._recorder.span(Kind.STALL, begin, end)
        if job is None:
            self.close()
            raise StopIteration
        self._ready.extend(zip(job.slots, job.results, strict=True))

    def _batch(self, slot: Slot, fields: Any) -> Any:
        if not isinstance(fields, Mapping):
            return fields  # The user's own collate decides what a batch is.
        convert = self._convert
        return Batch.of(
            {name: convert(value) for name, value in fields.items()},
            ids=convert(slot.ids),
            mask=convert(slot.mask),
            epoch=slot.epoch,
            step=slot.step,
            positions=slot.positions,
        )

    def close(self) -> None:
        """End all threads and processes."""
        self._ready.clear()
        self._finalizer()


def _end(
    runner: Runner,
    processes: ProcessPool | None,
    counters: Counters,
    began: float,
    pid: int,
) -> None:
    if os.getpid() != pid:
        return  # A forked child has none of these threads and processes.
    counters.elapsed_s += time.perf_counter() - began
    if processes is not None:
        processes.close()
    runner.stop()
