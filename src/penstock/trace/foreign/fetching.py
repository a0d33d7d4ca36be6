"""Hooks where batches are made: in workers, or in the training process without workers.

A worker's loop is given a queue that remembers which batch was asked for, so that a BATCH row has
the step at which the training loop will get it. Data set, iterator and collate function of torch's
fetchers are replaced by ones that take the time; the fetchers themselves are torch's.
"""

from __future__ import annotations

import functools
import inspect
import multiprocessing
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from penstock.trace.foreign.measuring import batch_size_of
from penstock.trace.foreign.process import complain, recorder, safely, sees_reads, trace_folder
from penstock.trace.loop import LOCK_UNKNOWN_NS, ThreadTimes
from penstock.trace.recorder import close_recorders
from penstock.trace.schema import Kind

PASS = struct.Struct("<3q")
"""Told to a worker about the pass that begins: its process, the epoch, the step of batch 0."""
_ALWAYS_NS = 200_000
"""Samples that take this long are all recorded: it costs 1 %."""
_ROW_NS = 2_000
"""What a row of a sample costs, at most."""
_SHARE = 0.005
"""Share of a sample's time that recording may cost where samples are quick."""


class _BatchWork(threading.local):
    """The batch that this thread makes."""

    step = -1
    epoch = -1
    worker = ""
    times: ThreadTimes | None = None
    io_file: Any = None
    io_thread = -1


WORK = _BatchWork()


# -- workers ------------------------------------------------------------------------------------


def passes_path(pid: int) -> Path:
    """Return the file in which a training process tells its workers about passes."""
    return trace_folder() / f"{socket.gethostname()}-{pid}.passes"


def _pass_of(pid: int) -> tuple[int, int]:
    """Return epoch and first step of the pass that a worker is in; -1: unknown."""
    parent = multiprocessing.parent_process()
    path = passes_path(parent.pid if parent is not None and parent.pid else os.getppid())
    with suppress(OSError):
        for told, epoch, first_step in reversed(list(PASS.iter_unpack(path.read_bytes()))):
            if told == pid:
                return epoch, first_step
    return -1, -1


class _WatchedQueue:
    """The queue of a worker's tasks; remembers which batch was asked for last."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self._epoch = self._first_step = self._number = -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def get(self, *arguments: Any, **options: Any) -> Any:
        task = self._queue.get(*arguments, **options)
        if isinstance(task, tuple) and len(task) > 1 and isinstance(task[0], int):
            self._note(task[0])
        return task

    @safely
    def _note(self, number: int) -> None:
        # Tasks are numbered from 0 in every pass, and a worker is told about a pass before it
        # begins. A worker may have one task in a pass: then its number does not fall.
        if self._first_step < 0 or number <= self._number:
            self._epoch, self._first_step = _pass_of(os.getpid())
        self._number = number
        WORK.epoch = self._epoch
        WORK.step = self._first_step + number if self._first_step >= 0 else number


def hook_worker(module: Any) -> None:
    """Tell workers of this kind which batch they make."""
    original = module._worker_loop
    signature = inspect.signature(original)

    @functools.wraps(original)
    def _worker_loop(*arguments: Any, **options: Any) -> Any:
        with suppress(Exception):
            bound = signature.bind(*arguments, **options)
            bound.arguments["index_queue"] = _WatchedQueue(bound.arguments["index_queue"])
            WORK.worker = f"worker:{bound.arguments['worker_id']}"
            recorder("worker").facts({"worker": bound.arguments["worker_id"]})
            arguments, options = bound.args, bound.kwargs
        try:
            return original(*arguments, **options)
        finally:
            close_recorders()  # A worker leaves without the interpreter's own clearing up.

    module._worker_loop = _worker_loop


# -- fetchers -----------------------------------------------------------------------------------


def hook_fetchers(module: Any) -> None:
    """Record what torch's fetchers do: batches, samples, collating."""
    for name in ("_MapDatasetFetcher", "_IterableDatasetFetcher"):
        _hook_fetcher(getattr(module, name))


def _hook_fetcher(fetcher: Any) -> None:
    original = fetcher.fetch

    @functools.wraps(original)
    def fetch(self: Any, indices: Any) -> Any:
        if "_penstock" not in self.__dict__:
            self._penstock = None
            with suppress(Exception):
                self._penstock = _FetchRecorder(self)
        watching = self._penstock
        if watching is None:
            return original(self, indices)
        begun = watching.begin()
        if begun is None:
            return original(self, indices)
        with watching.put_in(self):
            batch = original(self, indices)
        watching.end(begun, indices, batch)
        return batch

    fetcher.fetch = fetch


class _FetchRecorder:
    """Records the batches of one fetcher, and stands in for what it calls.

    Only while a batch is fetched: between two, loaders that can be resumed look at the data set and
    at its iterator, and save what these say about themselves.
    """

    def __init__(self, fetcher: Any) -> None:
        self._recorder = recorder()
        self._object = self._recorder.name(_name_of(fetcher.dataset))
        self._source = self._recorder.name(WORK.worker)
        self._is_byte_counted = not sees_reads()
        self._all_files = self._recorder.name("(all files)")
        self._samples = _SampleRecorder(self._recorder, self._object, self._source)
        self._is_stream = hasattr(fetcher, "dataset_iter")

    @contextmanager
    def put_in(self, fetcher: Any) -> Iterator[None]:
        """Let the fetcher call wrappers that take the time."""
        name = "dataset_iter" if self._is_stream else "dataset"
        made_by, collate = getattr(fetcher, name), fetcher.collate_fn
        kind: Any = _TimedIterator if self._is_stream else _TimedDataset
        if not self._is_stream and getattr(made_by, "__getitems__", None):
            kind = _TimedBatches
        setattr(fetcher, name, kind(made_by, self._samples))
        fetcher.collate_fn = self._timed_collate(collate)
        try:
            yield
        finally:
            setattr(fetcher, name, made_by)
            fetcher.collate_fn = collate

    def begin(self) -> tuple[int, tuple[int, int, int], int] | None:
        """Return what `end` is given when the batch is finished; None: it is not recorded."""
        try:
            if WORK.times is None or WORK.times.thread != threading.get_native_id():
                WORK.times = ThreadTimes()
            times = WORK.times.now()
        except Exception as error:
            complain(f"a batch was not recorded: {error}")
            return None
        # Last, as `end` asks first: what the kernel is asked for between would count as read.
        read_bytes = sum(_bytes_read()) if self._is_byte_counted else 0
        return time.perf_counter_ns(), times, read_bytes

    @safely
    def end(self, begun: tuple[int, tuple[int, int, int], int], indices: Any, batch: Any) -> None:
        """Record a batch that is finished."""
        start_ns, before, read_bytes = begun
        end_ns = time.perf_counter_ns()
        moved = _bytes_read()[0] - read_bytes if self._is_byte_counted else 0
        assert WORK.times is not None
        after = WORK.times.now()
        count, size_bytes = batch_size_of(batch)
        about = {"step": WORK.step, "epoch": WORK.epoch, "source_id": self._source}
        self._recorder.span(
            Kind.BATCH,
            start_ns,
            end_ns,
            object_id=self._object,
            count=self._count(indices, count),
            size_bytes=size_bytes,
            cpu_ns=after[0] - before[0],
            wait_ns=after[1] - before[1],
            lock_ns=after[2] - before[2] if after[2] >= 0 else LOCK_UNKNOWN_NS,
            **about,
        )
        if self._is_byte_counted:
            self._recorder.span(
                Kind.READ, start_ns, end_ns, size_bytes=moved, object_id=self._all_files, **about
            )

    def _count(self, indices: Any, measured: int) -> int:
        """Return the samples of a batch. The last batch of a stream may have fewer than asked."""
        if not isinstance(indices, list | tuple):
            return max(1, measured)
        return min(len(indices), measured or len(indices)) if self._is_stream else len(indices)

    def _timed_collate(self, collate: Any) -> Any:
        @functools.wraps(collate)
        def timed(samples: Any) -> Any:
            start_ns = time.perf_counter_ns()
            batch = collate(samples)
            count = len(samples) if isinstance(samples, list) else 1
            self._record_collate(start_ns, count)
            return batch

        return timed

    @safely
    def _record_collate(self, start_ns: int, count: int) -> None:
        self._recorder.span(
            Kind.COLLATE,
            start_ns,
            time.perf_counter_ns(),
            count=count,
            step=WORK.step,
            epoch=WORK.epoch,
            source_id=self._source,
        )


class _SampleRecorder:
    """Records samples: all of them where they take long, one of several where they are quick."""

    def __init__(self, to: Any, object_id: int, source_id: int) -> None:
        self._recorder, self._object, self._source = to, object_id, source_id
        self._mean_ns = 0.0
        self.left = 1
        """Samples until one is recorded."""

    @safely
    def record_all(self, start_ns: int, cpu_ns: int, indices: Any) -> None:
        """Record samples that were made in one go."""
        self._recorder.span(
            Kind.SAMPLE,
            start_ns,
            time.perf_counter_ns(),
            object_id=self._object,
            source_id=self._source,
            offset=indices[0] if type(indices[0]) is int else -1,
            count=len(indices),
            cpu_ns=time.thread_time_ns() - cpu_ns,
            step=WORK.step,
            epoch=WORK.epoch,
        )

    @safely
    def record(self, start_ns: int, cpu_ns: int, index: Any) -> None:
        """Record a sample that began at a time, and decide which one is the next."""
        end_ns = time.perf_counter_ns()
        took_ns = end_ns - start_ns
        self._mean_ns += (took_ns - self._mean_ns) * 0.1 if self._mean_ns else took_ns
        every = 1
        if self._mean_ns < _ALWAYS_NS:
            every = max(1, int(_ROW_NS / (_SHARE * self._mean_ns)) + 1)
        self.left = every
        self._recorder.span(
            Kind.SAMPLE,
            start_ns,
            end_ns,
            object_id=self._object,
            source_id=self._source,
            offset=index if type(index) is int else -1,
            count=1,
            cpu_ns=time.thread_time_ns() - cpu_ns,
            step=WORK.step,
            epoch=WORK.epoch,
        )


class _TimedDataset:
    """A map-style data set whose samples are timed."""

    def __init__(self, dataset: Any, samples: _SampleRecorder) -> None:
        self._dataset, self._samples = dataset, samples

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def __getitem__(self, index: Any) -> Any:
        samples = self._samples
        samples.left -= 1
        if samples.left > 0:
            return self._dataset[index]
        cpu_ns, start_ns = time.thread_time_ns(), time.perf_counter_ns()
        sample = self._dataset[index]
        samples.record(start_ns, cpu_ns, index)
        return sample


class _TimedBatches(_TimedDataset):
    """A map-style data set that makes the samples of a batch in one go."""

    def __getitems__(self, indices: Any) -> Any:
        cpu_ns, start_ns = time.thread_time_ns(), time.perf_counter_ns()
        made = self._dataset.__getitems__(indices)
        self._samples.record_all(start_ns, cpu_ns, indices)
        return made


class _TimedIterator:
    """The iterator of an iterable data set, whose samples are timed."""

    def __init__(self, iterator: Any, samples: _SampleRecorder) -> None:
        self._iterator, self._samples = iterator, samples

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def __iter__(self) -> _TimedIterator:
        return self

    def __next__(self) -> Any:
        samples = self._samples
        samples.left -= 1
        if samples.left > 0:
            return next(self._iterator)
        cpu_ns, start_ns = time.thread_time_ns(), time.perf_counter_ns()
        sample = next(self._iterator)
        samples.record(start_ns, cpu_ns, None)
        return sample


def _name_of(dataset: Any) -> str:
    kind = type(dataset)
    return f"{kind.__module__}.{kind.__qualname__}"


def _bytes_read() -> tuple[int, int]:
    """Return the bytes that this thread has read by system calls, and those that this look read."""
    try:
        if WORK.io_file is None or WORK.io_thread != threading.get_native_id():
            # Kept open, as opening it takes longer than reading. It is this thread's alone.
            WORK.io_file = open("/proc/thread-self/io", "rb", buffering=0)  # noqa: PTH123, SIM115
            WORK.io_thread = threading.get_native_id()
        data = os.pread(WORK.io_file.fileno(), 512, 0)
    except OSError:
        return 0, 0
    return int(data[7 : data.index(b"\n")]), len(data)  # Behind `rchar: `.


# -- pinning ------------------------------------------------------------------------------------


def hook_pinning(module: Any) -> None:
    """Record how long batches take into page-locked memory."""
    original = module.pin_memory
    depth = threading.local()

    @functools.wraps(original)
    def pin_memory(data: Any, *arguments: Any, **options: Any) -> Any:
        if getattr(depth, "is_inside", False):  # It calls itself for the parts of a batch.
            return original(data, *arguments, **options)
        depth.is_inside = True
        start_ns = time.perf_counter_ns()
        try:
            return original(data, *arguments, **options)
        finally:
            depth.is_inside = False
            _record_pinned(start_ns, data)

    module.pin_memory = pin_memory


@safely
def _record_pinned(start_ns: int, data: Any) -> None:
    end_ns = time.perf_counter_ns()
    count, size_bytes = batch_size_of(data)
    recorder().span(Kind.PIN, start_ns, end_ns, count=count, size_bytes=size_bytes)
