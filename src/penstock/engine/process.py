"""The engine in a process of its own: answers the front, and sends batches as they are made.

The *front* is the loader in the training process. The main thread answers its questions. Two
threads live as long as the engine: `penstock-hear` receives the notices of the front (batches
taken, memory released, losses), and `penstock-spawner` hears how workers ended. Each run adds the
threads of its `Runner` and `Fetcher`, `penstock-send`, which sends batches in order, and
`penstock-count`, where the number of workers is measured. README.md lists all threads. At most a
few batches are on their way; all others wait here, where they count against the look-ahead.
"""

from __future__ import annotations

import logging
import os
import pickle
import resource
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.dataset.mixture import datasets_of
from penstock.engine.build import workers_max
from penstock.engine.channel import ChannelClosed, FrameChannel
from penstock.engine.engine import Engine, EngineResources
from penstock.engine.fetch_answers import FetchAnswers
from penstock.engine.job import BatchJob
from penstock.engine.messages import (
    BeginRun,
    EngineAnswer,
    EnginePayload,
    EngineQuestion,
    EngineReport,
    FrontNotice,
    LogLine,
    MadeBatches,
    MeetingCall,
    PackedSlots,
)
from penstock.engine.metrics import cpu_and_memory, metrics_for
from penstock.engine.process_errors import packed_error, unpacked_error
from penstock.engine.runner import Runner
from penstock.engine.shared import Outbox, SharedParcel, SharedPool, SharedSegments, packed
from penstock.engine.snapshot import LiveCounts, LiveSnapshot
from penstock.engine.stats import MemoryStats
from penstock.engine.worker_number import LoopTimes, WorkerCountControl
from penstock.engine.workers import SpawnerClient, Workers
from penstock.storage.passing import PassedBytes

if TYPE_CHECKING:
    from penstock.engine.web import WebPages

_ON_THE_WAY = 2
"""Jobs that are sent before the front says that it has taken them."""


class FrontRendezvous:
    """The rendezvous of the nodes, called by way of the training process."""

    def __init__(self, control: FrameChannel) -> None:
        self._control = control

    def _call(self, method: str, *arguments: Any) -> Any:
        self._control.send(pickle.dumps(MeetingCall(method=method, arguments=arguments)))
        answer: EngineAnswer = pickle.loads(self._control.receive()[0])
        if answer.error is not None:
            raise unpacked_error(answer.error)
        return answer.value

    def number(self) -> int:
        """Return how often this rank has met the others, this time included."""
        found: int = self._call("number")
        return found

    def put(self, key: str, value: bytes) -> None:
        """Put a value in the place of what may be there."""
        self._call("put", key, value)

    def put_once(self, key: str, value: bytes) -> bytes:
        """Put a value where there is none; return the one that is there."""
        found: bytes = self._call("put_once", key, value)
        return found

    def get(self, key: str, timeout_s: float) -> bytes:
        """Wait for a value."""
        found: bytes = self._call("get", key, timeout_s)
        return found

    def try_get(self, key: str) -> bytes | None:
        """Return a value if it is there."""
        found: bytes | None = self._call("try_get", key)
        return found


class _FrontLogHandler(logging.Handler):
    """Sends log lines to the training process, where users expect them."""

    def __init__(self, batches: FrameChannel) -> None:
        super().__init__(logging.INFO)
        self._batches = batches

    def emit(self, record: logging.LogRecord) -> None:
        line = LogLine(name=record.name, level=record.levelno, text=record.getMessage())
        with suppress(ChannelClosed):
            self._batches.send(pickle.dumps(line))


class RunSender:
    """One iteration: sends what its runner makes."""

    def __init__(
        self, number: int, runner: Runner, process: EngineProcess, fetches: FetchAnswers | None
    ) -> None:
        self.number = number
        self.runner = runner
        self._fetches = fetches
        self.wait_s = 0.0
        """Time that the front has waited for batches of this iteration."""
        self._waits_since_s: float | None = None
        self._num_taken = 0
        self._num_samples = 0
        self._began_s = time.monotonic()
        self.epoch = -1
        """Epoch of the latest batch that the front has taken."""
        self._process = process
        # The number of jobs that may be sent now; a notice that the front took one adds one.
        self._room = threading.Semaphore(_ON_THE_WAY)
        self._sent: deque[tuple[BatchJob, int]] = deque()
        """Jobs on their way, each with the number of its batches that were not taken yet."""
        self._is_over = False
        self._thread = threading.Thread(target=self._send_all, name="penstock-send", daemon=True)

    def start(self) -> None:
        """Begin to make batches, and to send them."""
        if self._fetches is not None:
            self._fetches.start()
        self.runner.start()
        self._thread.start()

    def loop_times(self) -> LoopTimes:
        """Return waits and batches of the training loop; a wait that still goes on counts."""
        since_s = self._waits_since_s
        waiting_s = 0.0 if since_s is None else time.monotonic() - since_s
        return LoopTimes(wait_s=self.wait_s + waiting_s, num_batches=self._num_taken)

    def counts(self) -> LiveCounts:
        """Return the counts of this iteration."""
        loop = self.loop_times()
        return LiveCounts(
            samples=self._num_samples,
            batches=loop.num_batches,
            elapsed_s=time.monotonic() - self._began_s,
            stall_s=loop.wait_s,
        )

    @property
    def num_ready(self) -> int:
        """Batches that are made and that the front has not taken."""
        return self.runner.num_ready + sum(left for _, left in list(self._sent))

    def notice(self, notice: FrontNotice) -> None:
        """Take a notice of the front."""
        self.wait_s = notice.wait_s
        self._waits_since_s = time.monotonic() if notice.is_waiting else None
        self._num_taken += notice.num_taken
        self.taken(notice.num_taken)
        if notice.is_waiting:
            self.runner.waiting()

    def taken(self, num_batches: int) -> None:
        """Record that the front has taken batches."""
        for _ in range(num_batches):
            job, left = self._sent[0]
            slot = job.slots[-left]
            self._num_samples += slot.num_counted
            self.epoch = slot.epoch
            if left > 1:
                self._sent[0] = job, left - 1
                continue
            self._sent.popleft()
            self.runner.used(job)
            self._room.release()

    def stop(self) -> None:
        """End it."""
        self._is_over = True
        self._room.release()
        self.runner.stop()
        if self._fetches is not None:
            self._fetches.stop()

    def _send_all(self) -> None:
        with suppress(ChannelClosed):
            while True:
                self._room.acquire()
                if self._fetches is not None and not self._is_over:
                    self._fetches.wait()
                try:
                    # Even if the run was stopped, its end is sent: a thread of the front may wait.
                    job = None if self._is_over else self.runner.next(held=True)
                except BaseException as error:
                    self._process.send(MadeBatches(run=self.number, error=packed_error(error)))
                    return
                if job is None:
                    self._process.send(MadeBatches(run=self.number))
                    return
                # Before it is sent, because `taken` may be called before `send_job` returns.
                self._sent.append((job, len(job.slots)))
                self._process.send_job(self.number, job)


class EngineProcess:
    """Serves one front until it is gone."""

    def __init__(
        self,
        payload: EnginePayload,
        control: FrameChannel,
        batches: FrameChannel,
        spawner: FrameChannel,
    ):
        self._control = control
        self._batches = batches
        options = payload.options
        segments = SharedSegments()
        self._pool = SharedPool(options.look_ahead_bytes, segments)
        self._outbox = Outbox(segments)
        # Held while the files of new segments are chosen and sent with the first message that
        # refers to them: no message of another thread may come between and refer to them first.
        self._sending = threading.Lock()
        self._num_workers = payload.num_workers
        self._workers = Workers(SpawnerClient(spawner), segments, payload.num_workers or 1)
        self._worker_count: WorkerCountControl | None = None
        self._engine = Engine(
            options,
            rendezvous=lambda world: FrontRendezvous(control),
            count_meeting=lambda world: FrontRendezvous(control).number(),
            resources=EngineResources(pool=self._pool, workers=self._workers),
        )
        self._run: RunSender | None = None
        # Held while a notice is received and taken. Whoever ends a run takes those that have come
        # first: a notice is sent before the question to end the run, but on another channel, and
        # its batches would not be counted.
        self._hearing = threading.Lock()
        self._counting: tuple[LiveCounts, RunSender | None] = (LiveCounts(), None)
        """The counts of iterations that are over, and the one that runs. They are one value, so
        that the thread of the metrics page never counts an iteration twice, or not at all."""
        self._metrics: WebPages | None = None
        self._given_up: list[Any] = []
        """Memory of workers that is never released, because a forked child may look at it."""

    def serve(self) -> None:
        """Answer the front."""
        logger = logging.getLogger("penstock")
        logger.addHandler(_FrontLogHandler(self._batches))
        logger.setLevel(logging.INFO)
        threading.Thread(target=self._hear, name="penstock-hear", daemon=True).start()
        while True:
            frame, files = self._control.receive()
            ask: EngineQuestion = pickle.loads(frame)
            try:
                answer = EngineAnswer(value=self._answer(ask, files))
            except BaseException as error:
                answer = EngineAnswer(error=packed_error(error))
            self._control.send(pickle.dumps(answer))
            if ask.word == "close":
                return

    def _answer(self, ask: EngineQuestion, files: list[int]) -> Any:
        if ask.word == "passed":
            datasets = datasets_of(self._engine.options.dataset)
            for (number, ranges), file in zip(ask.value, files, strict=True):
                datasets[number].passed = PassedBytes.taken_over(file, ranges)
            return None
        if ask.word == "begin":
            return self._begin(ask.value, files)
        if ask.word == "end":
            return self._end(ask.value)
        if ask.word == "stats":
            return self._told()
        if ask.word == "machine":
            live = self._engine.live_rates()
            return None if live is None else live.machine()
        if ask.word == "pids":
            return self._workers.pids()
        assert ask.word == "close", ask
        told = self._told()
        self.close()
        return replace(told, seen=self._engine.seen(), counted=self.counted())

    def _told(self) -> EngineReport:
        pids = [os.getpid(), *self._workers.pids()]
        memory = MemoryStats(
            shared_bytes=self._pool.segments.size_bytes,
            private_bytes=sum(map(private_bytes, pids)),
            num_processes=len(pids),
        )
        return EngineReport(
            seen=self._engine.seen(),
            counted=self.counted(),
            events=tuple(self._workers.events),
            memory=memory,
        )

    def close(self) -> None:
        """End the run and its workers; leave tiers and other nodes."""
        self._end()
        self._workers.close()
        self._engine.close()

    def _begin(self, begin: BeginRun, files: list[int]) -> str | None:
        self._end()
        ends = [FrameChannel(socket.socket(fileno=file)) for file in files]
        runner = self._engine.begin(begin.begin)
        fetches = [FetchAnswers(runner, end, only_asked=begin.only_asked) for end in ends]
        self._run = run = RunSender(begin.number, runner, self, fetches[0] if fetches else None)
        if self._num_workers is None:
            most = workers_max(begin.begin.world)
            self._worker_count = WorkerCountControl(self._workers, most=most, told=run.loop_times)
            self._worker_count.start()
        self._counting = self._counting[0], run
        if self._metrics is None:
            world = begin.begin.world
            self._metrics = metrics_for(world, lambda: self.snapshot(world.rank))
        run.start()
        return self._engine.run_id

    def _end(self, number: int | None = None) -> None:
        """End the run, unless `number` is given and is that of another run."""
        if self._run is None or number not in (None, self._run.number):
            return
        with self._hearing, suppress(ChannelClosed):
            while self._batches.is_ready():
                self._hear_one()
        if self._worker_count is not None:
            self._worker_count.stop()
            self._worker_count = None
        self._counting = self._counting[0] + self._run.counts(), None
        self._run.stop()
        self._run = None

    def counted(self) -> Any:
        """Return the counts so far."""
        return self._engine.counters.counted()

    def snapshot(self, rank: int) -> LiveSnapshot:
        """Return how this rank does, for metrics; reads a few small files of the kernel."""
        before, run = self._counting
        counts = before if run is None else before + run.counts()
        counted = self.counted()
        engine_s, memory_bytes = cpu_and_memory(os.getpid())
        workers = [cpu_and_memory(pid) for pid in self._workers.pids()]
        return LiveSnapshot(
            rank=rank,
            host=socket.gethostname(),
            at_s=time.time(),
            epoch=-1 if run is None else run.epoch,
            counts=replace(
                counts,
                decode_s=counted.decode_s,
                sources=counted.sources,
                cpu_s={"engine": engine_s, "worker": sum(cpu_s for cpu_s, _ in workers)},
            ),
            ready_batches=None if run is None else run.num_ready,
            memory_bytes=memory_bytes
            + sum(size_bytes for _, size_bytes in workers)
            + self._pool.segments.size_bytes,
        )

    # -- batches -----------------------------------------------------------------------------

    def _hear(self) -> None:
        with suppress(ChannelClosed):  # The front is gone; then `serve` ends as well.
            while True:
                self._batches.wait()
                failed = None
                with self._hearing:
                    if self._batches.is_ready():
                        failed = self._hear_one()
                # Not under the lock: to send may have to wait for the front, which may be waiting
                # for the end of its iteration, and that for the lock.
                if failed is not None:
                    self.send(failed)

    def _hear_one(self) -> MadeBatches | None:
        """Take the next notice of the front; return what to send if that failed."""
        taken: FrontNotice = pickle.loads(self._batches.receive()[0])
        for number, index in taken.released:
            self._outbox.release(number, index)
        for number, index in taken.spoilt:
            self._give_up(self._outbox.release(number, index))
        run = self._run
        if run is None or run.number != taken.run:
            return None
        failed = None
        try:
            for losses in taken.losses:
                self._engine.observed(losses.steps, losses.closes_window)
        except BaseException as error:  # The thread that waits for the next batch raises it.
            failed = MadeBatches(run=run.number, error=packed_error(error))
        run.notice(taken)
        return failed

    def _give_up(self, memory: Any) -> None:
        """Never use again memory that a forked child may look at."""
        is_ours = isinstance(memory, np.ndarray) and self._pool.spoil(memory)
        if memory is not None and not is_ours:
            self._given_up.append(
                memory
            )  # A worker's: if it is released, the worker uses it again.

    def send_job(self, run: int, job: BatchJob) -> None:
        """Send the batches of a job."""
        first: Any = job.results[0]
        is_joined = isinstance(first, SharedParcel)
        parcel = first if is_joined else packed(job.results, self._pool)
        job.results = []  # Else this frame would keep its memory until the next job is sent.
        made = MadeBatches(
            run=run,
            slots=PackedSlots.of(job.slots),
            is_joined=is_joined,
            counted=self.counted(),
            decode_ns=job.decode_ns,
            size_bytes=job.size_bytes,
        )
        self.send(made, parcel)

    def send(self, made: MadeBatches, parcel: SharedParcel | None = None) -> None:
        """Send a message, with those segments it refers to that the front has not mapped yet."""
        with self._sending:
            files: list[int] = []
            if parcel is not None:
                fresh, files = self._outbox.new_files([n for n, _, _ in parcel.references])
                made = made._replace(
                    number=self._outbox.keep(parcel),
                    data=parcel.data,
                    references=parcel.references,
                    fresh=fresh,
                )
            made = made._replace(gone=self._outbox.stale())
            self._batches.send(pickle.dumps(made, 5), files)


def private_bytes(pid: int) -> int:
    """Return the private memory of a process; 0 where the kernel does not show it."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    lines = (line.split() for line in text.splitlines() if line.startswith("Private_"))
    return sum(int(words[1]) << 10 for words in lines)


def run_engine(payload: EnginePayload, ends: list[socket.socket], spawner: FrameChannel) -> None:
    """Run the engine, in a process that was forked for it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        # Each segment is an open file here, and users may keep many batches.
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    control, batches = (FrameChannel(end) for end in ends)
    process = EngineProcess(payload, control, batches, spawner)
    try:
        process.serve()
    except ChannelClosed:
        process.close()
