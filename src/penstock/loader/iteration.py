"""One pass over the stream: hands over batches, counts them, moves the cursor."""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.engine.convert import Convert, profiled
from penstock.engine.job import BatchSlot, batches_of
from penstock.engine.runner import Runner
from penstock.engine.stats import DeliveryCounters
from penstock.errors import OptionError, StateError
from penstock.loader.batch import Batch
from penstock.trace import Recorder
from penstock.trace.loop import LoopRecorder, begin_loop
from penstock.trace.schema import Flag, Kind
from penstock.trace.windows import ResidentWindows


class BatchRun(Protocol):
    """Makes the batches of one iteration."""

    sent_bytes: int
    """Bytes of batches that were copied to this process, not shared with it."""
    decode_ns: tuple[int, int]
    """From when to when the latest batches were made (perf_counter_ns)."""
    made_bytes: int
    """Memory of the latest batches, as far as it is known."""

    def next(self) -> list[tuple[BatchSlot, Any]] | None:
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


class ThreadedRun:
    """Makes batches in this process, with threads."""

    sent_bytes = 0

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._wait_s = 0.0
        self.decode_ns = (0, 0)
        self.made_bytes = 0

    @property
    def wait_s(self) -> float:
        """Time that was spent waiting for batches."""
        return self._wait_s

    @property
    def cpu_s(self) -> float:
        """Processor time of its threads."""
        return self.runner.cpu_s

    def next(self) -> list[tuple[BatchSlot, Any]] | None:
        """Return the batches of the next job."""
        begin = time.perf_counter()
        try:
            job = self.runner.next()
        finally:
            self._wait_s += time.perf_counter() - begin
        if job is None:
            return None
        self.decode_ns, self.made_bytes = job.decode_ns, job.size_bytes
        return batches_of(job.slots, job.results)

    def stop(self) -> None:
        """End its threads."""
        self.runner.stop()


@dataclass(frozen=True, kw_only=True)
class IterationRecording:
    """How an iteration is recorded."""

    recorder: Recorder
    ended: Callable[[], None]
    """Called when there are no more batches, before it is closed."""
    is_loop: bool = True
    """Whether the thread that asks is the training loop."""
    object_id: int = 0
    """The name of the loader: a process may iterate several."""


class Iteration(Iterator[Any]):
    """The iterator of a loader; its run ends with it."""

    def __init__(
        self,
        run: BatchRun,
        counters: DeliveryCounters,
        convert: Convert,
        *,
        delivered: Callable[[BatchSlot], None],
        recorded: IterationRecording | None,
        windows: ResidentWindows | None = None,
        keeps_alive: object = None,
    ) -> None:
        self.run = run
        self._windows = windows
        self._keeps_alive = keeps_alive
        """An object that its threads use; the loader may be gone before they end."""
        self._counters = counters
        self._convert = convert
        self._delivered = delivered
        self._recorded = recorded
        self._loop: LoopRecorder | None = None
        if recorded is not None:
            self._loop = begin_loop(
                recorded.recorder, object_id=recorded.object_id, launches=recorded.is_loop
            )
        self._batch_bytes = 0
        """Memory of each batch in `_ready`, for the recorder."""
        self._ready: deque[tuple[BatchSlot, Any]] = deque()
        self._pid = os.getpid()
        self._began = time.perf_counter()
        # Called once: when this is collected, at `close`, or when the interpreter ends.
        self._finalizer = weakref.finalize(
            self, _end, run, counters, self._began, self._pid, self._loop
        )
        if isinstance(run, ThreadedRun):
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

    @profiled("penstock.next")
    def __next__(self) -> Any:
        if self._windows is None:
            slot, batch = self.made()
            self.deliver(slot)
            return batch
        batch = self._resident(self._windows)
        if batch is None:
            slot, batch = self.made()
            self.deliver(slot)
            self._windows.took(batch)
        return batch

    def _resident(self, windows: ResidentWindows) -> Any:
        """Return the batch of a resident window, which moves no cursor; None in a real one."""
        asked_ns = 0 if self._loop is None else self._loop.asked()
        batch = windows.again()
        if batch is not None and self._loop is not None:
            step, epoch = getattr(batch, "step", -1), getattr(batch, "epoch", -1)
            self._loop.got(asked_ns, wait_ns=0, step=step, epoch=epoch, flags=Flag.RESIDENT)
        return batch

    def made(self) -> tuple[BatchSlot, Any]:
        """Return the next batch, and its slot for `deliver`."""
        self.check_process()
        takes_job = not self._ready
        begin_cpu_s = time.thread_time() if takes_job else 0.0
        begin_ns, waited_s = time.perf_counter_ns(), self.run.wait_s
        slot: BatchSlot | None = None
        if self._loop is not None:
            self._loop.asked_at(begin_ns)
        try:
            if takes_job:
                self._take_job()
            slot, fields = self._ready.popleft()
            return slot, self._batch(slot, fields)
        finally:
            end_ns = time.perf_counter_ns()
            waited_s = self.run.wait_s - waited_s
            self._counters.stall_s += waited_s
            hand_over_s = (end_ns - begin_ns) / 1e9 - waited_s
            self._counters.hand_over_s += hand_over_s
            if self._loop is not None and slot is not None:
                what = slot.step, slot.epoch, slot.num_counted, self._batch_bytes, 0
                self._loop.took(begin_ns, end_ns, int(waited_s * 1e9), what)
            # A batch that came with another one: asking for the thread's time would cost as much
            # as the hand-over itself, which does nothing but compute.
            cpu_s = time.thread_time() - begin_cpu_s if takes_job else hand_over_s
            self._counters.hand_over_cpu_s += cpu_s

    def check_process(self) -> None:
        """Refuse to go on in a forked child, which has neither the threads nor the channels."""
        if os.getpid() != self._pid:
            raise StateError(
                "this iteration belongs to the process that started it; what makes its batches "
                "does not exist in a forked one. Call iter(loader) in the process that needs them"
            )

    def deliver(self, slot: BatchSlot) -> None:
        """Move the cursor behind a batch."""
        self._counters.samples += slot.num_counted
        self._counters.batches += 1
        self._delivered(slot)

    def _take_job(self) -> None:
        if not self.is_open:
            raise StopIteration
        try:
            made = self.run.next()
        except BaseException:
            self.close()
            raise
        if made is None:
            if self._loop is not None and self._recorded is not None:
                self._loop.ended()
                self._recorded.ended()
            self.close()
            raise StopIteration
        self._ready.extend(made)
        if self._recorded is not None:
            self._batch_bytes = self.run.made_bytes // len(made)
            # All processes of a machine have the same clock, so these times can be compared.
            self._recorded.recorder.span(
                Kind.HAND_OVER,
                self.run.decode_ns[1],
                time.perf_counter_ns(),
                step=made[0][0].step,
                epoch=made[0][0].epoch,
                count=len(made),
                size_bytes=self.run.made_bytes,
            )

    def _batch(self, slot: BatchSlot, fields: Any) -> Any:
        if not isinstance(fields, Mapping):
            if slot.weights is not None:
                raise OptionError(
                    "importance sampling puts weights beside the fields of a batch, and collate= "
                    f"has made a {type(fields).__name__}; return a mapping of names to fields, "
                    'such as {"data": …}'
                )
            return fields  # The result of the user's collate is the batch.
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
        """End the run."""
        self._ready.clear()
        self._finalizer()


def _end(
    run: BatchRun, counters: DeliveryCounters, began: float, pid: int, loop: LoopRecorder | None
) -> None:
    if os.getpid() != pid:
        return  # In a forked child: the threads and processes belong to the parent.
    if loop is not None:
        loop.left()
    counters.elapsed_s += time.perf_counter() - began
    counters.thread_cpu_s += run.cpu_s
    counters.sent_bytes += run.sent_bytes
    run.stop()
