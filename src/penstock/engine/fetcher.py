"""The flow carried out: threads read from stores, and report each outcome to the flow.

Reads are wanted with the number of the job that needs them, which the flow calls its step. The flow
decides when each read begins, from which source, how many are in flight, and which get a second
attempt (a hedge); a thread carries it out and reports. Threads are started as they are needed and
live as long as the fetcher. A question to a peer takes no thread: the answer may take long, because
the peer may fetch the bytes itself first, and the thread that receives it reports it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple, Protocol

from penstock.clock import Clock, SystemClock
from penstock.flow import (
    Action,
    Arrived,
    Begin,
    Consumed,
    Deferred,
    Failed,
    Fetch,
    Flow,
    FlowRates,
    SourceRates,
    Throttled,
    Tick,
    Waiting,
    Wanted,
)
from penstock.flow.budget import REQUESTS_FIRST
from penstock.flow.choice import peer_of
from penstock.flow.limit import MARKS_MAX
from penstock.flow.live import STORE, LiveRates
from penstock.flow.reading import gap_bytes, reads_block_whole, stores_of
from penstock.storage.retry import waiting_since
from penstock.trace import Flag, Recorder

_JOIN_S = 1.0
"""How long the end of a run waits for reads in flight; a read that hangs is left behind."""
_HEDGE_THREADS = 8


class ReadOutcome(NamedTuple):
    """The outcome of a read that succeeded."""

    moved: bool
    """Whether bytes came over the network; else they were found on the node."""
    num_retries: int = 0
    """Number of retries at the store."""


class SourceRead(Protocol):
    """Bytes to be fetched. Any thread calls it; a second one too while the first call is slow."""

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources that have the bytes: peers first, the store last."""
        ...

    @property
    def size_bytes(self) -> int:
        """The number of bytes."""
        ...

    @property
    def staged(self) -> bool:
        """Whether the bytes wait in memory for their job."""
        ...

    def __call__(self, attempt: int) -> ReadOutcome:
        """Read the bytes from the store; an attempt after the first may run beside earlier ones."""
        ...


Done = Callable[[BaseException | None], None]
"""Is called once, with the error or None."""


class PeerRead(SourceRead, Protocol):
    """Bytes that other nodes may have."""

    def ask(self, source: str, deferred: Callable[[], None], answered: Done) -> None:
        """Ask a peer for the bytes, without waiting.

        `deferred` is called if the peer says that it will answer later; `answered` is called once
        in any case.
        """
        ...


class ReadPurpose(NamedTuple):
    """Step of the training, epoch and flags of a read in a trace."""

    step: int = -1
    epoch: int = -1
    flags: int = 0


NOBODY = ReadPurpose()
"""The purpose of reads that belong to no step."""


class _Fetching:
    """A read that is wanted and not over, or still in flight somewhere."""

    __slots__ = ("began_s", "done", "error", "is_of_peer", "is_over", "num_out", "read", "what_for")

    def __init__(self, read: SourceRead, done: Done, what_for: ReadPurpose) -> None:
        self.read = read
        self.what_for = what_for
        self.is_of_peer = peer_of(read.sources[0]) is not None
        self.done = done
        self.num_out = 0
        self.began_s = 0.0
        """When its store was first asked; 0 before."""
        self.is_over = False
        self.error: BaseException | None = None


class Fetcher:
    """Carries out reads when the flow says so."""

    def __init__(
        self,
        flow: Flow,
        *,
        requests_max: int,
        live: LiveRates | None = None,
        clock: Clock | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._flow = flow
        self._recorder = recorder
        self._live = live
        self._requests_max = requests_max
        self._threads_max = requests_max + _HEDGE_THREADS + 1
        self.requests_limit = REQUESTS_FIRST
        """The number of requests that the flow wants in flight now."""
        self._clock = clock or SystemClock()
        # Guards the flow and all state below. Reentrant, because the garbage collector may call
        # `stop` inside one of our own threads.
        self._lock = threading.RLock()
        self._begun = threading.Condition(self._lock)  # Threads wait for `_ready` to have a read.
        self._ready: deque[Begin] = deque()
        self._fetching: dict[int, _Fetching] = {}
        self._num_wanted = 0
        self._num_of_peers = 0
        """Wanted reads whose first source is a peer: they do not keep the store busy."""
        self._num_idle = 0
        self._tick = threading.Condition(self._lock)  # Wakes `_keep_time` for an earlier time.
        self._wake_s = inf
        """When the flow is due to be woken next."""
        self._threads: list[threading.Thread] = []
        self._is_stopped = False

    @property
    def num_waiting(self) -> int:
        """The number of reads that are wanted from stores and not done."""
        return len(self._fetching) - self._num_of_peers

    @property
    def look_ahead_bytes(self) -> int:
        """Bytes that should be planned ahead now."""
        with self._lock:
            return self._flow.look_ahead_bytes

    def rates(self) -> FlowRates:
        """Return the rates that the flow has measured."""
        with self._lock:
            return self._flow.rates()

    def gap_bytes(self, range_bytes: int) -> int:
        """Return the largest gap that is cheaper to read than to split a request at."""
        return gap_bytes(self.stores(), range_bytes, requests_max=self._requests_max)

    def reads_whole(self, used_share: float, num_samples: int, size_bytes: int) -> bool:
        """Return whether reading a whole block is cheaper than the share that this rank uses."""
        return reads_block_whole(
            self.stores(),
            used_share,
            num_samples=num_samples,
            size_bytes=size_bytes,
            requests_max=self._requests_max,
        )

    def stores(self) -> list[SourceRates]:
        """Return the rates of stores that the flow has measured."""
        return stores_of(self.rates())

    # -- called by the runner ----------------------------------------------------------------

    def want(
        self, wants: Sequence[tuple[SourceRead, Done]], job: int, what_for: ReadPurpose = NOBODY
    ) -> None:
        """Want reads for the job of a number; each read's function is called once it is done."""
        if not wants:
            return
        with self._lock:
            fetches = []
            for read, done in wants:
                number = self._num_wanted
                self._num_wanted += 1
                fetching = self._fetching[number] = _Fetching(read, done, what_for)
                self._num_of_peers += fetching.is_of_peer
                fetches.append(
                    Fetch(
                        number=number,
                        step=job,  # The steps of the flow are the jobs of this run.
                        size_bytes=read.size_bytes,
                        sources=read.sources,
                        staged=read.staged,
                    )
                )
            self._act(self._flow.on(Wanted(fetches=tuple(fetches), at_s=self._clock.now_s())))

    def consumed(self, job: int) -> None:
        """Tell the flow that the batches of a job were taken."""
        with self._lock:
            self._act(self._flow.on(Consumed(step=job, at_s=self._clock.now_s())))

    def waiting(self, job: int) -> None:
        """Tell the flow that the training loop waits for a job."""
        with self._lock:
            self._act(self._flow.on(Waiting(step=job, at_s=self._clock.now_s())))

    def stop(self) -> None:
        """End all threads; waits a moment for reads in flight, and drops their bytes."""
        with self._lock:
            self._is_stopped = True
            self._ready.clear()
            self._fetching.clear()
            self._begun.notify_all()
            self._tick.notify_all()
            threads = list(self._threads)
        if threading.current_thread() in threads:
            return
        deadline_s = self._clock.now_s() + _JOIN_S
        for thread in threads:
            thread.join(max(0.0, deadline_s - self._clock.now_s()))

    # -- threads -----------------------------------------------------------------------------

    def _act(self, actions: Sequence[Action], num_free: int = 0) -> list[_Fetching]:
        """Take up actions; return the reads that the flow has given up. The caller holds the lock.

        `num_free` threads are about to look for work anyway, so as many fewer are woken.
        """
        given_up: list[_Fetching] = []
        num_new = 0
        for action in actions:
            if not isinstance(action, Begin):
                given_up += filter(None, [self._fetching.get(action.number)])
            elif action.number in self._fetching:
                self._fetching[action.number].num_out += 1
                self._ready.append(action)
                num_new += 1
        if num_new > num_free:
            # A thread for each read that no idle thread will take: a read blocks its thread.
            missing = len(self._ready) - num_free - self._num_idle
            for _ in range(min(missing, self._threads_max - len(self._threads))):
                self._start_thread(self._loop)
            self._begun.notify(num_new - num_free)
        wake_s = self._flow.wake_s
        if wake_s is not None and wake_s < self._wake_s:
            self._tick.notify()
        return given_up

    def _start_thread(self, loop: Callable[[], None]) -> None:
        if self._is_stopped:
            return
        if not self._threads and loop != self._keep_time:
            self._start_thread(self._keep_time)
        name = f"penstock-read-{len(self._threads)}" if loop != self._keep_time else "penstock-time"
        thread = threading.Thread(target=loop, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _loop(self) -> None:
        while True:
            with self._begun:
                while not (self._is_stopped or self._ready):
                    self._num_idle += 1
                    self._begun.wait()
                    self._num_idle -= 1
                if self._is_stopped:
                    return
                begin = self._ready.popleft()
                fetching = self._fetching.get(begin.number)
            if fetching is not None:
                self._do(begin, fetching)
            fetching = None  # Else this frame would keep its bytes while the thread is idle.

    def _keep_time(self) -> None:
        """Send the flow a tick at each time that it has asked for."""
        with self._tick:
            while not self._is_stopped:
                wake_s = self._flow.wake_s
                self._wake_s = inf if wake_s is None else wake_s
                late_s = self._clock.now_s() - self._wake_s
                if late_s >= 0:
                    self._act(self._flow.on(Tick(at_s=self._clock.now_s())))
                else:
                    self._tick.wait(None if wake_s is None else -late_s)

    def _do(self, begin: Begin, fetching: _Fetching) -> None:
        if self._recorder is not None:
            step, epoch, flags = fetching.what_for
            # A hedge runs beside another attempt; if that has failed, this is a plain retry.
            is_hedge = begin.attempt > 0 and fetching.num_out > 1
            self._recorder.working_on(step, epoch, flags | Flag.HEDGE * is_hedge)
        if peer_of(begin.source) is not None:
            self._ask(begin, fetching)
            return
        outcome, error = ReadOutcome(moved=False), None
        begin_s, in_flight = self._clock.now_s(), self._flow.in_flight(begin.source)
        if not fetching.is_over:
            try:
                # All attempts of a fetch share one deadline, which began with the first attempt.
                fetching.began_s = fetching.began_s or begin_s
                with waiting_since(fetching.began_s):
                    outcome = fetching.read(begin.attempt)
            except BaseException as caught:  # Raised again in the thread that asks for the batch.
                error = caught
        if self._live is not None and outcome.moved and not outcome.num_retries:
            self._observe(fetching.read.size_bytes, begin_s, in_flight)
        for finished in self._report(begin, fetching, outcome, error, num_free=1):
            finished.done(finished.error)

    def _ask(self, begin: Begin, fetching: _Fetching) -> None:
        """Ask a peer; the thread that receives the answer reports it."""

        def deferred() -> None:
            with self._lock:
                if not self._is_stopped:
                    event = Deferred(
                        number=begin.number, attempt=begin.attempt, at_s=self._clock.now_s()
                    )
                    self._act(self._flow.on(event))

        def answered(error: BaseException | None) -> None:
            outcome = ReadOutcome(moved=error is None)
            # Not one of our threads calls this, so `num_free` is 0: none looks for work next.
            for finished in self._report(begin, fetching, outcome, error, num_free=0):
                finished.done(finished.error)

        if fetching.is_over:
            answered(None)
            return
        read: PeerRead = fetching.read  # type: ignore[assignment]  # Its source is a peer.
        try:
            read.ask(begin.source, deferred, answered)
        except BaseException as caught:  # Raised again in the thread that asks for the batch.
            answered(caught)

    def _observe(self, size_bytes: int, begin_s: float, in_flight: int) -> None:
        assert self._live is not None
        at_s = self._clock.now_s()
        with self._lock:
            self._live.observe(
                STORE,
                size_bytes=size_bytes,
                seconds=at_s - begin_s,
                in_flight=max(1, in_flight),
                at_s=at_s,
            )

    def _report(
        self,
        begin: Begin,
        fetching: _Fetching,
        outcome: ReadOutcome,
        error: BaseException | None,
        *,
        num_free: int,
    ) -> list[_Fetching]:
        """Tell the flow the outcome of a read; return the reads that are over now."""
        with self._lock:
            if self._is_stopped:
                return []
            at_s = self._clock.now_s()
            fetching.num_out -= 1
            if peer_of(begin.source) is None:
                self.requests_limit = self._flow.limit(begin.source)
            over = []
            num_marks = outcome.num_retries + int(getattr(error, "retryable", False))
            for _ in range(min(num_marks, MARKS_MAX)):
                over += self._act(self._flow.on(Throttled(source=begin.source, at_s=at_s)))
            if error is None:
                arrived = Arrived(
                    number=begin.number, attempt=begin.attempt, at_s=at_s, moved=outcome.moved
                )
                over += [fetching, *self._act(self._flow.on(arrived), num_free=num_free)]
            else:
                fetching.error = error
                failed = Failed(number=begin.number, attempt=begin.attempt, at_s=at_s)
                over += self._act(self._flow.on(failed), num_free=num_free)
            fresh = [f for f in over if not f.is_over]
            for f in fresh:
                f.is_over = True
                if f is fetching and error is None:
                    f.error = None
            if fetching.is_over and fetching.num_out == 0:
                gone = self._fetching.pop(begin.number, None)
                self._num_of_peers -= gone is not None and gone.is_of_peer
            return fresh
