"""One pass over the stream: hands over batches, counts them, moves the cursor."""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.engine.convert import Convert
from penstock.engine.job import Job, Slot, batches_of
from penstock.engine.runner import Runner
from penstock.engine.stats import Delivered
from penstock.errors import StateError
from penstock.loader.batch import Batch
from penstock.trace import Kind, Recorder


class BatchRun(Protocol):
    """Whoever makes the batches of one iteration."""

    sent_bytes: int
    """Bytes of batches that were copied to this process."""

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
        return None if job is None else batches_of(job.slots, job.results)

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
        only_asked: bool = False,
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
        self.only_asked = only_asked
        """Whether batches are planned when `InStages` asks for them, and not before."""
        if isinstance(run, HereRun):
            if only_asked:
                run.runner.allow(0)
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
        if os.getpid() != self._pid:
            raise StateError(
                "this iteration belongs to the process that started it; what makes its batches "
                "does not exist in a forked one. Call iter(loader) in the process that needs them"
            )
        begin_s, waited_s = time.perf_counter(), self.run.wait_s
        try:
            if not self._ready:
                self._take_job()
            slot, fields = self._ready.popleft()
            return slot, self._batch(slot, fields)
        finally:
            waited_s = self.run.wait_s - waited_s
            self._counters.stall_s += waited_s
            # Nothing else waits, so this is processor time; to ask for that would cost as much.
            self._counters.hand_over_s += time.perf_counter() - begin_s - waited_s

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
        )

    def close(self) -> None:
        """End whatever makes its batches."""
        self._ready.clear()
        self._finalizer()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """One batch whose bytes are here."""

    job: Job

    @property
    def fetch_ns(self) -> tuple[int, int]:
        """From when to when its bytes came (perf_counter_ns); nothing where they were near."""
        return self.job.planned_ns, self.job.fetched_ns

    @property
    def decode_ns(self) -> tuple[int, int]:
        """From when to when it was made, once it is."""
        return self.job.begun_ns or self.job.fetched_ns, self.job.done_ns


class InStages:
    """An iteration whose batches are asked for twice: for their bytes, and when they are made.

    The loader's own threads do the work, several batches at once where they are ahead; whoever asks
    waits, and is told when the work was done. Where the iteration is `only_asked`, nothing is read
    for a batch that was not asked for: who asks decides when the wire is used. `fetch` and `decode`
    may be called by two threads, each in order. Batches that are made wait for their turn, so the
    cursor moves when somebody says that one is `used`, and not before.
    """

    def __init__(self, iteration: Iteration) -> None:
        self._iteration = iteration
        assert isinstance(iteration.run, HereRun)
        self._runner = iteration.run.runner
        self._num_asked = 0
        self._next_job = 0
        self._left: deque[Job] = deque()
        """One entry for each batch of the latest job that was not asked for yet."""
        self._made: deque[Slot] = deque()
        """Of the batches that are made and not used yet."""

    def fetch(self) -> Ticket:
        """Return when the bytes of the next batch are here; StopIteration after the last."""
        self._num_asked += 1
        if self._iteration.only_asked:
            self._runner.allow(self._num_asked)
        if not self._left:
            job = self._runner.fetched(self._next_job)
            if job is None:
                raise StopIteration if self._iteration.is_open else _ended_early()
            self._next_job += 1
            self._left.extend([job] * max(1, len(job.slots)))
        return Ticket(job=self._left.popleft())

    def decode(self, ticket: Ticket) -> Any:
        """Return the batch of the oldest ticket."""
        try:
            slot, batch = self._iteration.made()
        except StopIteration:
            raise _ended_early() from None  # Its ticket says that there is one.
        self._made.append(slot)
        return batch

    def used(self) -> None:
        """Take note that the oldest batch that was made has been used: the cursor moves on."""
        if self._made:
            self._iteration.deliver(self._made.popleft())

    def close(self) -> None:
        """End all threads and processes; what was made and not used is not delivered."""
        self._made.clear()
        self._iteration.close()


def _ended_early() -> StateError:
    return StateError(
        "the loader was closed, or another iteration of it was begun, before this one was over; "
        "give each reader a Loader of its own"
    )


def _end(run: BatchRun, counters: Delivered, began: float, pid: int) -> None:
    if os.getpid() != pid:
        return  # A forked child has none of these threads and processes.
    counters.elapsed_s += time.perf_counter() - began
    counters.thread_cpu_s += run.cpu_s
    counters.sent_bytes += run.sent_bytes
    run.stop()
