"""Fetches that a front waits for, answered by an engine in its own process.

A front that iterates in stages asks twice for a batch: for its bytes, and for the batch. The first
question has a channel of its own, because two threads ask and neither may receive the answer of the
other. The front sends the number of batches whose bytes it wants, counted from the beginning of the
run; the engine answers once for each job that brings some of them. The batches of a job are sent on
the other channel, once its bytes are here.
"""

from __future__ import annotations

import pickle
import threading
from contextlib import suppress
from typing import NamedTuple

from penstock.engine.channel import ChannelClosed, FrameChannel
from penstock.engine.process_errors import packed_error
from penstock.engine.runner import Runner


class FetchedJob(NamedTuple):
    """A job whose bytes are here."""

    num_batches: int = 0
    """0: there are no more."""
    fetch_ns: tuple[int, int] = (0, 0)
    """From when to when its bytes came."""
    error: bytes | None = None


class FetchAnswers:
    """Answers the fetches of one run, in a thread of its own."""

    def __init__(self, runner: Runner, channel: FrameChannel, *, only_asked: bool) -> None:
        self._runner = runner
        self._channel = channel
        self._only_asked = only_asked
        # The number of jobs whose bytes are here and that were not sent yet. `Runner.fetched` does
        # not find a job that `Runner.next` has returned, so the sender waits for this first.
        self._answered = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name="penstock-fetched", daemon=True)

    def start(self) -> None:
        """Begin to answer; the run begins afterwards."""
        if self._only_asked:
            self._runner.allow(0)
        self._thread.start()

    def wait(self) -> None:
        """Return when the bytes of the next job are here, or the run is over."""
        self._answered.acquire()

    def stop(self) -> None:
        """End it; a front that waits learns of it, because the channel is shut down."""
        self._answered.release()
        self._channel.shut_down()

    def _run(self) -> None:
        num_jobs = num_batches = 0
        with self._channel, suppress(ChannelClosed):
            while True:
                num_asked = int(self._channel.receive()[0])
                if self._only_asked:
                    self._runner.allow(num_asked)
                while num_batches < num_asked:
                    job = self._fetched(num_jobs)
                    self._channel.send(pickle.dumps(job, 5))
                    if not job.num_batches:
                        break
                    num_jobs, num_batches = num_jobs + 1, num_batches + job.num_batches

    def _fetched(self, number: int) -> FetchedJob:
        try:
            job = self._runner.fetched(number)
        except BaseException as error:
            return FetchedJob(error=packed_error(error))
        if job is None:
            return FetchedJob()
        self._answered.release()
        # A job whose planning failed has no batches; the thread that takes it raises the error.
        return FetchedJob(num_batches=max(1, len(job.slots)), fetch_ns=job.fetch_ns)
