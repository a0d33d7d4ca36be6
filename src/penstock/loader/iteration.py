"""One pass over the stream: hands over batches, counts them, moves the cursor."""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from penstock.engine.convert import Convert
from penstock.engine.job import Slot, batches_of
from penstock.engine.runner import Runner
from penstock.engine.stats import Delivered
from penstock.errors import StateError
from penstock.loader.batch import Batch
from penstock.trace import Kind, Recorder


class BatchRun(Protocol):
    """Whoever makes the batches of one iteration."""

    sent_bytes: int
    """Bytes of batches that were copied to this process."""
    decode_ns: tuple[int, int]
    """From when to when the latest batches were made (perf_counter_ns)."""

    def next(self) -> list[tuple[Slot, Any]] | None:
        """Return the next batches, or None when there are no more."""
        ...

    def stop(self) -> None:
        """End it."""
        ...

    @property
    def wait_s(self) -> float:
        """Time that was spent waiting for batches."""
        ...

    @property
    def cpu_s(self) -> float:
        """Processor time of its threads in this process."""
        ...


class HereRun:
    """Batches that are made in this process, by threads."""

    sent_bytes = 0

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._wait_s = 0.0
        self.decode_ns = (0, 0)

    @property
    def wait_s(self) -> float:
        """Time that was spent waiting for batches."""
        return self._wait_s

    @property
    def cpu_s(self) -> float:
        """Processor time of its threads."""
        return self.runner.cpu_s

    def next(self) -> list[tuple[Slot, Any]] | None:
        """Return the batches of the next job."""
        begin = time.perf_counter()
        try:
            job = self.runner.next()
        finally:
            self._wait_s += time.perf_counter() - begin
        if job is None:
            return None
        self.decode_ns = job.decode_ns
        return batches_of(job.slots, job.results)

    def stop(self) -> None:
        """End its threads."""
        self.runner.stop()


class Iteration(Iterator[Any]):
    """What `iter(loader)` returns. What makes its batches works exactly as long as it lives."""

    def __init__(
        self,
        run: BatchRun,
        counters: Delivered,
        convert: Convert,
        *,
        delivered: Callable[[Slot], None],
        recorder: Recorder | None,
        holds: object = None,
    ) -> None:
        self.run = run
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
        self._finalizer = weakref.finalize(self, _end, run, counters, self._began, self._pid)
        if isinstance(run, HereRun):
            run.runner.start()

    @property
    def is_open(self) -> bool:
        """Whether batches are still made."""
        return self._finalizer.alive

    @property
    def running_s(self) -> float:
        """Seconds since it began; 0 once it is closed."""
        return time.perf_counter() - self._began if self.is_open else 0.0

    @property
    def cpu_s(self) -> float:
        """Processor time of its threads so far; 0 once it is closed."""
        return self.run.cpu_s if self.is_open else 0.0

    @property
    def sent_bytes(self) -> int:
        """Bytes that were copied to this process; 0 once it is closed."""
        return self.run.sent_bytes if self.is_open else 0

    def __next__(self) -> Any:
        slot, batch = self.made()
        self.deliver(slot)
        return batch

    def made(self) -> tuple[Slot, Any]:
        """Return the next batch, and what `deliver` wants when somebody has it."""
        self.check_process()
        takes_job = not self._ready
        begin_cpu_s = time.thread_time() if takes_job else 0.0
        begin_s, waited_s = time.perf_counter(), self.run.wait_s
        try:
            if takes_job:
                self._take_job()
            slot, fields = self._ready.popleft()
            return slot, self._batch(slot, fields)
        finally:
            waited_s = self.run.wait_s - waited_s
            self._counters.stall_s += waited_s
            hand_over_s = time.perf_counter() - begin_s - waited_s
            self._counters.hand_over_s += hand_over_s
            # A batch that came with another one takes so long that asking would cost as much.
            cpu_s = time.thread_time() - begin_cpu_s if takes_job else hand_over_s
            self._counters.hand_over_cpu_s += cpu_s

    def check_process(self) -> None:
        """Refuse to go on in a forked child."""
        if os.getpid() != self._pid:
            raise StateError(
                "this iteration belongs to the process that started it; what makes its batches "
                "does not exist in a forked one. Call iter(loader) in the process that needs them"
            )

    def deliver(self, slot: Slot) -> None:
        """Move the cursor behind a batch."""
        self._counters.samples += slot.num_counted
        self._counters.batches += 1
        self._delivered(slot)
        if self._recorder is not None:
            self._recorder.mark(Kind.DELIVER, epoch=slot.epoch, step=slot.step)

    def _take_job(self) -> None:
        if not self.is_open:
            raise StopIteration
        begin = time.perf_counter_ns()
        try:
            made = self.run.next()
        except BaseException:
            self.close()
            raise
        if self._recorder is not None:
            self._recorder.span(Kind.STALL, begin, time.perf_counter_ns())
        if made is None:
            self.close()
            raise StopIteration
        self._ready.extend(made)

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
            weights=None if slot.weights is None else convert(slot.weights),
        )

    def close(self) -> None:
        """End whatever makes its batches."""
        self._ready.clear()
        self._finalizer()


def _end(run: BatchRun, counters: Delivered, began: float, pid: int) -> None:
    if os.getpid() != pid:
        return  # A forked child has none of these threads and processes.
    counters.elapsed_s += time.perf_counter() - began
    counters.thread_cpu_s += run.cpu_s
    counters.sent_bytes += run.sent_bytes
    run.stop()
