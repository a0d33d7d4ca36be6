"""An iteration in stages: the bytes of a batch, then the batch.

A step program has one lane for fetches and one for decoding. It asks twice for each batch, from two
threads: for its bytes, and for the batch itself. The work is done where the loader makes its
batches: by threads of this process, or by an engine and workers of their own. The thread that asks
waits, and learns from when to when the work was done.
"""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from penstock.engine.channel import ChannelClosed, FrameChannel, channel_pair
from penstock.engine.engine import RunStart
from penstock.engine.fetch_answers import FetchedJob
from penstock.engine.job import BatchSlot
from penstock.engine.messages import LossNotice
from penstock.engine.peers.forks import close_in_children
from penstock.engine.process_errors import unpacked_error
from penstock.engine.runner import Runner
from penstock.errors import StateError
from penstock.loader.engine_client import EngineClient
from penstock.loader.engine_run import EngineRun, Scores
from penstock.loader.iteration import Iteration, ThreadedRun
from penstock.order.importance import StepLosses


class StagedThreadedRun(ThreadedRun):
    """Batches in stages that are made in this process, by threads."""

    def __init__(self, runner: Runner, *, only_asked: bool) -> None:
        super().__init__(runner)
        self._only_asked = only_asked
        self._num_jobs = 0
        if only_asked:
            runner.allow(0)

    def fetched(self, num_asked: int) -> FetchedJob | None:
        """Return the next job when its bytes are here; None if there are not so many batches.

        The job that is returned brings the last batch asked for, and counts it and those after it.
        """
        if self._only_asked:
            self.runner.allow(num_asked)
        job = self.runner.fetched(self._num_jobs)
        if job is None:
            return None
        self._num_jobs += 1
        return FetchedJob(num_batches=max(1, len(job.slots)), fetch_ns=job.fetch_ns)


class _Fetches:
    """Fetches of one run of an engine; batches are counted from the beginning of the iteration."""

    def __init__(self, channel: FrameChannel, num_before: int) -> None:
        self.channel = channel
        self._num_before = num_before
        """Batches that earlier engines of this iteration have delivered."""
        self._num_asked = self._num_fetched = num_before

    def ask(self, num_asked: int) -> None:
        """Have the bytes of so many batches fetched."""
        if num_asked > self._num_asked:
            self.channel.send(str(num_asked - self._num_before).encode())
            self._num_asked = num_asked

    def fetched(self, num_asked: int) -> FetchedJob | None:
        """Return the job that brings the last of so many batches."""
        self.ask(num_asked)
        job = FetchedJob()
        while self._num_fetched < num_asked:
            job = FetchedJob(*pickle.loads(self.channel.receive()[0]))
            if job.error is not None:
                raise unpacked_error(job.error)
            if not job.num_batches:
                return None
            self._num_fetched += job.num_batches
        return job._replace(num_batches=self._num_fetched - num_asked + 1)


class StagedEngineRun(EngineRun):
    """Batches in stages that an engine in its own process makes."""

    def __init__(
        self,
        client: EngineClient,
        start: RunStart,
        scores: Scores | None = None,
        *,
        only_asked: bool,
    ) -> None:
        self._only_asked = only_asked
        self._num_asked = 0
        self._is_window_over = False
        # Held while a batch is taken, and while a dead engine is replaced: the new engine begins
        # behind the last batch that was taken, which must not change meanwhile.
        self._taking = threading.Lock()
        self._fetches: _Fetches | None = None
        super().__init__(client, start, scores)
        close_in_children(self)

    def _begin_at(self, start: RunStart) -> int:
        mine, theirs = channel_pair()
        fetches = _Fetches(mine, self._num_delivered)
        with theirs, ExitStack() as undo:
            undo.callback(mine.close)
            ends = [theirs.fileno()]
            number = self._client.begin_at(start, fetches=ends, only_asked=self._only_asked)
            # A thread that was told that bytes are here waits for the batch and does not ask again,
            # so the new engine must be asked for all that the old one was asked for.
            fetches.ask(self._num_asked)
            undo.pop_all()
        if self._fetches is not None:
            self._fetches.channel.close()
        self._fetches = fetches
        return number

    def next(self) -> list[tuple[BatchSlot, Any]] | None:
        """Return the next batches, or None when there are no more."""
        with self._taking:
            made = super().next()
            # At once, and not with the next batch: the next fetch comes before that, and it may
            # wait for the memory of these batches.
            with suppress(ChannelClosed):  # The next fetch or batch finds the engine dead.
                self._client.tell(self._number, self._num_taken, wait_s=self.wait_s)
            self._num_taken = 0
            return made

    def observed(self, steps: Sequence[StepLosses], closes_window: bool) -> None:
        """Tell the engine about losses, with the next batch or `tell_window`.

        Not here: another thread may be replacing an engine that has died, and what is told under
        the number of its run would be lost.
        """
        self._client.losses.append(LossNotice(steps, closes_window))
        self._is_window_over = self._is_window_over or closes_window

    def tell_window(self) -> None:
        """Tell the engine at once that a window is over: a fetch may wait for a later one."""
        if not self._is_window_over:
            return  # Else the loop would wait for `_taking` while another thread takes a batch.
        self._is_window_over = False
        with self._taking, suppress(ChannelClosed):
            self._client.tell(self._number, 0, wait_s=self.wait_s)

    def fetched(self, num_asked: int) -> FetchedJob | None:
        """Return the job that brings the last of so many batches when its bytes are here."""
        self._num_asked = num_asked
        while True:
            fetches = self._fetches
            assert fetches is not None
            try:
                return fetches.fetched(num_asked)
            except ChannelClosed:
                # The engine has died. A thread that takes a batch sees that as well; whichever of
                # the two has the lock first begins again.
                with self._taking:
                    if self._fetches is fetches and not self._begin_again():
                        return None

    def close_after_fork(self) -> None:
        """Close the channel in a forked child."""
        if self._fetches is not None:
            self._fetches.channel.close()

    def _end(self) -> None:
        super()._end()
        if self._fetches is not None:
            # Even if the engine could not be told: a thread of this process may wait for it.
            self._fetches.channel.shut_down()
            self._fetches.channel.close()


@dataclass(slots=True, kw_only=True)
class Ticket:
    """One batch whose bytes are here.

    Times are those of `perf_counter_ns`. On Linux that is CLOCK_MONOTONIC, one clock for all
    processes of a machine, so the times of an engine need no translation.
    """

    fetch_ns: tuple[int, int]
    """From when to when its bytes came; no time where they were near."""
    decode_ns: tuple[int, int] | None = None
    """From when to when it was made, once it is."""


class StagedIteration:
    """An iteration whose batches are asked for twice: for their bytes, and when they are made.

    Batches are fetched and made ahead of the caller. With `only_asked`, nothing is read for a batch
    that was not asked for: the caller decides when the network is used. `fetch` and `decode` may be
    called by two threads, each in order. The cursor moves when `used` is called, not when a batch
    is made.
    """

    def __init__(self, iteration: Iteration) -> None:
        assert isinstance(iteration.run, StagedThreadedRun | StagedEngineRun)
        self._iteration = iteration
        self._run = iteration.run
        self._num_asked = 0
        self._left: deque[FetchedJob] = deque()
        """The latest job, once for each of its batches that was not asked for yet."""
        self._made: deque[BatchSlot] = deque()
        """Slots of the batches that are made and not used yet."""

    def fetch(self) -> Ticket:
        """Return when the bytes of the next batch are here; StopIteration after the last."""
        self._iteration.check_process()
        self._num_asked += 1
        if not self._left:
            job = self._run.fetched(self._num_asked)
            if job is None:
                raise StopIteration if self._iteration.is_open else _ended_early()
            self._left.extend([job] * job.num_batches)
        return Ticket(fetch_ns=self._left.popleft().fetch_ns)

    def decode(self, ticket: Ticket) -> Any:
        """Return the batch of the oldest ticket."""
        try:
            slot, batch = self._iteration.made()
        except StopIteration:
            raise _ended_early() from None  # Its ticket says that there is one.
        ticket.decode_ns = self._run.decode_ns
        self._made.append(slot)
        return batch

    def used(self) -> None:
        """Record that the oldest batch that was made has been used; this moves the cursor."""
        if self._made:
            self._iteration.deliver(self._made.popleft())
            if isinstance(self._run, StagedEngineRun):
                self._run.tell_window()

    def close(self) -> None:
        """End the run; batches that were made and not used are not delivered."""
        self._made.clear()
        self._iteration.close()


def _ended_early() -> StateError:
    return StateError(
        "the loader was closed, or another iteration of it was begun, before this one was over; "
        "give each reader a Loader of its own"
    )
