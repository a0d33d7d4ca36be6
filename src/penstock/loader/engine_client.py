"""The engine in its own process, as the training process sees it.

The training process only takes batches over: a batch arrives as a short message, and its arrays
look into shared memory. No thread is started here. When the user drops an array, its finalizer
notes that, and the engine is told with the next batch. `EngineRun` is one iteration.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import cloudpickle

from penstock.dataset.dataset import Dataset
from penstock.dataset.formats import AddedFormats
from penstock.dataset.mixture import datasets_of
from penstock.engine.build import sample_options_of
from penstock.engine.channel import ChannelClosed, FrameChannel, channel_pair
from penstock.engine.convert import pinned_memory
from penstock.engine.engine import RunStart
from penstock.engine.messages import (
    BeginRun,
    EngineAnswer,
    EnginePayload,
    EngineQuestion,
    EngineReport,
    FrontNotice,
    LogLine,
    LossNotice,
    MadeBatches,
    MeetingCall,
)
from penstock.engine.opening import number_of_meeting, rendezvous_for
from penstock.engine.options import LoaderOptions
from penstock.engine.peers.forks import close_in_children
from penstock.engine.process_errors import packed_error, unpacked_error
from penstock.engine.shared import Inbox, SharedParcel, SharedSegment, SharedSegments
from penstock.engine.stats import ClusterStats, EngineStats
from penstock.engine.worker import WorkerJob
from penstock.errors import EngineError, OptionError
from penstock.loader.starter import new_spawner
from penstock.machine import Machine
from penstock.world import World

_CLOSE_S = 15.0
"""How long engine and workers may take to end."""
_LARGE = ("torch", "torchvision")
"""Packages that take long to import, and start no thread when they are imported."""
_WORKER_BYTES_MAX, _WORKER_SHARE = 32 << 20, 64
"""Memory that a worker keeps for the next samples: at most this, and one part in this many of the
look-ahead."""
_log = logging.getLogger("penstock.loader")


class _PayloadPacker(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles the payload for processes of this machine: indexes travel as file names."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Dataset):
            return obj.reduced(by_name=False)
        return super().reducer_override(obj)


def payload_of(options: LoaderOptions, num_workers: int | None) -> bytes:
    """Return the pickled payload of engine and workers; raises if it cannot be pickled."""
    job = WorkerJob(
        dataset=options.dataset,
        sample_options=sample_options_of(options),
        kept_bytes=min(_WORKER_BYTES_MAX, options.look_ahead_bytes // _WORKER_SHARE),
        at_random=options.order.mode != "sequential",
        trace=None if options.trace is None else str(options.trace),
    )
    out = io.BytesIO()
    payload = EnginePayload(options=options, worker_job=job, num_workers=num_workers)
    # Formats first: the data set is unpickled with them.
    _PayloadPacker(out, protocol=5).dump((AddedFormats(), payload))
    return out.getvalue()


_clients: weakref.WeakSet[EngineClient] = weakref.WeakSet()


def _after_fork_in_parent() -> None:
    for client in list(_clients):
        client.forked()


os.register_at_fork(after_in_parent=_after_fork_in_parent)


class EngineClient:
    """One engine with its spawner and workers; starts with the first iteration."""

    def __init__(self, options: LoaderOptions, payload: bytes) -> None:
        self._options = options
        self._payload = payload
        self._pid = os.getpid()
        self._spawner: FrameChannel | None = None
        self._control: FrameChannel | None = None
        self._batches: FrameChannel | None = None
        self._inbox = Inbox(SharedSegments())
        self._released: deque[tuple[int, int]] = deque()
        """References that were dropped here. Finalizers fill it, so it has no lock: a deque appends
        atomically."""
        self._looked_at: set[tuple[int, int]] = set()
        """References of parcels that arrays of this process look into."""
        self._seen_by_forks: set[tuple[int, int]] = set()
        """References that a forked child may look at, even after they are dropped here."""
        self._num_runs = 0
        self._first_engine_pid: int | None = None
        """The process of the engine that met the other nodes; a later one replaces it."""
        self.run_id: str | None = None
        self._world = World()
        self.engine_pid = 0
        self._pinned: Any = None
        """Page-locks segments, once this process uses a GPU."""
        self.waited_s = 0.0
        """Time that was spent waiting for messages."""
        self._counted_before = self._counted_now = EngineStats()
        """The counts of engines that are gone, and of the present one."""
        self._told = EngineReport(seen=ClusterStats(), counted=EngineStats(), events=())
        self.events: list[str] = []
        """Ends of engines, in sentences."""
        self._open: list[FrameChannel] = []
        """The channels to the engine: it ends when they are closed."""
        self._finalizer: Callable[[], Any] | None = None
        # Held for a question and its answer on the control channel. The garbage collector may call
        # `end` inside of a question, so `end` does not wait for this lock.
        self._asking = threading.Lock()
        # Held while the batches channel is read or written: an iteration may have been replaced by
        # another one while a thread of it still waits for a batch.
        self._receiving = threading.RLock()
        self._early: deque[MadeBatches] = deque()
        """Messages of the latest iteration that a thread of the one before has received."""
        self.losses: deque[LossNotice] = deque()
        """Losses that were observed since the engine was last told."""
        self.beginning = threading.RLock()
        """Held while an iteration begins, and while a dead engine is replaced."""
        close_in_children(self)
        _clients.add(self)

    # -- starting ----------------------------------------------------------------------------

    def _start(self) -> None:
        if self._spawner is None:
            self._start_spawner()
        assert self._spawner is not None
        self._control, control = channel_pair()
        self._batches, batches = channel_pair()
        self._open[:] = [self._control, self._batches]
        # A new inbox: segments of a dead engine stay mapped as long as arrays look into them.
        self._inbox = Inbox(SharedSegments())
        self._released = deque()
        self._early.clear()
        self._looked_at, self._seen_by_forks = set(), set()
        self._pinned = None
        with control, batches:
            self._spawner.send(b"E", [control.fileno(), batches.fileno()])
        frame = self._from_spawner()
        self.engine_pid = int(frame[1:])
        self._hand_over_passed()

    def _hand_over_passed(self) -> None:
        """Give the engine the bytes that were read to index the data; they go into the tiers."""
        passed = [(n, d.passed) for n, d in enumerate(datasets_of(self._options.dataset))]
        given = [(n, p.handed_over()) for n, p in passed if p is not None]
        if given:
            self._ask("passed", [(n, r) for n, (_, r) in given], [f for _, (f, _) in given])
        for dataset in datasets_of(self._options.dataset):
            dataset.passed = None

    def _start_spawner(self) -> None:
        self._spawner = new_spawner(_modules_of(self._options, self._payload))
        self._spawner.send(b"P" + self._payload)
        frame = self._from_spawner()
        if frame[:1] == b"X":
            error = unpacked_error(bytes(frame[1:]))
            self._spawner.close()
            self._spawner = None
            raise OptionError(
                f"the data set, the transform or something it uses cannot be loaded in a worker "
                f'process ({type(error).__name__}: {error}); workers="here" runs it in this one'
            ) from error
        self._finalizer = weakref.finalize(
            self, _end, self._open, self._spawner, int(frame[1:]), self._pid
        )

    def _from_spawner(self) -> bytearray:
        try:
            if self._spawner is None:
                raise ChannelClosed("it was seen before")
            return self._spawner.receive()[0]
        except ChannelClosed:
            self._spawner = None
            raise EngineError(
                "the process that starts engine and workers is gone; what it printed says why"
            ) from None

    # -- questions ---------------------------------------------------------------------------

    def _ask(self, word: str, value: Any = None, files: Sequence[int] = ()) -> Any:
        with self._asking:
            return self._asked(word, value, files)

    def _asked(self, word: str, value: Any = None, files: Sequence[int] = ()) -> Any:
        control = self._control
        if control is None:
            raise ChannelClosed("the engine has ended")  # Another thread has taken note of it.
        question = EngineQuestion(word=word, value=value)
        control.send(pickle.dumps(question), files)
        while True:
            found = pickle.loads(control.receive()[0])
            if isinstance(found, EngineAnswer):
                if found.error is not None:
                    raise unpacked_error(found.error)
                return found.value
            self._meet(found)

    def _meet(self, call: MeetingCall) -> None:
        """Call the rendezvous for the engine: only this process can reach torch's store."""
        assert self._control is not None
        try:
            if call.method == "number":
                answer = EngineAnswer(value=number_of_meeting(self._world))
            else:
                place = rendezvous_for(self._options.meets_at, self._world)
                answer = EngineAnswer(value=getattr(place, call.method)(*call.arguments))
        except BaseException as error:
            answer = EngineAnswer(error=packed_error(error))
        self._control.send(pickle.dumps(answer))

    # -- runs --------------------------------------------------------------------------------

    def begin_at(
        self, start: RunStart, *, fetches: Sequence[int] = (), only_asked: bool = False
    ) -> int:
        """Begin an iteration of the engine, which is started if there is none; return its number.

        An engine that replaces a dead one does not meet the other nodes: they do not expect it. An
        iteration in stages passes the engine's end of the channel for its fetches.
        """
        self._world = start.world
        if self._control is None:
            self._start()
        if self._first_engine_pid is not None:
            start = replace(start, is_replacement=self._first_engine_pid != self.engine_pid)
        self._num_runs += 1
        begin = BeginRun(number=self._num_runs, begin=start, only_asked=only_asked)
        self.run_id = self._ask("begin", begin, fetches)
        self._first_engine_pid = self._first_engine_pid or self.engine_pid
        return self._num_runs

    def end(self, run: int) -> None:
        """End an iteration, if it is not over."""
        if not self._is_mine() or self._control is None:
            return
        if not self._asking.acquire(blocking=False):
            return  # A question is under way. The engine ends this run when the next one begins.
        try:
            with suppress(ChannelClosed):
                self._asked("end", run)
        finally:
            self._asking.release()

    def _is_mine(self) -> bool:
        return os.getpid() == self._pid

    def receive(self, run: int, *, taken: int, wait_s: float) -> MadeBatches:
        """Return the next message of a run; `taken` batches were taken since the last one."""
        is_told = False
        with self._receiving:
            while True:
                if run != self._num_runs:
                    return MadeBatches(run=run)  # Another iteration has begun, which ends this one.
                if self._early:
                    early = self._early.popleft()
                    if early.run == run:
                        return early
                    self._drop(early)
                    continue
                batches = self._batches
                if batches is None:
                    raise ChannelClosed("the loader is closed")  # Another thread has closed it.
                is_ready = batches.is_ready()
                if not is_told or not is_ready:
                    self.tell(run, 0 if is_told else taken, is_waiting=not is_ready, wait_s=wait_s)
                    is_told = True
                begin_s = time.perf_counter()
                try:
                    frame, files = batches.receive()
                finally:
                    self.waited_s += 0.0 if is_ready else time.perf_counter() - begin_s
                found = pickle.loads(frame)
                if isinstance(found, LogLine):
                    logging.getLogger(found.name).log(found.level, "%s", found.text)
                    continue
                fresh = self._inbox.add(found.fresh, files)
                self._inbox.forget(found.gone)
                self._pin(fresh)
                assert isinstance(found, MadeBatches)
                self._counted_now = found.counted or self._counted_now
                if found.run == self._num_runs:
                    self._early.append(found)
                else:
                    self._drop(found)

    def _pin(self, fresh: list[SharedSegment]) -> None:
        """Page-lock new segments, if a GPU is in use; all segments, the first time."""
        if self._pinned is None:
            self._pinned = pinned_memory()
            fresh = self._inbox.segments
        if self._pinned is not None:
            for segment in fresh:
                self._pinned.lock(segment.memory, segment.address, segment.size_bytes)

    def tell(self, run: int, taken: int, *, wait_s: float, is_waiting: bool = False) -> None:
        """Tell the engine which batches were taken and which references were dropped."""
        with self._receiving:
            batches = self._batches
            if batches is None:
                return
            released = [self._released.popleft() for _ in range(len(self._released))]
            spoilt = (
                [r for r in released if r in self._seen_by_forks] if self._seen_by_forks else []
            )
            if spoilt:
                self._seen_by_forks.difference_update(spoilt)
                released = [r for r in released if r not in spoilt]
            if self._pinned is not None:
                released = self._pinned.free(released)
            losses = [self.losses.popleft() for _ in range(len(self.losses))]
            notice = FrontNotice(
                run=run,
                num_taken=taken,
                is_waiting=is_waiting,
                wait_s=wait_s,
                released=released,
                spoilt=spoilt,
                losses=losses,
            )
            batches.send(pickle.dumps(notice, 5))

    def _drop(self, made: MadeBatches) -> None:
        """Release the memory of a message for an iteration that is over."""
        self._released.extend((made.number, i) for i in range(len(made.references or ())))

    def opened(self, made: MadeBatches) -> list[Any]:
        """Return the results of a message."""
        assert made.data is not None
        parcel = SharedParcel(made.data, made.references or [])
        released, looked_at, number = self._released, self._looked_at, made.number
        looked_at.update((number, i) for i in range(len(parcel.references)))

        def release(index: int) -> None:
            released.append((number, index))
            looked_at.discard((number, index))

        value = self._inbox.open(parcel, release)
        return [value] if made.is_joined else list(value)

    @property
    def counted(self) -> EngineStats:
        """The counts of all engines of this loader."""
        return self._counted_before + self._counted_now

    # -- ends --------------------------------------------------------------------------------

    def died(self) -> str:
        """Close the channels of a dead engine; return a sentence that says how it ended."""
        self._close_channels()
        self._counted_before, self._counted_now = self.counted, EngineStats()
        self.events += self._told.events
        self._told = replace(self._told, events=())
        try:
            frame = self._from_spawner()
        except EngineError:
            return "the engine and the process that starts it have ended"
        code = int(frame[1:])
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"
        return f"the engine (process {self.engine_pid}) was ended {how}"

    def told(self) -> EngineReport:
        """Return the engine's report, or its latest one; counts are those of all engines."""
        told = self._asked_now("stats")
        if told is not None:
            self._take(told)
        told = self._told
        return replace(told, counted=self.counted, events=(*self.events, *told.events))

    def _take(self, told: EngineReport) -> None:
        self._told = told
        self._counted_now = told.counted

    def machine(self) -> Machine | None:
        """Return the machine as the engine sees it."""
        found: Machine | None = self._asked_now("machine")
        return found

    def _asked_now(self, word: str) -> Any:
        """Ask the engine if there is one; None if there is none or it has just died."""
        if self._control is None or not self._is_mine():
            return None
        with suppress(ChannelClosed):
            return self._ask(word)
        return None

    def close(self) -> None:
        """End engine, workers and spawner."""
        if not self._is_mine():
            return
        with self.beginning:
            if self._control is not None:
                with suppress(ChannelClosed, OSError):
                    self._take(self._ask("close"))
            self._close_channels()
            if self._finalizer is not None:
                self._finalizer()
            self._spawner = self._finalizer = None

    def _close_channels(self) -> None:
        for channel in (self._control, self._batches):
            if channel is not None:
                channel.close()
        self._control = self._batches = None

    def forked(self) -> None:
        """Note that a forked child sees the batches that are here now, for as long as it lives.

        A fork does not copy shared memory, so memory that a child may look at is never used again.
        """
        self._seen_by_forks |= self._looked_at

    def close_after_fork(self) -> None:
        """Close the sockets in a forked child; else the engine would not see the parent's end."""
        self._close_channels()
        if self._spawner is not None:
            self._spawner.close()


def _modules_of(options: LoaderOptions, payload: bytes) -> tuple[str, ...]:
    """Return the modules that each worker needs and that are safe to import before a fork."""
    named = _named_by(options)
    used = [n for n in _LARGE if n in sys.modules and (n in named or n.encode() in payload)]
    if used and "torch" in sys.modules:
        used.append("penstock.loader.torch.tensors")
    return tuple(used) if options.transform is None else ("numpy.random", *used)


def _named_by(options: LoaderOptions) -> set[str]:
    """Return the packages that the modules of the user's functions have imported.

    Such a function is pickled as its name, so the payload does not show what it uses.
    """
    functions = [options.transform, options.collate]
    for bound in options.dataset.bound[:1]:
        functions += bound.decoders.values()
    modules = {getattr(f, "__module__", None) or type(f).__module__ for f in functions if f}
    return {
        str(getattr(value, "__name__", "")).partition(".")[0]
        for name in modules - {"__main__"}
        for value in list(vars(sys.modules.get(name, sys)).values())
    }


def _end(open_: list[FrameChannel], spawner: FrameChannel, spawner_pid: int, pid: int) -> None:
    """End a spawner, and with it engine and workers; wait until they are gone."""
    if os.getpid() != pid:
        return  # After a fork it belongs to the parent.
    for channel in open_:
        channel.close()
    with suppress(ChannelClosed):
        spawner.send(b"Q")
        while spawner.is_ready(_CLOSE_S):
            spawner.receive()  # Raises `ChannelClosed` once the spawner is gone.
        with suppress(ProcessLookupError):
            os.kill(spawner_pid, signal.SIGKILL)  # Its children die with it.
    spawner.close()
