"""The threads of a run: they plan jobs, work on them, and deliver them in order.

A work thread takes the first of these that there is: a piece of a planned job; the planning of the
next job, if the stage has room; the planning of fills that the tiers need later. With peers, only
the thread `penstock-fill` plans fills, because other nodes wait for them. The fetcher has threads
of its own for reads that take a round trip. The consumer only waits. All threads share one
lock and one state. None of them refers to the loader, so a loader that nobody holds is collected,
and then its threads end.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from penstock.engine.fetcher import Fetcher, ReadPurpose
from penstock.engine.fill_planner import FillPlanner
from penstock.engine.fills import FillRun
from penstock.engine.job import BatchJob, BatchMaker, GroupPiece
from penstock.engine.staging import StagedReads, Stager
from penstock.flow.planning import may_fill, may_plan
from penstock.trace import Flag, Kind, Recorder
from penstock.trace.loop import WorkTimes

_JOIN_S = 5.0
_SMALL_BYTES = 32
_FILL_LOOK_S = 0.2
"""Between two looks whether homes have moved: nothing wakes the filling thread for that."""


class Runner:
    """Makes jobs, several at once, and hands them out in order."""

    def __init__(
        self,
        jobs: Iterator[BatchJob],
        maker: BatchMaker,
        stager: Stager,
        *,
        fetcher: Fetcher,
        fill_planner: FillPlanner | None,
        num_threads: int,
        stage_bytes_max: int,
        recorder: Recorder | None,
    ) -> None:
        self._jobs = jobs
        self._maker = maker
        self._stager = stager
        self._fetcher = fetcher
        self._fill_planner = fill_planner
        self._recorder = recorder
        self._work_times = WorkTimes()
        self._num_threads = num_threads
        self._stage_bytes_max = stage_bytes_max
        # Guards all state below. Reentrant, because the garbage collector may call `stop` inside
        # any of these threads, at any allocation, also where the lock is held.
        lock = threading.RLock()
        self._work_here = threading.Condition(lock)  # Work threads wait for work.
        self._ready = threading.Condition(lock)  # `next` waits for the first job to be done.
        self._fetched_here = threading.Condition(lock)  # `fetched` waits for the bytes of a job.
        self._fill_here = threading.Condition(lock)  # The filling thread waits for a quiet fetcher.
        self._stage: deque[BatchJob] = deque()
        self._stage_bytes = 0
        self._pieces: deque[tuple[BatchJob, GroupPiece]] = deque()
        self._num_planned = self._num_slots = 0
        """The number of jobs that were planned, and of their batches."""
        self._num_allowed: int | None = None
        """The number of batches that may be planned, set by `allow`; None: all."""
        self._num_known: int | None = None
        """The number of batches whose samples are known, set by `known`; None: all."""
        self._num_taken = 0
        self._was_near = False
        """Whether the latest planned job waits for no read."""
        self._is_planning = self._is_filling = False
        self._is_exhausted = self._is_stopped = False
        self._broken: BaseException | None = None
        self._job_bytes = 0
        """Memory of the latest finished job: decoded samples are larger than stored ones."""
        self._threads = [self._thread(self._work_loop, f"work-{i}") for i in range(num_threads)]
        self._has_fill_thread = fill_planner is not None and stager.cluster is not None
        """Whether a thread of its own plans fills: other nodes wait for units whose home is here,
        even while the work threads are busy with batches."""
        if self._has_fill_thread:
            self._threads.append(self._thread(self._fill_loop, "fill"))

    def _thread(self, loop: Callable[[], None], name: str) -> threading.Thread:
        return threading.Thread(
            target=self._guarded, args=(loop,), name=f"penstock-{name}", daemon=True
        )

    @property
    def cpu_s(self) -> float:
        """Processor time of those of its threads that are alive."""
        return sum(_cpu_of(thread) for thread in self._threads)

    def start(self) -> None:
        """Start all threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End all threads; waits a bounded time for reads in flight, and drops their bytes."""
        with self._work_here:
            self._is_stopped = True
            self._pieces.clear()
            self._work_here.notify_all()
            self._fill_here.notify_all()
            self._wake_consumers()
        if self._fill_planner is not None:
            self._fill_planner.progress.stop()
        self._fetcher.stop()
        if threading.current_thread() in self._threads:
            return  # A thread cannot join itself; the others end by themselves.
        deadline_s = time.monotonic() + _JOIN_S
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, deadline_s - time.monotonic()))

    def next(self, *, held: bool = False) -> BatchJob | None:
        """Return the next job when it is done, or None when there are no more.

        With `held`, the job is only on its way to the consumer: its memory counts, and the consumer
        counts as working on an earlier job, until `used` is called.
        """
        if not held and not self._is_next_ready():
            self.waiting()
        with self._ready:
            while not self._is_next_ready():
                if self._broken is not None:
                    raise self._broken
                if self._is_stopped or (self._is_exhausted and not self._stage):
                    return None
                self._ready.wait()
            job = self._stage.popleft()
            if job.error is not None and held:
                self._stage_bytes -= job.size_bytes
        if not held:
            self.used(job)
        if job.error is not None:
            raise job.error
        return job

    def waiting(self) -> None:
        """Record that the consumer waits for the next job."""
        self._fetcher.waiting(self._num_taken)

    def used(self, job: BatchJob) -> None:
        """Record that the consumer has a job; its memory does not count any more."""
        with self._work_here:
            self._stage_bytes -= job.size_bytes
            self._work_here.notify()  # There may be room to plan the next job.
        self._num_taken = job.number + 1
        if self._stager.residency is not None:
            self._stager.residency.taken(job.number)
        self._fetcher.consumed(job.number)

    @property
    def num_ready(self) -> int:
        """Batches that are made and that `next` has not returned."""
        with self._ready:
            return sum(len(job.slots) for job in self._stage if job.is_done)

    def _is_next_ready(self) -> bool:
        return bool(self._stage) and self._stage[0].is_done

    def allow(self, num_batches: int) -> None:
        """Plan at most so many batches, counted from the first."""
        with self._work_here:
            self._num_allowed = num_batches
            self._work_here.notify()

    def known(self, num_batches: int | None) -> None:
        """Record that the samples of so many batches are known; None: of all."""
        with self._work_here:
            self._num_known = num_batches
            self._work_here.notify()

    def fetched(self, number: int) -> BatchJob | None:
        """Return a job when its bytes are here, or None when there is no such job.

        `next` must not have returned it yet.
        """
        with self._ready:
            is_late = (job := self._staged_job(number)) is None or not job.is_fetched
        if is_late:
            self._fetcher.waiting(number)
        with self._fetched_here:
            while (job := self._staged_job(number)) is None or not job.is_fetched:
                if self._broken is not None:
                    raise self._broken
                if self._is_stopped or (self._is_exhausted and number >= self._num_planned):
                    return None
                self._fetched_here.wait()
            return job

    def _staged_job(self, number: int) -> BatchJob | None:
        place = number - self._num_planned + len(self._stage)
        return self._stage[place] if 0 <= place < len(self._stage) else None

    # -- threads -----------------------------------------------------------------------------

    def _guarded(self, loop: Callable[[], None]) -> None:
        """Run a thread's loop; if that raises, the consumer raises it instead of waiting."""
        error = _error_of(loop)
        if error is not None:
            with self._ready:
                self._broken = error
                self._wake_consumers()

    def _fill_loop(self) -> None:
        while True:
            with self._fill_here:
                while not (self._is_stopped or self._may_fill()):
                    self._fill_here.wait(_FILL_LOOK_S)
                if self._is_stopped:
                    return
                self._is_filling = True
            self._fill_next()

    def _work_loop(self) -> None:
        while True:
            with self._work_here:
                while not (
                    self._is_stopped
                    or self._pieces
                    or self._may_plan()
                    or (not self._has_fill_thread and self._may_fill())
                ):
                    self._work_here.wait()
                if self._is_stopped:
                    return
                item = self._pieces.popleft() if self._pieces else None
                plans = item is None and self._may_plan()
                self._is_planning = self._is_planning or plans
                self._is_filling = self._is_filling or not (item or plans)
            if plans:
                item = self._plan_next()
            if item is not None:
                self._do(*item)
            elif not plans:
                self._fill_next()
            item = None  # Else this frame would keep the batch while the thread is idle.

    def _may_plan(self) -> bool:
        if self._is_planning or self._is_exhausted:
            return False
        if self._num_allowed is not None and self._num_slots >= self._num_allowed:
            return False
        if self._num_known is not None and self._num_slots >= self._num_known:
            return False
        return may_plan(
            num_batches=len(self._stage),
            size_bytes=self._stage_bytes,
            was_near=self._was_near,
            num_makers=self._num_threads,
            stage_bytes_max=self._stage_bytes_max,
            look_ahead_bytes=lambda: self._fetcher.look_ahead_bytes,
        )

    def _may_fill(self) -> bool:
        """Return whether the fetcher has so little to do that tiers can be filled ahead."""
        if self._fill_planner is None or self._is_filling or self._fill_planner.is_exhausted:
            return False
        return may_fill(
            num_waiting=self._fetcher.num_waiting, requests_limit=self._fetcher.requests_limit
        )

    def _fill_next(self) -> None:
        assert self._fill_planner is not None
        assert self._stager.fills is not None
        for number, read in self._fill_planner.next():
            self._fetcher.want([(read, partial(self._filled, read))], number, _AHEAD)
        with self._work_here:
            self._is_filling = False
            self._wake_filler()

    def _wake_filler(self) -> None:
        (self._fill_here if self._has_fill_thread else self._work_here).notify()

    def _filled(self, read: FillRun, error: BaseException | None) -> None:
        assert self._stager.fills is not None
        self._stager.fills.finish(read, error)
        if self._fill_planner is not None:
            self._fill_planner.progress.done(read)
        with self._work_here:
            if self._may_fill():
                self._wake_filler()

    def _plan_next(self) -> tuple[BatchJob, GroupPiece] | None:
        """Plan the next job; return a piece of it that the caller does itself."""
        begin = time.perf_counter_ns()
        pieces: list[GroupPiece] = []
        staged = StagedReads()
        error: BaseException | None = None
        try:
            job = next(self._jobs, None)
            if job is not None:
                self._stager.split(job)
                pieces = self._maker.plan(job)
                staged = self._stager.stage(job)
                job.stored_bytes = job.size_bytes
                job.size_bytes += job.staged_bytes
        except BaseException as caught:  # The consumer raises it.
            error, job = caught, BatchJob(slots=[], groups=[], num_samples=0)
        if self._recorder is not None and job is not None and job.slots:
            num_reads = len(staged.reads) + len(staged.fill_reads)
            step, epoch = job.slots[0].step, job.slots[0].epoch
            self._recorder.span(
                Kind.PLAN, begin, time.perf_counter_ns(), step=step, epoch=epoch, count=num_reads
            )
        with self._work_here:
            self._is_planning = False
            if job is None:
                self._is_exhausted = True
                self._wake_consumers()
                return None
            job.number = self._num_planned
            self._num_planned += 1
            self._num_slots += len(job.slots)
            job.planned_ns = begin
            job.size_bytes = max(job.size_bytes, self._job_bytes)
            self._stage.append(job)
            self._stage_bytes += job.size_bytes
            if error is not None:
                self._is_exhausted = True
                job.error, job.is_fetched, job.is_done = error, True, True
                self._wake_consumers()
                return None
            job.pieces_left = len(pieces)
            self._was_near = not (staged.reads or staged.fills)
            if not (staged.reads or staged.fills):
                self._is_here(job, begin)
                self._pieces.extend((job, piece) for piece in pieces[1:])
                # One thread for each piece but the one done here, and one to plan the next job.
                self._work_here.notify(len(pieces) - 1 + self._may_plan())
                return job, pieces[0]
            self._work_here.notify()  # Another thread may plan on while this one wants the reads.
        self._want(job, staged, pieces)
        return None

    def _want(self, job: BatchJob, staged: StagedReads, pieces: list[GroupPiece]) -> None:
        """Have a job's reads done; the last one to finish sets its pieces free."""
        countdown = _PendingReads(len(staged.reads) + len(staged.fills), pieces)
        done = partial(self._read_done, job, countdown)
        what_for = ReadPurpose(job.slots[0].step, job.slots[0].epoch)
        self._fetcher.want([(read, done) for read in staged.reads], job.number, what_for)
        fills = [(read, partial(self._filled, read)) for read in staged.fill_reads]
        self._fetcher.want(fills, job.number, what_for)
        for fill in staged.fills:
            fill.when_done(done)

    def _is_here(self, job: BatchJob, now_ns: int) -> None:
        """Record that the bytes of a job are here; the caller holds the lock."""
        job.fetched_ns, job.is_fetched = now_ns, True
        self._fetched_here.notify_all()

    def _wake_consumers(self) -> None:
        self._ready.notify_all()
        self._fetched_here.notify_all()

    def _do(self, job: BatchJob, piece: GroupPiece) -> None:
        begin = time.perf_counter_ns()
        job.begun_ns = job.begun_ns or begin
        begun = None if self._recorder is None else self._begin_work(self._recorder, job)
        error = _error_of(lambda: self._maker.work(job, piece) if job.error is None else None)
        if self._recorder is not None and self._maker.decodes_here:
            end, count = time.perf_counter_ns(), piece.stop - piece.start
            cpu_ns = wait_ns = 0
            if begun is not None:
                cpu_ns, wait_ns = self._work_times.end(begun, end - begin)
            self._recorder.span(
                Kind.DECODE,
                begin,
                end,
                count=count,
                size_bytes=job.stored_bytes * count // job.num_samples,
                cpu_ns=cpu_ns,
                wait_ns=wait_ns,
                flags=Flag.ERROR if error is not None else 0,
            )
        self._count_pieces(job, 1, error)

    def _begin_work(self, recorder: Recorder, job: BatchJob) -> tuple[int, int] | None:
        """Set the recorder of this thread to a job; return the thread's times so far.

        None where the thread will wait for workers: its times would say nothing.
        """
        recorder.working_on(job.slots[0].step, job.slots[0].epoch)
        return None if self._maker.waits_here else self._work_times.begin()

    def _read_done(
        self, job: BatchJob, countdown: _PendingReads, error: BaseException | None
    ) -> None:
        with self._work_here:
            countdown.left -= 1
            if self._is_stopped or job.is_fetched or (countdown.left and error is None):
                return
            # The first error ends the job: its other reads may take as long to fail, one by one.
            self._is_here(job, time.perf_counter_ns())
            if error is None:
                self._pieces.extend((job, piece) for piece in countdown.pieces)
                self._work_here.notify(len(countdown.pieces))
                return
        self._count_pieces(job, len(countdown.pieces), error)

    def _count_pieces(self, job: BatchJob, num_pieces: int, error: BaseException | None) -> None:
        """Count pieces as done; the thread of the last one finishes the job."""
        with self._work_here:
            job.error = job.error or error
            job.pieces_left -= num_pieces
            if job.pieces_left:
                return
        begin = time.perf_counter_ns()
        if job.error is None:
            job.error = _error_of(lambda: job.results.extend(self._maker.finish(job)))
        job.state = None
        job.staged = {}
        end = time.perf_counter_ns()
        # The result of the user's collate may not show its size; then the planned size counts.
        size_bytes = max(size_of(job.results), job.stored_bytes)
        if self._recorder is not None and job.slots:
            self._recorder.span(
                Kind.JOIN,
                begin,
                end,
                step=job.slots[0].step,
                epoch=job.slots[0].epoch,
                count=len(job.slots),
                size_bytes=size_bytes,
            )
        with self._ready:
            self._stage_bytes += size_bytes - job.size_bytes
            job.size_bytes = self._job_bytes = size_bytes
            job.done_ns, job.is_done = time.perf_counter_ns(), True
            if self._is_next_ready():
                self._ready.notify_all()


def size_of(value: Any) -> int:
    """Return the bytes of all arrays in a value, also inside of mappings and lists."""
    size_bytes = getattr(value, "nbytes", None)
    if isinstance(size_bytes, int):
        return size_bytes  # Arrays, tensors, cuts.
    if isinstance(value, bytes | str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(size_of(v) for v in value.values())
    if isinstance(value, list | tuple):
        return sum(size_of(v) for v in value)
    return _SMALL_BYTES


_AHEAD = ReadPurpose(flags=Flag.FILL)


class _PendingReads:
    """The number of reads that a job waits for, and the pieces that they set free."""

    __slots__ = ("left", "pieces")

    def __init__(self, left: int, pieces: list[GroupPiece]) -> None:
        self.left = left
        self.pieces = pieces


def _cpu_of(thread: threading.Thread) -> float:
    if not thread.is_alive() or thread.ident is None:
        return 0.0
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    except OSError:
        return 0.0  # It has ended meanwhile.


def _error_of(call: Callable[[], Any]) -> BaseException | None:
    try:
        call()
    except BaseException as error:  # Raised again in the thread that asks for the batch.
        return error
    return None
